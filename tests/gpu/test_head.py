"""The product of a model's dense head, on a GPU: against fp64, next to what it must leave alone, captured, and in a
step."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.head import launch

GPU = torch.device("cuda", 0)
SIZES = [(32000, 4096), (151936, 896), (9000, 2048), (5003, 2880), (8192, 8192), (4097, 3584)]
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "k"), [(32000, 4096), (151936, 896), (9000, 2048), (5003, 2880), (8192, 8192), (4097, 3584)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_error(n: int, k: int, dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(n)
    weight = (torch.randn(n, k, device=GPU) / k**0.5).to(dtype)
    bias = torch.randn(n, device=GPU).to(dtype) if has_bias else None
    for rows in (1, 2, 8, 9, 16, 30):
        x = torch.randn(1, rows, k, device=GPU).to(dtype)
        if not launch.supports(x, weight, bias):
            assert rows > 8
            assert k > 2048
            continue
        right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        found = launch.head(x, weight, bias)
        assert found.shape == (1, rows, n)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), right, rtol=torch.finfo(dtype).eps, atol=2e-5)
        assert torch.equal(found[:, :1], launch.head(x[:, :1], weight, bias)) or rows > 8  # bits of a row are its own


def test_captured_behind_what_writes_x() -> None:
    """A kernel just ahead writes x, and the next one reads y; again and again, with other numbers."""
    weight = (torch.randn(32000, 4096, device=GPU) / 64).bfloat16()
    source = torch.randn(4, 4096, device=GPU).bfloat16()
    launch.head(source, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = source
        for _ in range(5):
            y = launch.head(y[:, :4096] * 1, weight, None)
        best = y.argmax(dim=1)
    for _ in range(20):
        source.copy_(torch.randn(4, 4096, device=GPU))
        graph.replay()
        right = source
        for _ in range(5):
            right = torch.nn.functional.linear(right[:, :4096], weight)
        torch.testing.assert_close(y.float(), right.float(), rtol=0.1, atol=0.1)
        assert torch.equal(best, y.argmax(dim=1))


def test_more_than_two_to_the_31() -> None:
    weight = torch.zeros(600_000, 4096, dtype=torch.bfloat16, device=GPU)
    weight[-5:] = torch.randn(5, 4096, device=GPU)
    x = torch.randn(3, 4096, device=GPU).bfloat16()
    found = launch.head(x, weight, None)
    torch.testing.assert_close(found[:, -5:], torch.nn.functional.linear(x, weight[-5:]), rtol=0.02, atol=0.5)
    assert (found[:, :-5] == 0).all()


def test_supports() -> None:
    weight = torch.zeros(4096, 512, dtype=torch.bfloat16, device=GPU)
    x = weight[:4]
    assert launch.supports(x, weight, None)
    assert not launch.supports(x, weight[:100], None)  # fewer rows than all multiprocessors share
    assert not launch.supports(x[:, ::2], weight[:, ::2], None)
    assert not launch.supports(x.half(), weight, None)
    assert not launch.supports(weight[:33], weight, None)
    assert not launch.supports(x, weight, torch.zeros(4096, device=GPU))
    assert not launch.supports(x[:0], weight, None)
