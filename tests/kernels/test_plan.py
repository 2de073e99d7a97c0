"""The planner's plans are valid for every size and device, and the predicate turns down what the kernel cannot do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpus import H200, TARGETS, gpu_of
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.formats.spec import BLOCK_SIZES
from halfbyte.kernels.common.device import HOST, DeviceProperties
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
    assert (chosen.ahead > 0) == (numel >= 2**24 and properties.ptx >= 90)
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
