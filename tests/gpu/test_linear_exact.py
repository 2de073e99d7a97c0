"""The product on CUDA cores: dequantize's bits for the identity, the same bits for a row whatever is around it."""

from itertools import product

import pytest
import torch

import halfbyte as hb
from halfbyte.formats.weight import FLOAT_DTYPES, NestedScale
from halfbyte.kernels.linear.kernel import plan_for, run
from halfbyte.kernels.linear.simt import launch as exact
from halfbyte.kernels.linear.simt.plan import SimtPlan, is_valid

from .conftest import DEVICE, POISON, captured, error, every_dtype, poisoned, weight

WEIGHTS = (
    ("nf4", {"block_size": 64}),
    ("nf4", {"block_size": 32, "nested": False}),
    ("fp4", {"block_size": 128}),
    ("fp4", {"block_size": 4096, "nested": False}),
    ("int4", {"group_size": 32}),
)
# Rows that begin in the middle of a byte or a block, that end within a lane's sixteen weights, or a step of 512.
SHAPES = ((1, 1), (3, 7), (5, 33), (2, 64), (17, 96), (9, 515), (33, 528), (130, 1001), (64, 1056), (516, 2048))


def multiplied(
    x: torch.Tensor, q: hb.QuantizedWeight, bias: torch.Tensor | None = None, plan: SimtPlan | None = None
) -> torch.Tensor:
    """The kernel's result, with poison under it and around it."""
    with poisoned((len(x), q.shape[0]), x.dtype) as out:
        run(exact, x, q, bias, out, plan or plan_for(exact, x, q, bias))
    return out


def moved(tensor: torch.Tensor, by: int = 1) -> torch.Tensor:
    """A contiguous copy that begins `by` elements behind an aligned address."""
    buffer = torch.empty(tensor.numel() + by, dtype=tensor.dtype, device=DEVICE)
    return buffer[by:].view(tensor.shape).copy_(tensor)


