"""Compile ahead what `linear` will ask for, so that no first call has to wait for a compiler.

Which variants of the kernels that takes follows from the choices which `linear` itself makes
(kernels/linear/dispatch.py), and for layers that `accelerate` computes in one launch from those of
models/projections.py.
No GPU is needed, and of checkpoints only headers and the few bytes that say how a weight was quantized are read.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.spec import FORMATS
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceProperties, properties_for, properties_of
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear.dispatch import choose_back
from halfbyte.kernels.linear.problem import INVARIANT_ROWS, Problem, problem_of
from halfbyte.models.products import Fused, Group, products_of, variant_of_product


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


def of_checkpoint(path: Path, dtypes: Sequence[torch.dtype], settings: Settings) -> set[Group | Fused]:
    """Products of x of these dtypes with the 4-bit weights of a checkpoint; where it has none, with those that
    `halfbyte quantize` would convert. Each alone, fused projections together, and what captured steps fuse with them.

    Raises ValueError where there are none of either kind.
    """
    from halfbyte.checkpoints.experts import SavedStacks, is_one, is_stack
    from halfbyte.checkpoints.plan import quantized_names, read_quantized
    from halfbyte.checkpoints.reader import DTYPES, open_checkpoint
    from halfbyte.checkpoints.select import select

    checkpoint = open_checkpoint(path)
    x = torch.empty(0, dtype=torch.float32, device="meta")
    weights: dict[str, Problem] = {}

    def has_bias(name: str) -> bool:
        return f"{name.removesuffix('weight')}bias" in checkpoint.entries

    names = quantized_names(checkpoint)
    for name in names:
        if is_one(name) or is_stack(name):
            continue  # experts have kernels of their own
        q = read_quantized(checkpoint, name, SavedStacks.of(None), planning=True)
        if len(q.shape) == 2:
            weights[name] = problem_of(x, q, x if has_bias(name) else None)
    for name in () if names else select(checkpoint.entries):
        entry = checkpoint.entries[name]
        n, k = entry.shape
        if FORMATS[settings.format].along_k and k % settings.block_size:
            continue  # such a weight is left as it is
        weights[name] = _to_be_quantized(n, k, x.dtype, DTYPES[entry.dtype], settings, has_bias(name))
    if not weights:
        raise ValueError(f"{path} has no weight of a linear layer, in 4 bits or to be quantized")
    return {_in(dtype, product) for product in products_of(weights, _config(path)) for dtype in dtypes}


def settings_of(groups: Iterable[Group | Fused]) -> Settings:
    """How most weights of a checkpoint are quantized, or will be."""
    products = [one for group in groups for one in (group.group if isinstance(group, Fused) else group)]
    counts = Counter(Settings(one.format, one.block_size, one.nested > 0) for one in products)
    return counts.most_common(1)[0][0]


def _in(dtype: torch.dtype, product: Group | Fused) -> Group | Fused:
    if isinstance(product, Fused):
        return product._replace(group=tuple(replace(one, dtype=dtype) for one in product.group))
    return tuple(replace(one, dtype=dtype) for one in product)


def _config(path: Path) -> dict[str, Any]:
    """The text model's part of config.json, or nothing where there is none."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found.get("text_config") or found


def _to_be_quantized(
    n: int, k: int, dtype: torch.dtype, weight_dtype: torch.dtype, settings: Settings, bias: bool
) -> Problem:
    format, block_size, nested = settings
    plain = FORMATS[format].scale_dtype
    scale = torch.uint8 if nested else weight_dtype if plain is None else getattr(torch, plain)
    return Problem(dtype, n, k, format, block_size, scale, nested=NESTED_BLOCK_SIZE if nested else 0, bias=bias)


def variants(
    groups: Iterable[Group | Fused], rows: Iterable[int], properties: DeviceProperties, gradients: bool = False
) -> list[Variant]:
    """What these products compile on such a GPU for x with these numbers of rows, batch-invariant or not, and with
    `gradients` also what the gradients of x do; each once."""
    counts = sorted(set(rows))
    # With batch_invariant so many rows go at a time, and then the rest.
    invariant = sorted({part for m in counts for part in (min(m, INVARIANT_ROWS), m % INVARIANT_ROWS) if part})
    cases = [(m, False) for m in counts] + [(m, True) for m in invariant]
    found: dict[Variant, None] = {}
    for product in sorted(groups, key=repr):
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
