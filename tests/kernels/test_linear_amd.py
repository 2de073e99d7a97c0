"""How linear's Triton kernels are planned, and which GPUs take them: AMD's, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpus import H200, MI300X
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import halfbyte as hb
from halfbyte import eager
from halfbyte.formats.spec import BLOCK_SIZES
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.info import _accelerators
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.linear import cuda, triton_plan
from halfbyte.kernels.linear.triton_plan import MOST_ROWS, TilePlan, is_valid, plan, supports

pytest.importorskip("triton")

RX7900XTX = DeviceProperties("hip", 0, 96)
F16, BF16, F32 = FLOAT_DTYPES


def programs(tile: TilePlan, m: int, n: int) -> int:
    return -(-m // tile.rows) * -(-n // tile.columns) * tile.parts


@given(
    m=st.integers(1, 300),
    n=st.integers(1, 200_000),
    k=st.integers(0, 20_000) | st.integers(0, 600).map(lambda count: 32 * count),
    dtype=st.sampled_from(FLOAT_DTYPES),
    block_size=st.sampled_from(BLOCK_SIZES),
    sms=st.sampled_from([1, 60, 96, 304]),
    batch_invariant=st.booleans(),
)
def test_every_plan_is_valid(
    m: int, n: int, k: int, dtype: torch.dtype, block_size: int, sms: int, batch_invariant: bool
) -> None:
    properties = DeviceProperties("hip", 0, sms)
    tile = plan(m, n, k, dtype, block_size, properties, batch_invariant)
    assert is_valid(tile, m, k, block_size)
    if batch_invariant:
        assert all(plan(rows, n, k, dtype, block_size, properties, True) == tile for rows in (1, 17, 5000))
        m = triton_plan.INVARIANT_ROWS
    elif tile.parts > 1 and tile.way != "sum":  # partial sums, written and read, beside the bytes of W
        assert 8 * tile.parts * min(m, tile.rows) <= k / 2 / 4
    if tile.parts > 1:
        assert programs(tile, m, n) <= 4 * sms


def test_usual_plans() -> None:
    for properties in (MI300X, RX7900XTX):
        for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (1024, 4096)):
            one, few, many = (plan(m, n, k, BF16, 64, properties, False) for m in (1, 8, MOST_ROWS))
            assert [tile.way for tile in (one, few, many)] == ["sum", "product", "product"]
            assert (one.rows, few.rows, many.rows) == (1, 16, MOST_ROWS)  # W is read once
            assert few.span == many.span == 64
            # Whatever the sides of W, there is work for every multiprocessor.
            assert programs(one, 1, n) >= properties.sms
            assert programs(few, 8, n) >= min(properties.sms, n // 32 * 4)
    assert plan(1, 4096, 4096, F16, 32, MI300X, False).way == "sum"
    assert plan(1, 4096, 4096, F16, 32, MI300X, False).parts == 1  # 1024 programs, and 1216 would be few more
    assert plan(1, 1024, 8192, F16, 32, MI300X, False).parts == 4
    assert plan(1, 4096, 64, F16, 32, MI300X, False).columns == 64  # short rows, and all threads have some
    assert plan(4, 4096, 4096, F16, 32, MI300X, False).span == 32
    assert plan(4, 4096, 4096, F16, 256, MI300X, False).span == triton_plan.SPAN
    for m, k in ((1, 4090), (1, 4097), (8, 1000)):  # blocks that cross the ends of rows
        assert plan(m, 4096, k, BF16, 64, MI300X, False).way == "any"
    assert plan(1, 4096, 4096, BF16, 64, MI300X, True).way == "product"


def test_what_is_not_valid() -> None:
    usual = TilePlan("product", 16, 32, 64, 4, 2, 2)
    assert is_valid(usual, 3, 512, 64)
    assert not is_valid(usual, 3, 500, 64)  # rows of whole blocks only
    assert not is_valid(usual, 3, 512, 32)  # a step has one scale
    for changes in ((15, 32, 64, 4, 2, 2), (8, 32, 64, 4, 2, 2), (16, 8, 64, 4, 2, 2), (16, 32, 64, 3, 2, 2)):
        assert not is_valid(TilePlan("product", *changes), 3, 512, 64)
    for steps, parts in ((8, 2), (4, 3), (4, 0)):  # an empty part, and none
        assert not is_valid(TilePlan("product", 16, 32, 64, steps, parts, 2), 3, 512, 64)
    assert is_valid(TilePlan("any", 16, 32, 64, 4, 2, 2), 3, 500, 64)
    assert is_valid(TilePlan("sum", 1, 4, 64, 4, 2, 2), 1, 512, 64)
    assert not is_valid(TilePlan("sum", 1, 4, 64, 4, 2, 2), 2, 512, 64)
    assert not is_valid(TilePlan("sum", 1, 4, 16, 16, 2, 2), 1, 512, 64)
    assert supports(2**30, 2**30)
    assert not supports(2**31, 64)


@pytest.mark.parametrize("properties", [MI300X, H200], ids=["AMD", "NVIDIA"])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64), (MOST_ROWS, 64), (MOST_ROWS + 1, 64)], ids=str)
def test_who_takes_it(
    shape: tuple[int, ...], batch_invariant: bool, properties: DeviceProperties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of no memory on a GPU that is not there: `eager.linear` up to the kernels."""
    ways: list[str] = []

    def linear(*arguments: Any) -> None:
        ways.append("fused")
        assert arguments[-1] is batch_invariant

    def dequantize(q: hb.QuantizedWeight, out: Tensor) -> Tensor:
        ways.append("dense")
        return out

    monkeypatch.setattr(eager, "backend", lambda *_: SimpleNamespace(linear=linear))
    monkeypatch.setattr(eager, "dequantize", dequantize)
    monkeypatch.setattr(eager.products, "linear_in_tiles", lambda x, weight, _: x.new_empty((len(x), len(weight))))
    monkeypatch.setattr(eager, "ready_linear", lambda *_: None)
    for name in ("is_elsewhere", "is_aligned"):
        monkeypatch.setattr(eager, name, lambda _, name=name: name == "is_aligned")
    monkeypatch.setattr(eager, "properties_of", lambda _: properties)
    monkeypatch.setattr(cuda, "properties_of", lambda _: properties)
    if properties is H200:  # where no CUDA kernel is for it
        monkeypatch.setattr(cuda, "linear", lambda *_: None)
    with FakeTensorMode():
        packed = torch.empty(32 * 64 // 2, 1, dtype=torch.uint8, device="cuda:0")
        q = hb.QuantizedWeight("nf4", packed, torch.empty(32, device="cuda:0"), (32, 64), BF16, 64)
        x = torch.empty(shape, dtype=BF16, device="cuda:0")
        assert eager.linear(x, q, None, batch_invariant).shape == (*shape[:-1], 32)
    fused = properties is MI300X and (batch_invariant or shape != (MOST_ROWS + 1, 64))
    assert ways == ["fused" if fused else "dense"]


def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"name": "AMD Instinct MI300X", "gcnArchName": "gfx942", "total_memory": 192 << 30}
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.0")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=304, **facts)
        )
        properties_of.cache_clear()
        assert properties_of(0) == MI300X
        [gpu] = _accelerators({})
    properties_of.cache_clear()
    assert gpu.description == "AMD Instinct MI300X, gfx942, 192 GiB, 304 SMs, ROCm 7.0"
    assert gpu.backend == "linear: Triton (up to 64 rows of x), all else: Triton"
    assert not gpu.note
