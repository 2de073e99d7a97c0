"""The CUDA kernel that norms x, scores experts and chooses among them (choose.cu): when it is for a router, what it is
compiled for, and how it is launched."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.kernels.common import compiler
from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import HOPPER, MOST_CLUSTER, DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, driver, kernels
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.thread_cache import ThreadCache

TOKENS, WARPS, CHUNK = 8, 16, 32  # tokens of a cluster, warps of a CTA, numbers of K that a warp takes at a time
TILE = 16  # experts
MOST_TOKENS = 128  # beyond, each cluster's reading of the weight costs more than a launch
MOST_EXPERTS, MOST_K, MOST_CHOSEN = 512, 8192, 32
MOST_NORMED_K, MOST_NORMED_EXPERTS = 4096, 256  # whose numbers a warp has registers for, beside those of all its x
ALIGNED = 16  # bytes, of a load
LAYOUT = ("", "7QI2f", "4x")  # choose.cu's Arguments, all of which change

launches: ThreadCache[Hashable, tuple[Launch, Arguments]] = ThreadCache()


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, dtype: torch.dtype) -> bool:
    """Whether `choose` is for x [T, K] on a CUDA device, a router's weight [E, K], and weights in `dtype`."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    experts, k = weight.shape
    return (
        x.dtype in (torch.float16, torch.bfloat16)
        and dtype in (x.dtype, torch.float32)
        and all(t.dtype is x.dtype and t.device == x.device and _is_in_order(t) for t in tensors)
        and 0 < len(x) <= MOST_TOKENS
        and 0 < top_k <= min(experts, MOST_CHOSEN)
        and experts <= MOST_EXPERTS
        and 0 < k <= MOST_K
        and k % CHUNK == 0
        and properties_of(x.get_device()).ptx >= HOPPER
        and driver() is not None
        and compiler.find() is not None
    )


def _is_in_order(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNED == 0


def supports_norm(norm: Norm, x: Tensor, experts: int) -> bool:
    """Whether x that `supports` says may be normed in the same launch."""
    weight = norm.weight
    alike = weight.dtype is x.dtype and weight.device == x.device and _is_in_order(weight)
    return alike and x.shape[1] == weight.numel() <= MOST_NORMED_K and experts <= MOST_NORMED_EXPERTS


def choose(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    before: bool,
    normalizes: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, normed if there is a norm, and the (ids, weights) that `choose` in router_reference.py gives it; of what
    `supports` and `supports_norm` say, on the current device. With a norm, no kernel just ahead in the stream may write
    the weight or the norm's."""
    (tokens, k), experts, index = x.shape, len(weight), x.get_device()
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=x.device)
    weights = torch.empty((tokens, top_k), dtype=dtype, device=x.device)
    normed = x if norm is None else torch.empty_like(x)
    narrow = dtype is not torch.float32
    shape = (x.dtype, experts, k, top_k, before, normalizes, bias is not None, narrow, norm is not None)
    launch, arguments = launches.get((index, -(-tokens // TOKENS), shape), lambda: _prepare(index, tokens, *shape))
    given = x, weight, weight if bias is None else bias, weight if norm is None else norm.weight, ids, weights, normed
    of_norm = (0.0, 0.0) if norm is None else norm[1:]
    arguments.set(*(t.data_ptr() for t in given), tokens, *of_norm)
    launch(torch._C._cuda_getCurrentRawStream(index), arguments.parameters)
    return normed, ids, weights


def cluster_of(experts: int) -> int:
    """CTAs that share the experts."""
    tiles = -(-experts // TILE)
    return min(MOST_CLUSTER, 1 << (tiles - 1).bit_length())


def shared_bytes(experts: int, cluster: int, norm_k: int = 0) -> int:
    """choose.cu lays it out, and does not compile where this sum is another than its own. norm_k: K of what is normed,
    or 0."""
    scores = 4 * WARPS * _tiles(experts, cluster) * TILE * TOKENS + 4 * -(-TOKENS // cluster) * experts
    norm = 2 * norm_k + 4 * WARPS * TOKENS if norm_k else 0
    return -(-scores // 16) * 16 + norm + (16 if cluster > 1 else 0)  # and a barrier


def _tiles(experts: int, cluster: int) -> int:
    return -(-experts // (TILE * cluster))


def variant(
    properties: DeviceProperties,
    dtype: torch.dtype,
    experts: int,
    k: int,
    top_k: int,
    before: bool,
    normalizes: bool,
    bias: bool,
    narrow: bool,
    norm: bool = False,
    *,
    cluster: int = 0,
    overlaps: bool = True,
) -> Variant:
    """What is compiled. cluster: 0 for that of `cluster_of`."""
    cluster = cluster or cluster_of(experts)
    constants: dict[str, Constant] = {
        "x": TYPES[dtype], "experts": experts, "k": k, "top_k": top_k, "cluster": cluster,
        "tiles": _tiles(experts, cluster), "before": before, "normalizes": normalizes, "bias": bias, "narrow": narrow,
        "norm": norm, "overlaps": overlaps, "mma_k": 16,
        "shared_bytes": shared_bytes(experts, cluster, k if norm else 0),
    }  # fmt: skip
    return Variant.of(source(), properties.capability, constants)


def _prepare(
    index: int, tokens: int, dtype: torch.dtype, experts: int, k: int, top_k: int, *kinds: bool
) -> tuple[Launch, Arguments]:
    cluster = cluster_of(experts)
    shared = shared_bytes(experts, cluster, k if kinds[-1] else 0)
    compiled = variant(properties_of(index), dtype, experts, k, top_k, *kinds)
    (function,) = kernels(index, compiled, (("choose", shared),))
    grid = -(-tokens // TOKENS), cluster
    launch = Launch(function, grid, 32 * WARPS, shared, cluster if cluster > 1 else 0, overlaps=True)
    return launch, Arguments(LAYOUT, (), ())


@cache
def source() -> str:
    path = Path(__file__).with_name("choose.cu")
    return read_source(path, root=path.parents[1])
