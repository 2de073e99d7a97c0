"""Which checkpoints halfbyte serves, read from the `quantization_config` of their config.json. Nothing needs vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.formats import gpt_oss
from halfbyte.formats.compressed_tensors import GROUP_SIZES
from halfbyte.formats.settings import DEFAULT, check_settings
from halfbyte.serving.arrivals import LAYOUTS

METHOD = "halfbyte"
MXFP4_METHODS = (*gpt_oss.FORMATS, "gpt_oss_mxfp4")  # gpt-oss' quant_method, and what vLLM makes of it on its way
STACKS = (".experts.gate_up_proj_scale", ".experts.down_proj_scale")  # of models that transformers saved with halfbyte
GPT_OSS = "gpt-oss"  # its layout, by its name in LAYOUTS


def layouts_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The layouts, by their names in LAYOUTS, in which such a checkpoint keeps 4-bit weights.

    Raises ValueError for a kind of checkpoint that is not read, saying why.
    """
    method = config.get("quant_method")
    if method == METHOD:
        return tuple(LAYOUTS)
    if method == "bitsandbytes":
        if not config.get("load_in_4bit"):
            raise ValueError("the checkpoint is bitsandbytes' without load_in_4bit; halfbyte serves its 4-bit weights")
        return (method,)
    if method == "compressed-tensors":
        _check_compressed_tensors(config)
        return (method,)
    if method in MXFP4_METHODS:
        return (GPT_OSS,)
    known = (*(layout for layout in LAYOUTS if layout != GPT_OSS), MXFP4_METHODS[0], METHOD)
    raise ValueError(f"the checkpoint's quant_method is {method!r}; halfbyte serves {', '.join(known)}")


def claims(
    config: Mapping[str, Any], asked: str | None, model_type: str | None = None, others_can: bool = True
) -> bool:
    """Whether halfbyte takes a checkpoint. asked: the quantization method that the user named, if any.

    bitsandbytes' and halfbyte's own need no flag. compressed-tensors has kernels in vLLM itself, so it must be asked
    for; so must gpt-oss, where `others_can` run it on this device. model_type: of the model's configuration. Raises
    ValueError where halfbyte was asked for and cannot.
    """
    is_mxfp4 = config.get("quant_method") in MXFP4_METHODS
    if asked == METHOD:
        layouts_of(config)
        if is_mxfp4 and model_type != "gpt_oss":
            raise ValueError(f"the checkpoint is mxfp4 of {model_type!r}; of such, halfbyte serves gpt-oss alone")
        return True
    if is_mxfp4:
        return model_type == "gpt_oss" and not others_can and asked in (None, *MXFP4_METHODS[:1])
    if asked is not None or config.get("quant_method") not in ("bitsandbytes", METHOD):
        return False
    return config.get("quant_method") == METHOD or bool(config.get("load_in_4bit"))


def _check_compressed_tensors(config: Mapping[str, Any]) -> None:
    if config.get("format") != "pack-quantized":
        raise ValueError(f"the checkpoint's format is {config.get('format')!r}; of compressed-tensors', "
                         "halfbyte serves 'pack-quantized'")  # fmt: skip
    for name, group in (config.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        expected: dict[str, Sequence[Any]] = {
            "num_bits": (4,), "type": ("int",), "symmetric": (True,), "strategy": ("group",),
            "group_size": GROUP_SIZES, "actorder": (None, False),
        }  # fmt: skip
        for key, accepted in expected.items():
            if weights.get(key) not in accepted:
                raise ValueError(
                    f"{name} of the checkpoint has weights of {key} {weights.get(key)!r}; "
                    f"halfbyte serves {' or '.join(map(repr, accepted))}"
                )
        if group.get("input_activations"):
            raise ValueError(f"{name} of the checkpoint quantizes activations; halfbyte serves 4-bit weights alone")


def settings_of(options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """How dense weights are rounded, as `quantize` takes it, and the names of layers that stay dense.

    options: format, block_size, group_size, nested and modules_to_not_convert, each with `HalfbyteConfig`'s meaning.
    Raises ValueError or TypeError for options that are none or do not fit.
    """
    known = ("format", "block_size", "group_size", "nested", "modules_to_not_convert")
    if unknown := sorted(set(options) - {*known, "quant_method"}):
        raise ValueError(f"{', '.join(unknown)}: known options are {', '.join(known)}")
    format = options.get("format", DEFAULT)
    given = {name: options.get(name) for name in known[1:4]}
    check_settings(format, given["block_size"], given["group_size"], given["nested"])
    names = options.get("modules_to_not_convert") or ()
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"modules_to_not_convert is {names!r}; a list of names is accepted")
    return {"format": format, **given}, tuple(names)


def stays_dense(name: str, names: Iterable[str]) -> bool:
    """Whether one of `names` is the layer `name`, the end of it, a module around it, or a pattern of it."""
    return any(name == each or name.endswith(f".{each}") or re.match(rf"{each}(\.|$)", name) for each in names)


def holds_experts(path: Path) -> bool:
    """Whether a checkpoint's experts are in 4 bits, one by one or, as gpt-oss', in stacks. path: its folder.

    bitsandbytes leaves the stacked experts of transformers dense, and its configuration does not say so. Raises
    ValueError where they are in stacks as halfbyte saves them.
    """
    names = names_of(path)
    if own := next((name for name in names if name.endswith(STACKS)), None):
        raise ValueError(
            f"the checkpoint keeps experts in stacks of halfbyte's own ({own}), which vLLM's models do not read: serve "
            "it with --engine transformers, or what it was made of with quantization='halfbyte'"
        )
    return any(".experts." in name and name.endswith((".absmax", "_packed", "_blocks")) for name in names)


def names_of(path: Path) -> list[str]:
    """The names of all tensors of a checkpoint. path: its folder."""
    return [name for file in _files(path) for name in _names(file)]


def _files(path: Path) -> list[Path]:
    """Those that name the tensors: the index, or the files themselves."""
    return sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))


def _names(file: Path) -> list[str]:
    with file.open("rb") as opened:
        if file.suffix == ".json":
            return list(json.load(opened)["weight_map"])
        return list(json.loads(opened.read(int.from_bytes(opened.read(8), "little"))))
