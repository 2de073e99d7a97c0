"""The product on tensor cores, every plan and format of it: it runs on any GPU from sm_75 on, Hopper included."""

from dataclasses import replace

import pytest
import torch

import halfbyte as hb
from halfbyte import eager
from halfbyte.formats.nf4 import NF4
from halfbyte.formats.spec import codebook_tensor
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import cuda
from halfbyte.kernels.linear.codebook import factor_of
from halfbyte.kernels.linear.kernel import plan_for, run
from halfbyte.kernels.linear.sm75 import launch as tensor
from halfbyte.kernels.linear.sm75.plan import Sm75Plan, is_valid
from halfbyte.kernels.linear.tune.h200 import SM75_SPLITS, SM75_WARPS
from halfbyte.measure.error import relative_error

from .conftest import BF16, DEVICE, F16, F32, POISON, captured, check_product, poisoned, sixteen_bits, weight

FORMATS = (
    *(("nf4", {"block_size": size, "nested": True}) for size in (32, 64, 128, 4096)),
    *(("nf4", {"block_size": size, "nested": False}) for size in (32, 64, 1024)),
    *(("fp4", {"block_size": size, "nested": size != 64}) for size in (32, 64, 256)),
    *(("int4", {"group_size": size}) for size in (32, 64, 128)),
)
formats = pytest.mark.parametrize(("format", "options"), FORMATS, ids=lambda value: str(value))


def fused(
    x: torch.Tensor,
    q: hb.QuantizedWeight,
    bias: torch.Tensor | None = None,
    invariant: bool = False,
    plan: Sm75Plan | None = None,
) -> torch.Tensor:
    """The kernel's result, with poison around it; fails where the kernel says it is not for this."""
    plan = plan or plan_for(tensor, x, q, bias, invariant)
    assert plan is not None
    assert is_valid(plan, *q.shape, q.block_size, x.dtype, properties_of(0))
    with poisoned((len(x), q.shape[0]), x.dtype) as out:
        run(tensor, x, q, bias, out, plan)
    return out


def check(x: torch.Tensor, q: hb.QuantizedWeight, plan: Sm75Plan | None = None) -> None:
    check_product(x, q, lambda plan, bias: fused(x, q, bias, plan=plan), [plan])


@pytest.mark.parametrize("shape", [(1, 64), (77, 64), (1029, 320), (4096, 5376), (1023, 14336)])
@sixteen_bits
@formats
def test_error(format: str, options: dict[str, object], dtype: torch.dtype, shape: tuple[int, int]) -> None:
    n, k = shape
    q = weight(n, k, format, dtype, **options)
    for m in (1, 8, 9, 32, 33, 64, 65):
        check(torch.randn((m, k), device=DEVICE).to(dtype), q)


@sixteen_bits
def test_every_number_of_rows(dtype: torch.dtype) -> None:
    q = weight(515, 1024, dtype=dtype)
    for m in range(1, 66):
        check(torch.randn((m, 1024), device=DEVICE).to(dtype), q)