@every_dtype
@pytest.mark.parametrize(("format", "options"), WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_identity_gives_what_dequantize_gives(
    shape: tuple[int, int], format: str, options: dict[str, int], dtype: torch.dtype
) -> None:
    for stored in FLOAT_DTYPES if format == "int4" else (torch.float32,):
        q = weight(*shape, format, stored, **options)
        eye = torch.eye(shape[1], dtype=dtype, device=DEVICE)
        assert torch.equal(multiplied(eye, q), hb.dequantize(q, dtype).t())


@pytest.mark.parametrize("size", [16, 32, 1024])
def test_nested_scales_of_any_block_size(size: int) -> None:
    q = hb.quantize(torch.randn((61, 333), device=DEVICE), block_size=32)
    nested = NestedScale(q.nested.code, torch.rand(-(-q.scale.numel() // size), device=DEVICE), q.nested.offset, size)
    q = hb.QuantizedWeight("nf4", q.packed, q.scale, q.shape, q.dtype, 32, nested)
    assert torch.equal(multiplied(torch.eye(333, device=DEVICE), q), hb.dequantize(q, torch.float32).t())


def test_scales_that_make_subnormal_weights() -> None:
    """Flushed for bitsandbytes' formats and kept for int4, as dequantize does it."""
    for format, options in WEIGHTS[1:5:3] + WEIGHTS[3:4]:
        q = weight(32, 4096, format, torch.float32, **options)
        q = hb.QuantizedWeight(format, q.packed, q.scale * 1e-36, q.shape, q.dtype, q.block_size)
        dense = hb.dequantize(q, torch.float32)
        assert torch.equal(multiplied(torch.eye(4096, device=DEVICE), q), dense.t())
        assert bool(((dense != 0) & (dense.abs() < 2.0**-126)).any()) == (format == "int4")


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_stays_in_its_row(scale: float) -> None:
    q = hb.quantize(torch.randn((3, 96), device=DEVICE), block_size=32, nested=False)
    scales = q.scale.clone()
    scales[5] = scale  # the last third of row 1
    q = hb.QuantizedWeight("nf4", q.packed, scales, q.shape, q.dtype, 32)
    for plan in (SimtPlan(1, 4, True), SimtPlan(1, 2, False)):
        for dtype in FLOAT_DTYPES:
            y = multiplied(torch.ones((1, 96), dtype=dtype, device=DEVICE), q, plan=plan)[0]
            assert y.isfinite().tolist() == [True, False, True]


@every_dtype
@pytest.mark.parametrize(("format", "options"), WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_not_above_that_of_dequantize_and_linear(
    shape: tuple[int, int], format: str, options: dict[str, int], dtype: torch.dtype
) -> None:
    q = weight(*shape, format, dtype, **options)
    decoded, dense = hb.dequantize(q, torch.float32).double(), hb.dequantize(q, dtype)
    for m in (1, 2, 5, 8, 19):
        x = torch.randn((m, shape[1]), device=DEVICE).to(dtype)
        bias = torch.randn(shape[0], device=DEVICE).to(dtype) if m % 2 else None
        right = x.double() @ decoded.t() + (0 if bias is None else bias.double())
        ours, theirs = multiplied(x, q, bias), torch.nn.functional.linear(x, dense, bias)
        limits = torch.finfo(dtype)
        terms = x.double().abs() @ decoded.abs().t() + (0 if bias is None else bias.double().abs())
        room = limits.eps * (right.abs() + limits.tiny) + 2.0**-22 * terms
        assert ((ours.double() - right).abs() <= room).all()
        if m * shape[0] >= 1 << 10:  # few outputs make a noisy norm
            assert error(ours, right) <= error(theirs, right)


@every_dtype
@pytest.mark.parametrize(("format", "options"), WEIGHTS)
@pytest.mark.parametrize("shape", [(33, 528), (130, 1001), (64, 1056), (516, 2048)])
def test_a_row_gives_the_same_bits_always(
    shape: tuple[int, int], format: str, options: dict[str, int], dtype: torch.dtype
) -> None:
    """Whatever its neighbours, their number, the plan and the addresses are."""
    q = weight(*shape, format, dtype, **options)
    x, bias = torch.randn((67, shape[1]), device=DEVICE).to(dtype), torch.randn(shape[0], device=DEVICE).to(dtype)
    right = multiplied(x, q, bias)
    assert torch.equal(multiplied(x, q, bias), right)
    for m in range(1, 10):
        assert torch.equal(multiplied(x[:m], q, bias), right[:m])
        assert torch.equal(multiplied(x[m : m + 1].clone(), q, bias), right[m : m + 1])
    for rows, columns, whole in product((1, 2, 4, 8), (1, 2, 4), (False, True)):
        plan = SimtPlan(rows, columns, whole)
        if is_valid(plan, shape[1], aligned=True):
            assert torch.equal(multiplied(x, q, bias, plan), right)
    for by in (1, 2, 3):
        parts = (moved(q.packed, by), moved(q.scale, by))
        there = hb.QuantizedWeight(format, *parts, q.shape, q.dtype, q.block_size, q.nested)
        assert torch.equal(multiplied(x, there, bias), right)


def test_more_rows_than_a_grid_has_tiles() -> None:
    q = hb.quantize(torch.randn((2, 32), device=DEVICE))
    x = torch.randn((8 * exact.MOST_TILES + 9, 32), device=DEVICE)
    assert torch.equal(multiplied(x, q)[-17:], multiplied(x[-17:].clone(), q))


@pytest.mark.parametrize("k", [4096, 4099])
def test_more_than_two_to_the_31_weights(k: int) -> None:
    n = (1 << 31) // k + 9
    packed = torch.randint(0, 256, ((n * k + 1) // 2,), dtype=torch.uint8, device=DEVICE)
    q = hb.QuantizedWeight("nf4", packed, torch.rand(-(-n * k // 64), device=DEVICE), (n, k), torch.float16, 64)
    dense = hb.dequantize(q)
    for at in (0, 511, k - 1):
        x = torch.zeros((1, k), dtype=torch.float16, device=DEVICE)
        x[0, at] = 1
        assert torch.equal(multiplied(x, q)[0], dense[:, at])


def test_sides_of_zero() -> None:
    for shape in ((0, 64), (5, 0), (0, 0)):
        q = hb.quantize(torch.empty(shape, device=DEVICE), nested=False)
        for m in (0, 3):
            bias = torch.randn(shape[0], device=DEVICE)
            x = torch.empty((m, shape[1]), device=DEVICE)
            if shape[1] == 0:
                assert torch.equal(hb.linear(x, q, bias), bias.expand(m, shape[0]))
            assert hb.linear(x, q).shape == (m, shape[0])
            assert hb.linear(x, q).count_nonzero() == 0


def test_cuda_graph() -> None:
    q = hb.quantize(torch.randn((130, 1001), device=DEVICE))
    x = torch.randn((3, 1001), device=DEVICE)
    right, out = multiplied(x, q), torch.empty((3, 130), device=DEVICE)
    graph, _ = captured(lambda: run(exact, x, q, None, out, plan_for(exact, x, q, None)))
    out.fill_(POISON)
    graph.replay()
    assert torch.equal(out, right)
