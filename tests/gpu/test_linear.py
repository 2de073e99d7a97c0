"""The product on a GPU: as accurate as dequantize and F.linear, the same bits every time, nothing beyond its end."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

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
from halfbyte.kernels.linear.problem import problem_of
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.warm import warm

from .conftest import DEVICE, POISON, captured, error, every_dtype, needs_two_gpus, poisoned, sixteen_bits, weight

SHAPES = (
    *((4, 1024), (20, 1024), (1028, 2048), (64, 5120), (4096, 4096), (1024, 14336), (516, 28672), (3072, 8192)),
    *((4, 256), (12, 5376), (1028, 5376), (4096, 5376)),  # scales that come a tile at a time
    *((516, 8960), (260, 18944)),  # or a row with its neighbours' ends
)


FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (("nf4", {}), ("nf4", {"nested": False}), ("fp4", {}))
# One of these for each shape, by turns: NVRTC takes a third of a second for each variant.
LARGER: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("fp4", {"block_size": 256}), ("nf4", {"block_size": 1024, "nested": False})),
    *(("int4", {"group_size": 64}), ("int4", {"group_size": 128})),
)


def fused(
    x: torch.Tensor, q: hb.QuantizedWeight, bias: torch.Tensor | None = None, invariant: bool = False
) -> torch.Tensor:
    """The kernel's result, with poison around it; fails where the kernel says it is not for this."""
    plan = plan_for(decode, x, q, bias, invariant)
    assert plan is not None
    with poisoned((len(x), q.shape[0]), x.dtype) as out:
        run(decode, x, q, bias, out, plan)
    return out


