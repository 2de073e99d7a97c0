"""Pairs of a token and an expert, sorted by expert on the device: one launch of sort.cu, which no host waits for."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.common.device import HOPPER, DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.thread_cache import ThreadCache

CTAS, WARPS = 8, 8  # of one cluster, where a GPU has clusters; of a CTA
FEW = 1024  # pairs that one CTA sorts sooner than a cluster does
# Rows of a tile from which on tiles that are full come first. Smaller ones are bound by W, which those of an expert
# read together.
FULL_FIRST = 128
MOST_EXPERTS = 4 * 32 * WARPS  # four a thread
LAYOUT = ("", "2Q4I", "")  # sort.cu's Arguments, all of which change

launches: ThreadCache[Hashable, tuple[Launch, Arguments]] = ThreadCache()


class Routes(NamedTuple):
    """table: what linear/device/grouped.cuh draws, int32. places: of each pair among the sorted ones, or -1; a part of
    that."""

    table: Tensor
    places: Tensor


def sort(ids: Tensor, experts: int, tile_m: int, tiles: int) -> Routes:
    """The routes of pairs whose experts are `ids`, int32 or int64, contiguous, on the current device.

    tiles: that the table has room for, no fewer than there can be.
    """
    pairs, index = ids.numel(), ids.get_device()
    aligned = -(-pairs // 4) * 4
    first = 4 * (1 + tiles) + aligned
    found = torch.empty(first + aligned + pairs, dtype=torch.int32, device=ids.device)
    key = index, tile_m, experts, ctas_of(pairs, properties_of(index))
    launch, arguments = launches.get(key, lambda: _prepare(index, pairs, tile_m, experts))
    arguments.set(ids.data_ptr(), found.data_ptr(), pairs, experts, ids.dtype is torch.int64, tiles)
    launch(torch._C._cuda_getCurrentRawStream(index), arguments.parameters)
    return Routes(found, found[first : first + pairs])


def variant(pairs: int, tile_m: int, properties: DeviceProperties) -> Variant:
    """What is compiled for so many pairs."""
    constants: dict[str, Constant] = {
        "tile_m": tile_m, "full_first": tile_m >= FULL_FIRST, "x": "Type::bf16", "ctas": ctas_of(pairs, properties),
        "overlaps": properties.ptx >= HOPPER,
    }  # fmt: skip
    return Variant.of(source(), properties.capability, constants)


def ctas_of(pairs: int, properties: DeviceProperties) -> int:
    return CTAS if properties.ptx >= HOPPER and pairs > FEW else 1


def shared_bytes(experts: int) -> int:
    return 4 * ((WARPS + 4) * experts + 3 * WARPS)


def _prepare(index: int, pairs: int, tile_m: int, experts: int) -> tuple[Launch, Arguments]:
    properties, shared = properties_of(index), shared_bytes(experts)
    (function,) = kernels(index, variant(pairs, tile_m, properties), (("sort_pairs", shared),), carveout=100)
    ctas = ctas_of(pairs, properties)
    cluster = ctas if ctas > 1 else 0
    launch = Launch(function, (1, ctas), 32 * WARPS, shared, cluster, overlaps=properties.ptx >= HOPPER)
    return launch, Arguments(LAYOUT, (), ())


@cache
def source() -> str:
    path = Path(__file__).with_name("sort.cu")
    return read_source(path, root=path.parents[1])
