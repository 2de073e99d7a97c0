"""How transformers' from_pretrained is told to quantize, or what is quantized in a checkpoint of another library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from halfbyte.formats import bitsandbytes, compressed_tensors, gpt_oss
from halfbyte.formats.settings import DEFAULT, check_format, check_settings
from halfbyte.formats.spec import FORMATS

METHOD = "halfbyte"
EXPERTS = "experts"  # the entry of a configuration, ours or bitsandbytes', that says in which format experts are


class HalfbyteConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How transformers is to quantize the linear layers of a model; and, in config.json, how they were quantized.

    format: "nf4", "fp4", "int4" or "mxfp4". block_size, nested: for nf4 and fp4, group_size: for int4, as
    `halfbyte.quantize` takes them, with its defaults. experts: whether the experts of mixture-of-experts models are
    quantized, too, without nested scales; or the name of another format for them, with its usual block size.
    modules_to_not_convert: names, ends of names or regular expressions of layers and experts that stay dense, besides
    the output layer and layers whose weight is tied to another, which always do.

    Raises TypeError or ValueError for arguments that do not fit.
    """

    def __init__(
        self,
        format: str = DEFAULT,
        *,
        block_size: int | None = None,
        group_size: int | None = None,
        nested: bool | None = None,
        experts: bool | str = True,
        modules_to_not_convert: list[str] | None = None,
    ) -> None:
        size, nested = check_settings(format, block_size, group_size, nested)
        if isinstance(experts, str):
            check_format(experts)
        elif not isinstance(experts, bool):
            raise TypeError(f"experts is {experts!r}; True, False or the name of a format is accepted")
        names = modules_to_not_convert
        if names is not None and not (
            isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        ):
            raise TypeError(f"modules_to_not_convert is {names!r}; a list of names is accepted")
        self.quant_method = METHOD
        self.format = format
        self.block_size: int | None = None
        self.group_size: int | None = None
        setattr(self, FORMATS[format].size_name, size)
        self.nested = nested
        self.experts = experts
        self.modules_to_not_convert = None if names is None else list(names)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The configuration that `to_dict` wrote."""
        settings = {key: value for key, value in config_dict.items() if key != "quant_method"}
        return super().from_dict(settings, return_unused_kwargs, **kwargs)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that `halfbyte.quantize` takes."""
        return {name: getattr(self, name) for name in ("format", "block_size", "group_size", "nested")}

    @property
    def experts_settings(self) -> dict[str, Any]:
        """Those for experts."""
        if isinstance(self.experts, str) and self.experts != self.format:
            spec = FORMATS[self.experts]
            return {"format": self.experts, spec.size_name: spec.block_size, "nested": False}
        return {**self.settings, "nested": False}


def config_from_bitsandbytes(path: Any, **options: Any) -> Any:
    """The model configuration of a checkpoint that bitsandbytes quantized to 4 bits, to load it as ours:

        from_pretrained(path, config=config_from_bitsandbytes(path))

    transformers lets no `quantization_config` replace the one that a checkpoint has, so it is replaced beforehand.
    Experts are read as well, one by one or, of gpt-oss, as Unsloth saves them. path, options: as
    `AutoConfig.from_pretrained` takes them. Raises ValueError for any other kind of checkpoint.
    """
    return _replaced(path, options, _of_bitsandbytes)


def config_from_compressed_tensors(path: Any, **options: Any) -> Any:
    """The same of a checkpoint with symmetric INT4 weights of compressed-tensors ("pack-quantized"), experts too."""
    return _replaced(path, options, _of_compressed_tensors)


def config_from_gpt_oss(path: Any, **options: Any) -> Any:
    """The same of gpt-oss' own checkpoints: MXFP4 experts are read as they are, and all else stays dense."""
    return _replaced(path, options, _of_gpt_oss)


def note_experts(config: Any, format: str) -> None:
    """Say in a model's configuration that its experts are 4-bit stacks of `format`, which saving it will write."""
    theirs = getattr(config, "quantization_config", None)
    if theirs is None:
        config.quantization_config = HalfbyteConfig(format)
    elif isinstance(theirs, dict):
        theirs[EXPERTS] = format
    else:
        setattr(theirs, EXPERTS, format)


def _replaced(path: Any, options: dict[str, Any], of: Callable[[str, dict[str, Any]], HalfbyteConfig]) -> Any:
    config = transformers.AutoConfig.from_pretrained(path, **options)
    theirs = getattr(config, "quantization_config", None)
    if theirs is None:
        theirs = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    theirs = theirs if isinstance(theirs, dict) else theirs.to_dict() if theirs is not None else {}
    config.quantization_config = of(repr(str(path)), theirs).to_dict()
    return config


def _kind(theirs: dict[str, Any]) -> str:
    return str(theirs.get("quant_method") or "not quantized")


def _of_bitsandbytes(path: str, theirs: dict[str, Any]) -> HalfbyteConfig:
    if not theirs.get("load_in_4bit"):
        raise ValueError(
            f"{path} is {_kind(theirs)}, without load_in_4bit; a 4-bit bitsandbytes checkpoint is accepted"
        )
    storage = theirs.get("bnb_4bit_quant_storage") or "uint8"
    if storage != "uint8" and not hasattr(HfQuantizer, "get_new_dtype"):
        # Such releases cast every floating tensor to the dtype of the model, and these are packed nibbles.
        raise ValueError(
            f"{path} has bnb_4bit_quant_storage {storage}, which transformers {transformers.__version__} would cast; "
            "transformers >= 5.21 reads it: pip install -U transformers"
        )
    return HalfbyteConfig(
        theirs.get("bnb_4bit_quant_type") or bitsandbytes.UNSAID,
        nested=bool(theirs.get("bnb_4bit_use_double_quant")),
        experts=theirs.get(EXPERTS, True),
        modules_to_not_convert=theirs.get("llm_int8_skip_modules"),
    )


def _of_compressed_tensors(path: str, theirs: dict[str, Any]) -> HalfbyteConfig:
    groups = [group.get("weights") or {} for group in (theirs.get("config_groups") or {}).values()]
    sizes = {weights.get("group_size") for weights in groups}
    symmetric = all(w.get("num_bits") == 4 and w.get("type") == "int" and w.get("symmetric") for w in groups)
    (size,) = sizes if len(sizes) == 1 else (None,)
    (format,) = compressed_tensors.FORMATS.values()
    if _kind(theirs) != "compressed-tensors" or not symmetric or size not in format.block_sizes:
        raise ValueError(
            f"{path} is {_kind(theirs)}; compressed-tensors' symmetric 4-bit integers in groups of one size, one of "
            f"{format.block_sizes}, are accepted"
        )
    return HalfbyteConfig(format.name, group_size=size)


def _of_gpt_oss(path: str, theirs: dict[str, Any]) -> HalfbyteConfig:
    (format,) = gpt_oss.FORMATS  # which transformers names as we do
    if _kind(theirs) != format:
        raise ValueError(f"{path} is {_kind(theirs)}; a checkpoint of gpt-oss with {format} experts is accepted")
    return HalfbyteConfig(format)