@pytest.mark.parametrize("shape", SHAPES)
@sixteen_bits
def test_error_is_not_above_that_of_dequantize_and_linear(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    (n, k), turn = shape, SHAPES.index(shape)
    weights = [
        hb.quantize(torch.randn(shape, device=DEVICE).to(dtype) / k**0.5, format, **options)
        for format, options in (*FORMATS, LARGER[(turn + turn // 4) % 4])
        if k % (options.get("group_size") or options.get("block_size", 64)) == 0
    ]
    inputs = [
        (torch.empty((m, k), dtype=dtype, device=DEVICE), torch.randn(n, device=DEVICE).to(dtype) if m % 2 else None)
        for m in (1, 2, 3, 7, 8, 9, 16, 17, 32, 33, 64)
    ]
    cases = [
        (q, [(x, bias, plan) for x, bias in inputs if (plan := plan_for(decode, x, q, bias, False)) is not None])
        for q in weights
    ]
    # Side by side: one after the other these would take most of the test's time.
    warm(
        list(
            {decode.variant(problem_of(x, q, b), plan, properties_of(0)) for q, alike in cases for x, b, plan in alike}
        )
    )
    for q, alike in cases:
        exact, dense = hb.dequantize(q, torch.float32).double(), hb.dequantize(q)
        for x, bias, _ in alike:
            m, ours, theirs, right = len(x), [], [], []
            # Few outputs make a noisy norm, so a small weight is given a little room. Of fewer than 128 one draw
            # in hundreds would be beyond that, whoever multiplies; so there are several.
            for _ in range(-(-128 // (m * n))):
                x = torch.randn((m, k), device=DEVICE).to(dtype)
                ours.append(fused(x, q, bias))
                assert torch.equal(ours[-1], fused(x, q, bias))
                theirs.append(torch.nn.functional.linear(x, dense, bias))
                right.append(x.double() @ exact.t() + (0 if bias is None else bias.double()))
            room = 1.0 if m * n >= 1 << 14 else 1.5
            assert error(torch.cat(ours), torch.cat(right)) <= error(torch.cat(theirs), torch.cat(right)) * room


@pytest.mark.parametrize(("format", "nested"), [("nf4", True), ("nf4", False), ("fp4", True), ("int4", False)])
@sixteen_bits
def test_several_weights_in_one_launch(dtype: torch.dtype, nested: bool, format: str) -> None:
    """As accurate as one after the other, the same bits every time; weights differ in code, offset and bias."""
    options: dict[str, Any] = {} if format == "int4" else {"nested": nested}
    if properties_of(0).ptx < 90:
        pytest.skip("sm90_decode/kernel.cu is for sm_90 and later")
    for k, sizes in (
        (4096, (4096, 1024, 1024)),
        (5376, (4096, 2048, 2048)),
        (5120, (25600, 25600)),
        (8192, (8192, 64)),
    ):
        group = [hb.quantize(torch.randn((n, k), device=DEVICE).to(dtype) / k**0.5, format, **options) for n in sizes]
        if nested:  # every weight with a code of its own
            group = [
                replace(q, nested=q.nested._replace(code=q.nested.code * (1 + part / 4)))
                for part, q in enumerate(group)
                if q.nested
            ]
        for m in (1, 2, 8, 16, 31, 32):
            x = torch.randn((m, k), device=DEVICE).to(dtype)
            biases = [torch.randn(n, device=DEVICE).to(dtype) if part % 2 else None for part, n in enumerate(sizes)]
            found = cuda.linear_group(x, group, biases)
            if found is None and m > 8:
                continue  # one after the other is faster
            assert found is not None
            again = cuda.linear_group(x, group, biases)
            assert again is not None
            for y, other, q, bias in zip(found, again, group, biases, strict=True):
                assert torch.equal(y, other)
                exact, dense = hb.dequantize(q, torch.float32).double(), hb.dequantize(q)
                right = x.double() @ exact.t() + (0 if bias is None else bias.double())
                theirs = torch.nn.functional.linear(x, dense, bias)
                assert error(y, right) <= error(theirs, right) * (1.0 if y.numel() >= 1 << 14 else 1.5)


@sixteen_bits
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_identity_gives_the_weights_of_int4(size: int, stored: torch.dtype, dtype: torch.dtype) -> None:
    """To the bit what dequantize gives, whatever dtype its scales are in."""
    n, k = 260, 2048
    q = hb.quantize(torch.randn((n, k), device=DEVICE).to(stored), "int4", group_size=size)
    q.packed.view(torch.uint8).copy_(torch.randint(0, 256, q.packed.view(torch.uint8).shape, device=DEVICE))
    values, eye = hb.dequantize(q, dtype), torch.eye(k, dtype=dtype, device=DEVICE)
    for first in range(0, k, 8):
        assert torch.equal(fused(eye[first : first + 8], q), values.t()[first : first + 8])


@sixteen_bits
@pytest.mark.parametrize("nested", [True, False])
def test_identity_gives_the_decoded_weights(nested: bool, dtype: torch.dtype) -> None:
    """Every weight comes out as its 16-bit codebook value times its scale, the factor taken out in the end, and rounded
    once: no nibble in a wrong place."""
    n, k = 256, 2048
    q = hb.quantize(torch.randn((n, k), device=DEVICE).to(dtype), nested=nested)
    nibbles = torch.stack((q.packed.view(-1) >> 4, q.packed.view(-1) & 15), 1).view(n, k).long()
    ones = hb.QuantizedWeight("nf4", torch.full_like(q.packed, 0xFF), q.scale, q.shape, torch.float32, 64, q.nested)
    scale = hb.dequantize(ones)
    factor = factor_of("nf4", dtype)
    table = (codebook_tensor(NF4, DEVICE) * factor).to(dtype).float()
    values = table[nibbles] * scale * torch.tensor(1 / factor, device=DEVICE)
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


@every_dtype
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
    graph, y = captured(lambda: hb.linear(x, q))
    for _ in range(3):
        y.fill_(POISON)
        graph.replay()
        assert torch.equal(y, right)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(hb.linear(x, q), right)


# Products that are ready: a first call makes one, and those after it take what is there.

# Small enough for `decode`, and large enough for `hopper`, where each is there; one for `tensor` or `hopper` (K is no
# multiple of 1024), one for `exact`.
READY = ((1024, 1024), (2048, 8192), (512, 320), (100, 333))


def check_ready(
    x: torch.Tensor, q: hb.QuantizedWeight, bias: torch.Tensor | None = None, invariant: bool = False
) -> torch.Tensor:
    """The second call, and any after it, gives the bits of the first, and those are right."""
    first = hb.linear(x, q, bias, invariant)
    assert cuda.ready(x, q, bias, invariant) is not None
    again = hb.linear(x, q, bias, invariant)
    assert torch.equal(again, first)
    assert again.data_ptr() != first.data_ptr()
    right = x.double() @ hb.dequantize(q, torch.float32).double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(first.double(), right, rtol=2e-2, atol=2e-2)
    return first


@pytest.mark.parametrize("shape", READY)
def test_ready_for_any_rows_dtype_and_bias(shape: tuple[int, int]) -> None:
    q = weight(*shape)
    for _ in range(2):
        for m in (1, 5, 8):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                x, bias = torch.randn((m, shape[1]), device=DEVICE).to(dtype), torch.randn(shape[0], device=DEVICE)
                for added in (None, bias.to(dtype)):
                    for invariant in (False, True):
                        whole = check_ready(x, q, added, invariant)
                        assert torch.equal(hb.linear(x.view(1, m, 1, -1), q, added, invariant).view(m, -1), whole)


@pytest.mark.parametrize("shape", READY)
def test_ready_in_two_threads_and_on_two_streams(shape: tuple[int, int]) -> None:
    q, barrier = weight(*shape), Barrier(2)
    inputs = [torch.randn((m, shape[1]), device=DEVICE).bfloat16() for m in (3, 8)]
    rights = [check_ready(x, q) for x in inputs]
    torch.cuda.synchronize()

    def work(turn: int) -> bool:
        barrier.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [hb.linear(inputs[(turn + i) % 2], q) for i in range(400)]
            torch.cuda.current_stream().synchronize()
        return all(torch.equal(y, rights[(turn + i) % 2]) for i, y in enumerate(found))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [True, True]


@pytest.mark.parametrize("shape", READY)
def test_ready_in_a_graph(shape: tuple[int, int]) -> None:
    q, x = weight(*shape), torch.randn((4, shape[1]), device=DEVICE).bfloat16()
    rights = [check_ready(x, q)]
    graph, y = captured(lambda: hb.linear(x, q))
    for _ in range(3):
        rights.append(check_ready(x, q))  # beside the graph
        y.fill_(POISON)
        graph.replay()
        assert torch.equal(y, rights[-1])
        x.copy_(torch.randn_like(x))
    assert not torch.equal(rights[1], rights[2])


@pytest.mark.parametrize("shape", READY)
def test_ready_looks_at_x_and_bias(shape: tuple[int, int]) -> None:
    """x and biases that are like those before but for where their numbers are."""
    n, k = shape
    q, x, bias = weight(*shape), torch.randn((4, k), device=DEVICE).bfloat16(), torch.randn(n, device=DEVICE).bfloat16()
    right = check_ready(x, q, bias)

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        there = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)[1:].view(tensor.shape)
        return there.copy_(tensor)

    likes: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2],
        lambda tensor: torch._neg_view(-tensor),
        torch.nn.Parameter,
    )
    for like in likes:
        assert torch.equal(hb.linear(like(x), q, bias).detach(), right)
        assert torch.equal(hb.linear(x, q, like(bias)).detach(), right)
    assert torch.equal(hb.linear(x.t().contiguous().t(), q, bias), right)
    assert torch.equal(hb.linear(shifted(x), q, bias), right)
    assert torch.equal(hb.linear(x, q, shifted(bias)), right)
    assert torch.equal(hb.linear(x, q, bias), right)
    for wrong in (x[:, :-1], x.cpu(), x.double(), x.to_sparse()):
        with pytest.raises((ValueError, TypeError), match=r"x (is|has)"):
            hb.linear(wrong, q, bias)
    for wrong in (bias[:-1], bias.cpu(), bias.float(), bias[None]):
        with pytest.raises((ValueError, TypeError), match=r"bias (is|has)"):
            hb.linear(x, q, wrong)
    grad = torch.autograd.grad(hb.linear(x.requires_grad_(), q, bias).sum(), x)[0]
    assert grad.shape == x.shape


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", READY)
def test_ready_follows_a_weight_whose_memory_moves(shape: tuple[int, int], nested: bool) -> None:
    q, other, last = (weight(*shape, nested=nested) for _ in range(3))
    if q.nested:  # all weights share one code
        q = replace(q, nested=q.nested._replace(code=q.nested.code.clone()))
    x = torch.randn((4, shape[1]), device=DEVICE).bfloat16()
    assert not torch.equal(check_ready(x, q), check_ready(x, other))
    for tensor, source in zip(q.tensors, other.tensors, strict=True):
        old, tensor.data = tensor.data, source.clone()
        old.zero_()  # whoever still reads there gets nothing
    assert torch.equal(check_ready(x, q), check_ready(x, other))
    for tensor, source in zip(q.tensors, last.tensors, strict=True):
        tensor.copy_(source)
    assert torch.equal(check_ready(x, q), check_ready(x, last))


def test_torch_compile() -> None:
    q = hb.quantize(torch.randn((256, 1024), device=DEVICE).bfloat16())
    x = torch.randn((2, 1024), device=DEVICE).bfloat16()
    compiled = torch.compile(lambda x, q: hb.linear(x, q) * 2, fullgraph=True)
    assert torch.equal(compiled(x, q), hb.linear(x, q) * 2)


@needs_two_gpus
@pytest.mark.parametrize("shape", [(1024, 4096), (512, 320), (100, 333)])
def test_a_device_that_is_not_current(shape: tuple[int, int]) -> None:
    q = hb.quantize(torch.randn(shape, device=DEVICE).bfloat16())
    there = q.to("cuda:1")
    for m in (1, 16, 40, 100):
        x = torch.randn((m, shape[1]), device=DEVICE).bfloat16()
        y = hb.linear(x.to("cuda:1"), there)
        assert y.device == torch.device("cuda", 1)
        assert torch.equal(y.to(DEVICE), hb.linear(x, q))


@pytest.mark.parametrize("format", ["nf4", "fp4", "int4"])
def test_sums_that_fp16_cannot_hold(format: str) -> None:
    """They cancel in the end, as those of a Gemma in fp16 do: y and the gradient are finite where F.linear's are."""
    n, k = 1024, 2048
    signs = torch.ones(n, k, device=DEVICE)
    signs[:, k // 2 :] = -1
    signs[n // 2 :] *= -1
    q = hb.quantize(signs.half(), format)
    dense, exact = hb.dequantize(q, torch.float16), hb.dequantize(q, torch.float32).double()
    for m in (1, 4, 16, 33, 70, 130, 300, 1000):
        for invariant in (False, True):
            x = torch.full((m, k), 60000.0, device=DEVICE).half()
            x[:, k // 2 :] = 59968  # the next number below
            y = hb.linear(x, q, batch_invariant=invariant)
            right = x.double() @ exact.t()
            assert 10000 < right.abs().max() < 65504
            assert error(y, right) <= 1e-3 + 2 * error(x @ dense.t(), right)
        grad = torch.full((m, n), 60000.0, device=DEVICE).half()
        grad[:, n // 2 :] = 59968
        right = grad.double() @ exact
        assert error(eager.linear_backward(grad, q), right) <= 1e-3 + 2 * error(grad @ dense, right)
