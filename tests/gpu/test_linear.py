"""The product on a GPU: as accurate as dequantize and F.linear, the same bits every time, nothing beyond its end."""

import pytest
import torch

import halfbyte as hb
from halfbyte.formats.blockwise import codebook_tensor
from halfbyte.kernels.linear import decode
from halfbyte.kernels.linear.codebook import FACTORS

DEVICE = torch.device("cuda", 0)
SHAPES = ((4, 1024), (20, 1024), (1028, 2048), (64, 5120), (4096, 4096), (1024, 14336), (516, 28672), (3072, 8192))


def fused(
    x: torch.Tensor, q: hb.QuantizedWeight, bias: torch.Tensor | None = None, invariant: bool = False
) -> torch.Tensor:
    """The kernel's result, with poison around it; fails where the kernel says it is not for this."""
    m, n = len(x), q.shape[0]
    buffer = torch.full((m * n + 128,), 777.0, dtype=x.dtype, device=DEVICE)
    out = buffer[64 : 64 + m * n].view(m, n)
    plan = decode.plan_for(x, q, bias, invariant)
    assert plan is not None
    decode.linear(x, q, bias, out, plan)
    assert (buffer[:64] == 777).all()
    assert (buffer[64 + m * n :] == 777).all()
    return out


def error(y: torch.Tensor, right: torch.Tensor) -> float:
    return float((y.double() - right).norm() / right.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_error_is_not_above_that_of_dequantize_and_linear(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    n, k = shape
    for format, nested in (("nf4", True), ("nf4", False), ("fp4", True)):
        q = hb.quantize(torch.randn(shape, device=DEVICE).to(dtype) / k**0.5, format, nested=nested)
        exact, dense = hb.dequantize(q, torch.float32).double(), hb.dequantize(q)
        for m in (1, 2, 3, 7, 8, 9, 16, 17, 32):
            x = torch.randn((m, k), device=DEVICE).to(dtype)
            bias = torch.randn(n, device=DEVICE).to(dtype) if m % 2 else None
            right = x.double() @ exact.t() + (0 if bias is None else bias.double())
            if decode._plan(m, n, k, nested, 0) is None:
                continue
            ours = fused(x, q, bias)
            assert torch.equal(ours, fused(x, q, bias))
            theirs = torch.nn.functional.linear(x, dense, bias)
            # Few outputs make a noisy norm, so a small weight is given a little room.
            assert error(ours, right) <= error(theirs, right) * (1.0 if m * n >= 1 << 14 else 1.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nested", [True, False])
def test_identity_gives_the_decoded_weights(nested: bool, dtype: torch.dtype) -> None:
    """Every weight comes out as its 16-bit codebook value times its scale, rounded once: no nibble in a wrong place."""
    n, k = 256, 2048
    q = hb.quantize(torch.randn((n, k), device=DEVICE).to(dtype), nested=nested)
    nibbles = torch.stack((q.packed.view(-1) >> 4, q.packed.view(-1) & 15), 1).view(n, k).long()
    ones = hb.QuantizedWeight("nf4", torch.full_like(q.packed, 0xFF), q.scale, q.shape, torch.float32, 64, q.nested)
    scale = hb.dequantize(ones)
    factor = FACTORS["nf4", dtype]
    table = (codebook_tensor("nf4", DEVICE) * factor).to(dtype).float()
    values = table[nibbles] * (scale * torch.tensor(1 / factor, device=DEVICE))
    eye = torch.eye(k, dtype=dtype, device=DEVICE)
    for first in range(0, k, 8):
        assert torch.equal(fused(eye[first : first + 8], q), values.t()[first : first + 8].to(dtype))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    q = hb.quantize(torch.randn((1024, 4096), device=DEVICE).bfloat16())
    x = torch.randn((67, 4096), device=DEVICE).bfloat16()
    whole = fused(x, q, invariant=True)
    for m in (1, 2, 7, 8, 9, 33):
        assert torch.equal(fused(x[:m].contiguous(), q, invariant=True), whole[:m])
    order = torch.randperm(67, device=DEVICE)
    assert torch.equal(fused(x[order], q, invariant=True), whole[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_public_function(dtype: torch.dtype) -> None:
    """Everything that the kernel takes and everything that it does not, gradients included."""
    cases = (((1024, 4096), "nf4", 64), ((1024, 4096), "nf4", 128), ((96, 1000), "fp4", 64), ((64, 256), "int4", 64))
    for shape, format, size in cases:
        options = {"group_size": size} if format == "int4" else {"block_size": size}
        q = hb.quantize(torch.randn(shape, device=DEVICE).to(dtype) / shape[1] ** 0.5, format, **options)
        exact = hb.dequantize(q, torch.float32).double()
        for sides in ((), (1,), (3, 5), (40,), (0,)):
            x = torch.randn((*sides, shape[1]), device=DEVICE).to(dtype).requires_grad_()
            bias = torch.randn(shape[0], device=DEVICE).to(dtype)
            y = hb.linear(x, q, bias)
            right = x.double() @ exact.t() + bias.double()
            torch.testing.assert_close(y.double(), right, rtol=2e-2, atol=2e-2)
            y.sum().backward()
            torch.testing.assert_close(x.grad.double(), exact.sum(0).expand(x.shape), rtol=2e-2, atol=2e-2)


def test_cuda_graph_and_streams() -> None:
    q = hb.quantize(torch.randn((4096, 8192), device=DEVICE).bfloat16())
    x = torch.randn((4, 8192), device=DEVICE).bfloat16()
    right = hb.linear(x, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = hb.linear(x, q)
    for _ in range(3):
        y.fill_(777)
        graph.replay()
        assert torch.equal(y, right)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(hb.linear(x, q), right)


def test_torch_compile() -> None:
    q = hb.quantize(torch.randn((256, 1024), device=DEVICE).bfloat16())
    x = torch.randn((2, 1024), device=DEVICE).bfloat16()
    compiled = torch.compile(lambda x, q: hb.linear(x, q) * 2, fullgraph=True)
    assert torch.equal(compiled(x, q), hb.linear(x, q) * 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("shape", [(1024, 4096), (512, 320), (100, 333)])
def test_a_device_that_is_not_current(shape: tuple[int, int]) -> None:
    q = hb.quantize(torch.randn(shape, device=DEVICE).bfloat16())
    there = q.to("cuda:1")
    for m in (1, 16, 40, 100):
        x = torch.randn((m, shape[1]), device=DEVICE).bfloat16()
        y = hb.linear(x.to("cuda:1"), there)
        assert y.device == torch.device("cuda", 1)
        assert torch.equal(y.to(DEVICE), hb.linear(x, q))
