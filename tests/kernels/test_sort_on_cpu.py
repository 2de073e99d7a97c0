"""sort.cu's own source on a CPU: what it writes is what plain torch says, with one CTA and with a cluster."""

from __future__ import annotations

import struct
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import Shape
from gpus import H200
from routes import routes_of, written

from halfbyte.kernels.experts import sort

# Pairs, experts, rows of a tile. From 1025 pairs on a cluster sorts; more than 16,384 do not fit in registers.
CASES = [(1, 3, 16), (30, 5, 8), (1000, 130, 64), (1025, 8, 128), (5000, 300, 96), (17000, 4, 256)]


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("pairs", "experts", "tile_m"), CASES)
def test_sorts(pairs: int, experts: int, tile_m: int, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(pairs)
    ids = torch.randint(-1, experts + 1, (pairs,), dtype=dtype)
    ids[::3] = 1  # that many want
    room = pairs // tile_m + experts
    right = routes_of(ids, experts, tile_m, room)
    aligned = -(-pairs // 4) * 4
    table = torch.full((4 * (1 + room) + 3 * aligned,), -77, dtype=torch.int32)
    bits = struct.pack(
        "".join(sort.LAYOUT), ids.data_ptr(), table.data_ptr(), pairs, experts, dtype is torch.int64, room
    )
    ctas = sort.ctas_of(pairs, H200)
    shape = Shape(1, 32 * sort.WARPS, sort.shared_bytes(experts), y=ctas, cluster=ctas)
    assert cuda_on_cpu.run(tmp_path, sort.variant(pairs, tile_m, H200), "sort_pairs", bits, shape, []) == 0
    found = written(table, room, pairs, len(right.order))
    assert found.count == right.count
    for name in ("tiles", "order", "places", "in_tiles"):
        assert torch.equal(getattr(found, name), getattr(right, name)), name
