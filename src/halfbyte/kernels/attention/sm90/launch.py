"""The CUDA kernel that attends with clusters: what it is compiled for, and how it is launched."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.sm90.plan import ClusterPlan, cluster_plan
from halfbyte.kernels.attention.spans import WIDTH, lowest
from halfbyte.kernels.common import compiler, workspace
from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import MOST_CLUSTER, DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, driver, kernels
from halfbyte.kernels.common.nvrtc import Constant, Variant, compile_ahead, read_source
from halfbyte.kernels.common.thread_cache import ThreadCache

ALIGNED = 16  # bytes, of a load
LAYOUT = ("", "18Q21q4I6f", "")  # Arguments in work.cuh
launches: ThreadCache[Hashable, tuple[Launch, Arguments]] = ThreadCache()


def plan_for(query: Tensor, keys: Tensor, values: Tensor, fresh: Fresh | None) -> ClusterPlan | None:
    """The plan, or None where this kernel is not for them. They are such as `attend` supports."""
    texts, heads, new, size = query.shape
    shared, tokens = keys.shape[1], keys.shape[2]
    tensors = [query, keys, values]
    if fresh is not None:
        if fresh.rotary % 16:
            return None
        tensors += [fresh.keys, fresh.values, fresh.cos, fresh.sin]
        tensors += [norm.weight for norm in (fresh.query_norm, fresh.key_norm) if norm is not None]
    if values.shape[3] != size or not all(map(is_aligned, tensors)) or driver() is None or compiler.find() is None:
        return None
    return cluster_plan(properties_of(query.get_device()), texts * shared, tokens, size, heads // shared * new)


def is_aligned(tensor: Tensor) -> bool:
    step = ALIGNED // tensor.itemsize
    return tensor.data_ptr() % ALIGNED == 0 and all(stride % step == 0 for stride in tensor.stride()[:-1])


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    spans: Tensor | None,
    fresh: Fresh | None,
    settled: bool,
    plan: ClusterPlan,
) -> Tensor:
    """As `attend` in attend.py, by a plan that `plan_for` gave."""
    texts, heads, new, size = query.shape
    shared, index = keys.shape[1], query.get_device()
    out = query.new_empty((texts, new, heads, size))
    kinds = (
        query.dtype, mask_kind(mask), sinks_kind(None if sinks is None else sinks.dtype), spans is not None,
        bool(softcap), fresh is not None, turning_of(fresh),
    )  # fmt: skip
    key = (index, texts * shared, heads // shared, new, size, plan, settled, *kinds)

    def make() -> tuple[Launch, Arguments]:
        others = (not settled,) if fresh is not None else ()  # of a step's first layer, and of those behind it
        variants = [
            variant(properties_of(index), heads // shared, new, size, plan, one, *kinds) for one in (settled, *others)
        ]
        compile_ahead(variants)
        return launch_of(index, variants[0], texts * shared, heads // shared * new, plan), Arguments(LAYOUT, (), ())

    launch, told = launches.get(key, make)
    stream, sums = torch._C._cuda_getCurrentRawStream(index), plan.sums(texts * shared, heads // shared * new, size)
    taken = workspace.take(query.device, stream, sums)
    told.set(*arguments(query, keys, values, mask, scale, softcap, sinks, spans, fresh, taken, out))
    launch(stream, told.parameters)
    return out


def arguments(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    spans: Tensor | None,
    fresh: Fresh | None,
    taken: tuple[int, int, int],
    out: Tensor,
) -> tuple[Any, ...]:
    """What work.cuh's Arguments hold. The query stands for tensors that there are not, and is not read as such. taken:
    what `workspace.take` says."""
    sums, stale, fours = taken
    new: tuple[Tensor, ...] = (query,) * 7
    strides: tuple[int, ...] = (0,) * 8
    numbers: tuple[float, ...] = (0.0,) * 3
    if fresh is not None:
        added, values_added, cos, sin, slot, *norms = fresh.tensors(query)
        new, of = (added, values_added, cos, sin, *norms, slot), fresh.constants
        strides = *added.stride()[:3], *values_added.stride()[:3], fresh.cos_text, cos.stride(1)
        numbers = of["QUERY_EPSILON"], of["KEY_EPSILON"], of["OFFSET"]
    others = (query if tensor is None else tensor for tensor in (mask, spans, None, sinks))
    steps = (0, 0) if mask is None else (0 if len(mask) == 1 else mask.stride(0), mask.stride(2))
    return (
        *(tensor.data_ptr() for tensor in (query, *new, keys, values, *others)), sums, stale, 0, out.data_ptr(),
        *query.stride()[:3], *keys.stride()[:2], *values.stride()[:2], *steps, *strides,
        *(0, 0, 0), fours, keys.shape[2], keys.shape[1], WIDTH, 0, scale, softcap or 0.0,
        0.0 if mask is None else lowest(mask), *numbers,
    )  # fmt: skip


def mask_kind(mask: Tensor | None) -> int:
    return 0 if mask is None else 1 if mask.dtype is torch.bool else 2


def sinks_kind(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else dtype.itemsize // 2


def turning_of(fresh: Fresh | None) -> tuple[int, bool, bool, bool]:
    """Numbers of a head that turn, whether angles are of a half, and whether queries and keys are normed."""
    if fresh is None:
        return 0, False, False, False
    return fresh.rotary, fresh.halves, fresh.query_norm is not None, fresh.key_norm is not None


def variant(
    properties: DeviceProperties,
    group: int,
    new: int,
    size: int,
    plan: ClusterPlan,
    settled: bool,
    dtype: torch.dtype,
    mask: int,
    sinks: int,
    spans: bool,
    capped: bool,
    puts: bool,
    turning: tuple[int, bool, bool, bool],
    *,
    page: int = 0,
    overlaps: bool = True,
) -> Variant:
    """What is compiled. turning: as `turning_of` says it. page: tokens of a page, of a cache in pages."""
    rotary, halves, query_norm, key_norm = turning
    constants: dict[str, Constant] = {
        "x": TYPES[dtype], "size": size, "group": group, "fresh": new, "columns": plan.columns,
        "token_warps": plan.token_warps, "ctas": plan.ctas, "in_memory": plan.in_memory, "helpers": plan.helpers,
        "turns": plan.turns, "at_once": plan.at_once, "mask": mask, "spans": spans,
        "sinks": sinks, "capped": capped, "puts": puts, "rotary": rotary, "halves": halves,
        "query_norm": query_norm, "key_norm": key_norm, "early": settled, "overlaps": overlaps, "mma_k": 16,
        "page": page,
        "shared_bytes": plan.shared_bytes(group * new, size, new if puts else 0),
    }  # fmt: skip
    return Variant.of(source(), properties.capability, constants)


def launch_of(index: int, compiled: Variant, heads: int, rows: int, plan: ClusterPlan) -> Launch:
    shared = int(dict(compiled.constants)["shared_bytes"])
    (function,) = kernels(index, compiled, (("attend", shared),), wide=plan.cluster > MOST_CLUSTER)
    cluster = plan.cluster if plan.cluster > 1 else 0
    return Launch(function, grid(heads, plan), plan.threads(rows), shared, cluster, overlaps=True)


def grid(heads: int, plan: ClusterPlan) -> tuple[int, int]:
    """CTAs along x and y, as share.cuh finds a head of keys and a CTA of it there. heads: of keys, of all texts."""
    if plan.in_memory:
        return heads * plan.ctas, 1
    return heads + plan.helpers // plan.ctas, plan.ctas


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[2])
