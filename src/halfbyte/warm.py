"""Compile ahead what `linear` and blocks of experts will ask for, so that no first call has to wait for a compiler.

Which variants of the kernels that takes follows from the choices which `linear` itself makes
(kernels/linear/dispatch.py), for layers that `accelerate` computes in one launch from those of models/projections.py,
and for experts from those of kernels/experts/cuda.py.
No GPU is needed, and of checkpoints only headers and the few bytes that say how a weight was quantized are read.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceProperties, properties_for, properties_of
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear.dispatch import choose_back
from halfbyte.kernels.linear.problem import INVARIANT_ROWS, Problem, problem_of
from halfbyte.kernels.linear.sm90_decode.launch import rows_of
from halfbyte.models.products import Fused, Group, products_of, variant_of_product
from halfbyte.warm_experts import Experts, Held, blocks

if TYPE_CHECKING:
    from halfbyte.checkpoints.reader import Checkpoint

X = torch.empty(0, dtype=torch.float32, device="meta")  # any: its dtype is told later
Product = Group | Fused | Experts


class Settings(NamedTuple):
    """How weights that are not in 4 bits yet will be quantized. block_size: for int4 the group size."""

    format: str
    block_size: int
    nested: bool


@dataclass(frozen=True)
class Report:
    """variants: how many are in the cache now. cached: how many of them were there before. folder: the cache."""

    variants: int
    cached: int
    seconds: float
    folder: Path


def of_shapes(
    shapes: Iterable[tuple[int, int]], dtypes: Sequence[torch.dtype], settings: Settings, bias: bool = False
) -> set[Group]:
    """Products of x of these dtypes with weights [N, K] to be quantized, and with `bias` also those with a bias.

    Without names nobody knows which are fused: each is alone. Raises ValueError for a K that groups do not divide.
    """
    found: set[Group] = set()
    for n, k in shapes:
        FORMATS[settings.format].check_shape((n, k), settings.block_size)
        for dtype in dtypes:
            for added in {False, bias}:
                found.add((_to_be_quantized(n, k, dtype, dtype, settings, added),))
    return found


def of_checkpoint(path: Path, dtypes: Sequence[torch.dtype], settings: Settings) -> set[Product]:
    """Products of x of these dtypes with the 4-bit weights of a checkpoint; where it has none, with those that
    `halfbyte quantize` would convert. Each alone, fused projections together, and what captured steps fuse with them;
    experts as whole blocks.

    Raises ValueError where there are none of either kind.
    """
    from halfbyte.checkpoints.plan import quantized_names
    from halfbyte.checkpoints.reader import open_checkpoint

    checkpoint, config = open_checkpoint(path), _config(path)
    text = config.get("text_config") or config
    if names := quantized_names(checkpoint):
        weights, experts = _in_4_bits(checkpoint, names, config, text)
    else:
        weights, experts = _dense(checkpoint, text, settings)
    if not weights and not experts:
        raise ValueError(f"{path} has no weight of a linear layer, in 4 bits or to be quantized")
    found = products_of(weights, text) | experts
    return {_in(dtype, product) for product in found for dtype in dtypes}


def settings_of(products: Iterable[Product]) -> Settings:
    """How most weights of a checkpoint are quantized, or will be; where there are no others, its experts."""
    products = list(products)
    groups = [one.group if isinstance(one, Fused) else one for one in products if not isinstance(one, Experts)]
    groups = groups or [(one.gate_up, one.down) for one in products if isinstance(one, Experts)]
    counts = Counter(Settings(one.format, one.block_size, one.nested > 0) for group in groups for one in group)
    return counts.most_common(1)[0][0]


def _in_4_bits(
    checkpoint: Checkpoint, names: Sequence[str], config: Mapping[str, Any], text: Mapping[str, Any]
) -> tuple[dict[str, Problem], set[Experts]]:
    """The weights of linear layers, by their names, and the blocks of experts."""
    from halfbyte.checkpoints.experts import SavedStacks, place_of
    from halfbyte.checkpoints.plan import read_quantized

    saved = SavedStacks.of(config)

    def problem(name: str, q: QuantizedWeight) -> Problem:
        return problem_of(X, q, X if _has_bias(checkpoint, name) else None)

    def held(name: str) -> Held:
        q = read_quantized(checkpoint, name, saved, planning=True)
        return (q.shape[0], problem(name, rows_of(q))) if len(q.shape) == 3 else (1, problem(name, q))

    weights = {}
    for name in names:
        if place_of(name) is None:
            q = read_quantized(checkpoint, name, saved, planning=True)
            if len(q.shape) == 2:
                weights[name] = problem(name, q)
    return weights, set(blocks(names, held, text))


def _dense(
    checkpoint: Checkpoint, text: Mapping[str, Any], settings: Settings
) -> tuple[dict[str, Problem], set[Experts]]:
    """The same of weights that are to be quantized; those that cannot be cut into blocks are left as they are."""
    from halfbyte.checkpoints.experts import cut, is_stack, layers
    from halfbyte.checkpoints.reader import DTYPES
    from halfbyte.checkpoints.select import select

    entries = checkpoint.entries
    weights = {}
    for name in select(entries):
        n, k = entries[name].shape
        if not FORMATS[settings.format].along_k or k % settings.block_size == 0:
            kind, bias = DTYPES[entries[name].dtype], _has_bias(checkpoint, name)
            weights[name] = _to_be_quantized(n, k, X.dtype, kind, settings, bias)
    of_experts = layers(entries, text)
    misfits = set(cut(of_experts.values(), settings.format, settings.block_size))
    sides = {name: side for one in of_experts.values() for name, side in zip(one.names, one.shapes, strict=True)}

    def held(name: str) -> Held:
        (n, k), count = sides[name], entries[name].shape[0] if is_stack(name) else 1
        kind, bias, plain = DTYPES[entries[name].dtype], _has_bias(checkpoint, name), settings._replace(nested=False)
        return count, _to_be_quantized(count * n, k, X.dtype, kind, plain, bias)

    return weights, set(blocks((name for name in sides if name not in misfits), held, text))


def _has_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Of a layer, or of a stack of experts."""
    return bool({f"{name.removesuffix('weight')}bias", f"{name}_bias"} & checkpoint.entries.keys())


