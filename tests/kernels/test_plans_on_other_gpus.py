"""Plans go by the GPU at hand: on an H100 and an H200 they are those that were measured; others are filled, too."""

from __future__ import annotations

import pytest

from halfbyte.kernels.attention.plan import RESERVED, AttentionPlan, plan_for
from halfbyte.kernels.common.device import properties_like
from halfbyte.kernels.common.gpus import GPUS, Gpu
from halfbyte.kernels.distance import plan as distance
from halfbyte.kernels.distance.plan import ProductsPlan

HOPPER = [gpu for gpu in GPUS if gpu.capability == 90]
# Heads, tokens, size of a head and rows.
ATTENTION = {
    (1, 1000, 128, 1): AttentionPlan(block=64, parts=16, rows=16, warps=4, stages=3, least=1, one_launch=True),
    (8, 4096, 128, 4): AttentionPlan(block=64, parts=16, rows=16, warps=4, stages=3, least=1, one_launch=True),
    (8, 32768, 128, 8): AttentionPlan(block=64, parts=16, rows=16, warps=4, stages=3, least=1, one_launch=True),
    (32, 4096, 64, 1): AttentionPlan(block=64, parts=4, rows=16, warps=4, stages=3, least=1, one_launch=True),
    (64, 32768, 128, 16): AttentionPlan(block=64, parts=2, rows=16, warps=4, stages=3, least=1, one_launch=True),
    (256, 4096, 128, 64): AttentionPlan(block=64, parts=1, rows=64, warps=4, stages=2, least=1, one_launch=True),
    (8, 4096, 256, 64): AttentionPlan(block=32, parts=16, rows=64, warps=8, stages=2, least=1, one_launch=True),
}
PRODUCTS = {
    (2, 2): ProductsPlan(rows=128, queries=16, dims=64, warps=4, stages=4),
    (2, 4): ProductsPlan(rows=128, queries=16, dims=16, warps=4, stages=4),
    (17, 2): ProductsPlan(rows=128, queries=32, dims=64, warps=4, stages=4),
    (17, 4): ProductsPlan(rows=128, queries=32, dims=16, warps=4, stages=4),
    (1000, 2): ProductsPlan(rows=128, queries=64, dims=64, warps=4, stages=4),
    (1000, 4): ProductsPlan(rows=128, queries=64, dims=16, warps=4, stages=4),
}
gpus = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)


@pytest.mark.parametrize("gpu", HOPPER, ids=lambda gpu: gpu.name)
def test_on_hopper(gpu: Gpu) -> None:
    properties = properties_like(gpu)
    for sizes, plan in ATTENTION.items():
        assert plan_for(properties, *sizes) == plan
    for (queries, itemsize), tile in PRODUCTS.items():
        assert distance.products(queries, itemsize, properties) == tile
    assert distance.examiners(properties) == 1024


@gpus
def test_attention_fills_the_gpu(gpu: Gpu) -> None:
    """Long caches are cut into parts until there is a wave of programs, and what a program holds fits."""
    properties = properties_like(gpu)
    for heads in (1, 8, 32, 256):
        for size in (64, 128):
            plan = plan_for(properties, heads, 32768, size, 8)
            programs = heads * plan.tiles(8) * plan.parts
            assert programs >= min(0.75 * gpu.sms, 128 * heads)
            ahead = 1 if plan.rows < 64 or gpu.capability < 90 else 0
            taken = (plan.stages - ahead) * 4 * plan.block * size + 2 * plan.rows * size + RESERVED
            assert taken <= gpu.block_shared


@gpus
def test_distances_fill_the_gpu(gpu: Gpu) -> None:
    properties = properties_like(gpu)
    assert 6 * gpu.sms <= distance.examiners(properties) <= 8 * gpu.sms
    for queries in (2, 64, 1000):
        for itemsize in (2, 4):
            tile = distance.products(queries, itemsize, properties)
            assert distance.is_valid(tile)
            assert tile.stages * tile.dims * (tile.rows + tile.queries) * itemsize <= gpu.block_shared
