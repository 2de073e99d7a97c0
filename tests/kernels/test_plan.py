"""The planner's plans are valid for every size and device, and the predicate turns down what the kernel cannot do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpus import H200, TARGETS, gpu_of
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.formats.spec import BLOCK_SIZES
from halfbyte.kernels.common.device import HOST, DeviceProperties, properties_like
from halfbyte.kernels.common.gpus import GPUS, Gpu
from halfbyte.kernels.dequantize.plan import DequantizePlan, is_valid, plan

DEVICES = [HOST, *map(gpu_of, TARGETS)]
GOOD = DequantizePlan(blocks=32, warps=4, ahead=64, chunk=16)

sizes = st.integers(1, 2**39) | st.sampled_from([2**24 - 1, 2**24, 2**31 - 1, 2**31])
nested_sizes = st.none() | st.sampled_from([16, 32, 256, 4096])


@given(numel=sizes, block_size=st.sampled_from(BLOCK_SIZES), nested=nested_sizes, properties=st.sampled_from(DEVICES))
def test_plans_are_valid(numel: int, block_size: int, nested: int | None, properties: DeviceProperties) -> None:
    chosen = plan(numel, block_size, nested, properties)
    assert is_valid(chosen, block_size, nested, properties)
    assert chosen == plan(numel, block_size, nested, properties)
    large = 2**24 * (1 if properties.ptx == 90 else properties.l2_bytes / (60 << 20))
    assert (chosen.ahead > 0) == (properties.ptx >= 90 and numel >= large)
    # A grid's first dimension has 31 bits.
    assert -(-numel // (block_size * chosen.blocks)) < 2**31


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": 0}, {"blocks": 24}, {"blocks": -32}, {"blocks": 512}, {"blocks": 4096}, {"warps": 0}, {"warps": 3},
        {"warps": 32}, {"chunk": 0}, {"chunk": 12}, {"chunk": 1 << 31}, {"ahead": -1},
    ],
    ids=str,
)  # fmt: skip
def test_the_predicate_turns_down(wrong: dict[str, int]) -> None:
    assert is_valid(GOOD, 64, 256, H200)
    assert not is_valid(replace(GOOD, **wrong), 64, 256, H200)


def test_the_predicate_knows_the_device() -> None:
    for properties in DEVICES:
        assert is_valid(GOOD, 64, 256, properties) == (properties.ptx >= 90)
        assert is_valid(replace(GOOD, ahead=0), 64, 256, properties)


def test_a_tile_has_one_entry_of_the_nested_scales() -> None:
    assert not is_valid(GOOD, 64, 16, H200)
    assert is_valid(replace(GOOD, blocks=16), 64, 16, H200)
    assert is_valid(replace(GOOD, blocks=512), 64, None, H200)


# Of blocks and nested blocks: blocks a program, and programs ahead and in a burst of weights from 16 million on.
HOPPER = {
    (64, 256): (32, 2112, 16), (64, None): (32, 2112, 16), (32, 16): (16, 8448, 64), (128, None): (16, 2112, 16),
    (4096, 256): (1, 1056, 8),
}  # fmt: skip


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu.capability == 90], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("shape", HOPPER, ids=str)
def test_plans_on_hopper_are_those_that_were_measured(shape: tuple[int, int | None], gpu: Gpu) -> None:
    blocks, ahead, chunk = HOPPER[shape]
    for sms in (132, 114):
        properties = properties_like(gpu, sms)
        for numel in (1, 2**20, 2**24 - 1):
            assert plan(numel, *shape, properties) == DequantizePlan(blocks, 4)
        for numel in (2**24, 2**24 + 1, 2**31, 2**38):
            assert plan(numel, *shape, properties) == DequantizePlan(blocks, 4, ahead, chunk)


def test_what_is_fetched_ahead_follows_the_gpu() -> None:
    """Half a microsecond of its memory, a small part of its L2; and weights that fit into L2 are left alone."""
    for gpu in (gpu for gpu in GPUS if gpu.capability > 90):
        properties = properties_like(gpu)
        chosen = plan(2**31, 64, 256, properties)
        ahead = chosen.ahead * chosen.blocks * 32
        assert 0.4 < ahead / (properties.bandwidth * 1e3) < 0.5
        assert ahead < properties.l2_bytes / 32
        fitting = int(properties.l2_bytes / 2 / 2.5)
        assert plan(fitting, 64, 256, properties).ahead == 0