def _in(dtype: torch.dtype, product: Product) -> Product:
    if isinstance(product, Experts):
        return product.of_dtype(dtype)
    if isinstance(product, Fused):
        return product._replace(group=tuple(replace(one, dtype=dtype) for one in product.group))
    return tuple(replace(one, dtype=dtype) for one in product)


def _config(path: Path) -> dict[str, Any]:
    """config.json, or nothing where there is none."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _to_be_quantized(
    n: int, k: int, dtype: torch.dtype, weight_dtype: torch.dtype, settings: Settings, bias: bool
) -> Problem:
    format, block_size, nested = settings
    plain = FORMATS[format].scale_dtype
    scale = torch.uint8 if nested else weight_dtype if plain is None else getattr(torch, plain)
    return Problem(dtype, n, k, format, block_size, scale, nested=NESTED_BLOCK_SIZE if nested else 0, bias=bias)


def variants(
    products: Iterable[Product], rows: Iterable[int], properties: DeviceProperties, gradients: bool = False
) -> list[Variant]:
    """What these products compile on such a GPU for x with these numbers of rows, batch-invariant or not, and with
    `gradients` also what the gradients of x do; each once. Of experts neither of these, and rows are tokens."""
    counts = sorted(set(rows))
    # With batch_invariant so many rows go at a time, and then the rest.
    invariant = sorted({part for m in counts for part in (min(m, INVARIANT_ROWS), m % INVARIANT_ROWS) if part})
    cases = [(m, False) for m in counts] + [(m, True) for m in invariant]
    found: dict[Variant, None] = {}
    for product in sorted(products, key=repr):
        if isinstance(product, Experts):
            found |= dict.fromkeys(variant for m in counts for variant in product.variants(m, properties))
            continue
        group = product.group if isinstance(product, Fused) else product
        for m, batch_invariant in cases if all(min(one.n, one.k) for one in group) else ():
            variant = variant_of_product(m, product, properties, batch_invariant)
            if variant is not None:
                found[variant] = None
            alone = replace(group[0], bias=False)
            asked = gradients and not batch_invariant and len(group) == 1
            if asked and (back := choose_back(m, alone, properties)) is not None:
                found[back.variant(alone, properties)] = None
    return list(found)


def warm(variants: Sequence[Variant], progress: Callable[[str, int, int], None] | None = None) -> Report:
    """Compile those that the cache lacks, on all CPUs: NVRTC works without the interpreter lock.

    progress: called with "", how many are compiled and how many will be. Raises ImportError without a compiler and
    OSError where the cache cannot be written. What was compiled before an error or an interrupt is kept.
    """
    start = time.monotonic()
    missing = [variant for variant in variants if nvrtc.cached(variant) is None]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            compiled = [pool.submit(_compile, variant) for variant in missing]
            for done, future in enumerate(as_completed(compiled), 1):
                future.result()
                if progress is not None:
                    progress("", done, len(missing))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    cached = len(variants) - len(missing)
    return Report(len(variants), cached, time.monotonic() - start, nvrtc.cache_directory())


def _compile(variant: Variant) -> None:
    nvrtc.keep(variant, nvrtc.compile_cubin(variant.source, variant.capability, dict(variant.constants)))


def properties_of_target(target: str | None, sms: int | None) -> DeviceProperties:
    """Those of the target, or of the GPU at hand where none is named. Raises ValueError where there is neither."""
    if target is not None:
        return properties_for(target, sms)
    if sms is not None:
        raise ValueError("sms says how large another GPU is than the one here; name it with --target")
    if torch.version.hip or not torch.cuda.is_available():
        raise ValueError("there is no NVIDIA GPU here; name the one to compile for, as --target sm_90")
    return properties_of(torch.cuda.current_device())


def parse_shape(text: str) -> tuple[int, int]:
    """(N, K) of "NxK"."""
    if not (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip().lower())):
        raise ValueError(f"shape {text!r} is not a weight's; write NxK, as 4096x14336")
    return int(match[1]), int(match[2])


def parse_rows(text: str) -> list[int]:
    """The numbers in "1-16,64"."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError(f"rows {text!r} are not numbers of rows; write 1-16,64")
        found.update(range(first, last + 1))
    return sorted(found)