@pytest.mark.parametrize("scale_dtype", [F16, BF16, F32])
@sixteen_bits
def test_scales_of_integers(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    check(torch.randn((20, 1024), device=DEVICE).to(dtype), weight(1000, 1024, "int4", scale_dtype, group_size=64))


@pytest.mark.parametrize("step", [8, 16])
@pytest.mark.parametrize("columns", SM75_WARPS)
def test_every_way_to_share_the_work(columns: int, step: int) -> None:
    """Whatever plan is valid is right, those of sm_75 among them: fp16 in steps of 8."""
    m, n, k, most = 8 * columns + 3, 777, 1344, SM75_WARPS[columns]
    x, q = torch.randn((m, k), device=DEVICE).half(), weight(n, k, dtype=F16)
    plans = [
        Sm75Plan(columns, warps // k_warps, k_warps, splits, most // warps, span, step)
        for warps in (most, most // 2)
        for k_warps in range(1, warps + 1)
        if warps % k_warps == 0
        for splits in (1, 2, SM75_SPLITS)
        for span in (32, 64)
    ]
    valid = [plan for plan in plans if is_valid(plan, n, k, q.block_size, F16, properties_of(0))]
    assert len(valid) >= 12
    for plan in valid:
        check(x, q, plan)


@pytest.mark.parametrize("shape", [(77, 64), (1029, 320), (515, 5376)])
@formats
def test_as_on_turing(format: str, options: dict[str, object], shape: tuple[int, int]) -> None:
    n, k = shape
    q = weight(n, k, format, F16, **options)
    for m in (1, 16, 33):
        x = torch.randn((m, k), device=DEVICE).half()
        check(x, q, replace(plan_for(tensor, x, q, None, False), mma_k=8))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@sixteen_bits
def test_identity_gives_the_integers(dtype: torch.dtype, group_size: int) -> None:
    """Bit for bit what dequantize gives: no nibble in a wrong place, no scale in another's."""
    n, k = 129, 512
    q = weight(n, k, "int4", dtype, group_size=group_size)
    q = replace(q, packed=torch.randint(-(2**31), 2**31 - 1, q.packed.shape, dtype=torch.int32, device=DEVICE))
    eye, dense = torch.eye(k, dtype=dtype, device=DEVICE), hb.dequantize(q)
    for rows in (1, 16, 32, 64):
        for first in range(0, k, 64):
            part = slice(first, first + rows)
            assert torch.equal(fused(eye[part], q), dense.t()[part])


@pytest.mark.parametrize("block_size", [32, 64, 512])
@pytest.mark.parametrize("nested", [True, False])
@sixteen_bits
def test_identity_gives_the_decoded_weights(dtype: torch.dtype, nested: bool, block_size: int) -> None:
    """Every weight comes out as its 16-bit codebook value times its scale, rounded once."""
    n, k = 130, 576
    q = weight(n, k, dtype=dtype, nested=nested, block_size=block_size)
    nibbles = torch.stack((q.packed.view(-1) >> 4, q.packed.view(-1) & 15), 1).view(n, k).long()
    ones = replace(q, packed=torch.full_like(q.packed, 0xFF), dtype=F32)
    factor = factor_of("nf4", dtype)
    table = (codebook_tensor(NF4, DEVICE) * factor).to(dtype).float()
    values = table[nibbles] * (hb.dequantize(ones) * torch.tensor(1 / factor, device=DEVICE))
    eye = torch.eye(k, dtype=dtype, device=DEVICE)
    for first in range(0, k, 64):
        assert torch.equal(fused(eye[first : first + 64], q), values.t()[first : first + 64].to(dtype))


@pytest.mark.parametrize("shape", [(1024, 4096), (129, 14336)])
def test_a_row_does_not_depend_on_its_neighbours(shape: tuple[int, int]) -> None:
    n, k = shape
    q, x = weight(n, k), torch.randn((150, k), device=DEVICE).bfloat16()
    whole = fused(x, q, invariant=True)
    for m in (1, 2, 7, 8, 9, 16, 17, 33, 65):
        assert torch.equal(fused(x[:m].contiguous(), q, invariant=True), whole[:m])
    order = torch.randperm(len(x), device=DEVICE)
    assert torch.equal(fused(x[order], q, invariant=True), whole[order])


def test_what_is_not_a_number_stays_in_its_row() -> None:
    q, x = weight(100, 1024), torch.randn((20, 1024), device=DEVICE).bfloat16()
    right = fused(x, q)
    x[3, 5], x[19, 1000] = float("nan"), float("inf")
    y = fused(x, q)
    others = [row for row in range(20) if row not in (3, 19)]
    assert torch.equal(y[others], right[others])
    assert y[3].isnan().all()
    assert not y[19].isfinite().any()


def test_cuda_graph_and_streams() -> None:
    q, x = weight(256, 14336), torch.randn((4, 14336), device=DEVICE).bfloat16()
    plan = replace(plan_for(tensor, x, q, None, False), splits=3)
    right, y = fused(x, q, plan=plan), torch.empty((4, 256), dtype=BF16, device=DEVICE)
    graph, _ = captured(lambda: run(tensor, x, q, None, y, plan))
    for _ in range(3):
        y.fill_(POISON)
        graph.replay()
        assert torch.equal(y, right)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(fused(x, q, plan=plan), right)


def test_bf16_where_only_fp16_has_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Ampere; in a graph, too, and the way back."""
    halved = lambda x, *_: x.dtype is BF16  # noqa: E731
    monkeypatch.setattr(cuda, "takes_halves", halved)
    monkeypatch.setattr(cuda, "takes_halves_back", halved)
    q, bias = weight(1000, 2048), torch.randn(1000, device=DEVICE).to(BF16)
    dense, exact = hb.dequantize(q, BF16), hb.dequantize(q, F32).double()
    for m in (1, 9, 40, 300):
        x = torch.randn((m, 2048), device=DEVICE).to(BF16) * 1e6
        right = x.double() @ exact.t() + bias.double()
        graph, found = captured(lambda x=x: hb.linear(x, q, bias))
        graph.replay()
        assert torch.equal(found, hb.linear(x, q, bias))
        assert relative_error(found, right) <= relative_error(torch.nn.functional.linear(x, dense, bias), right)
        grad = torch.randn((m, 1000), device=DEVICE).to(BF16) * 1e-9
        right = grad.double() @ exact
        assert relative_error(eager.linear_backward(grad, q), right) <= relative_error(grad @ dense, right)
