"""Many pairs of a token and an expert, sorted on the device: operands to the bit, whatever the router chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from routes import routes_of, written
from torch import Tensor
from torch.nn.functional import linear as dense_linear

import halfbyte as hb
from halfbyte.kernels.experts import cuda, reference, sort
from halfbyte.kernels.experts import grouped as many
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.linear.sm90_gemm.shape import BACK_TILES_M
from halfbyte.kernels.linear.spread import most_tiles
from halfbyte.kernels.linear.tune import h200

from .conftest import BF16, DEVICE, F16, F32, NOISE, captured, decoded, error, on_another_stream, poisoned, sixteen_bits
from .test_experts import random, routing, stack

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
KINDS = (
    ("nf4", {}),
    ("nf4", {"nested": False}),
    ("fp4", {"block_size": 32, "nested": False}),
    ("nf4", {"block_size": 256}),
    ("int4", {"group_size": 32}),
    ("int4", {"group_size": 128}),
    ("mxfp4", {}),
)
EVERY_SHAPE = {name: getattr(h200, name) for name in ("GROUPED_STREAMK", "GROUPED_TIMES", "GROUPED_BACK_TIMES")}
NARROW, WIDE = tuple({tile_m: None for tile_m, _ in h200.GROUPED_STREAMK}), tuple(h200.GROUPED_TIMES)  # sm90_streamk's


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    many.products.entries.clear()
    yield
    many.products.entries.clear()


def use_tiles(tile_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of so many rows from now on, whatever is fastest."""
    for name, shapes in EVERY_SHAPE.items():
        width_of = {shape: shape[0] if isinstance(shape, tuple) else shape for shape in shapes}
        of_width = {shape: it for shape, it in shapes.items() if width_of[shape] == tile_m}
        monkeypatch.setattr(h200, name, of_width)
    many.products.entries.clear()


def block(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str, biases: tuple[Any, Any]
) -> Tensor:
    """The block as transformers computes it, expert by expert, rounded where it rounds; exact in fp64."""
    out = torch.zeros_like(x)
    for e in range(len(gate_up)):
        token, place = (ids == e).nonzero(as_tuple=True)
        bias = [None if one is None else one[e].to(x.dtype) for one in biases]
        both = dense_linear(x[token], gate_up[e], bias[0])
        wide = both if both.dtype is torch.float64 else both.float()
        y = dense_linear(reference.activate(wide, activation).to(x.dtype), down[e], bias[1])
        out.index_add_(0, token, y * weights[token, place, None].to(x.dtype))
    return out


def check_block(
    sizes: tuple[int, int, int, int], tokens: int, kind: str, activation: str, dtype: torch.dtype, format: str,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """The error is not above that of dequantized experts in transformers' order; replays give the same bits."""
    experts, inner, hidden, k = sizes
    gate_up = stack(experts, 2 * inner, hidden, format, dtype, **options)
    down = stack(experts, hidden, inner, format, dtype, **options)
    x, weights = random(tokens, hidden, dtype=dtype), torch.rand((tokens, k), device=DEVICE).to(dtype)
    ids = routing(tokens, experts, k, kind)
    biases: tuple[Any, Any] = (None, None)
    if tokens % 2:
        biases = random(experts, 2 * inner, dtype=dtype), random(experts, hidden, dtype=dtype)
    ours = partial(many.moe, x, ids, weights, Block(gate_up, down, activation, *biases))
    found = ours()
    assert found is not None
    if kind == "none":
        assert not found.any()
    else:
        exact = (hb.dequantize(q, F32).double() for q in (gate_up, down))
        right = block(x.double(), ids, weights.double(), *exact, activation, biases)
        theirs = block(x, ids, weights, *(hb.dequantize(q, dtype) for q in (gate_up, down)), activation, biases)
        assert error(found, right) <= NOISE * error(theirs, right), (tokens, kind, activation)
    graph, replayed = captured(ours)
    for _ in range(3):
        replayed.fill_(77)
        graph.replay()
        assert torch.equal(replayed, found)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("experts", [1, 5, 128, 1000])
def test_the_sort(experts: int, kind: torch.dtype) -> None:
    for pairs, tile_m in ((1, 32), (31, 128), (1025, 96), (4099, 32), (40000, 256)):
        for low, high in ((-2, experts + 2), (0, experts), (experts // 2, experts // 2 + 1), (-9, 0)):
            ids = torch.randint(low, high, (pairs,), device=DEVICE, dtype=kind)
            room = most_tiles(pairs, experts, tile_m)
            right = routes_of(ids.cpu(), experts, tile_m, room)
            table, places = sort.sort(ids, experts, tile_m, room)
            found = written(table.cpu(), room, pairs, len(right.order))
            assert found.count == right.count
            assert torch.equal(places.cpu(), right.places)
            for ours, theirs in zip(found[1:], right[1:], strict=True):
                assert torch.equal(ours, theirs)


@sixteen_bits
@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
def test_operands_are_what_dequantize_gives(
    format: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an expert that fill no tile do not become the next one's, nor do its rows of x."""
    for (experts, n, k), tile_m in (
        ((3, 333, 1024), 64), ((5, 130, 768), 96), ((2, 40, 320), 32), ((3, 72, 96), 128), ((3, 333, 512), 8),
        ((2, 520, 96), 16),
    ):  # fmt: skip
        if k % options.get("group_size", min(options.get("block_size", 64), 64)):
            continue
        use_tiles(tile_m, monkeypatch)
        q = stack(experts, n, k, format, dtype, **options)
        x = torch.eye(k, dtype=dtype, device=DEVICE).repeat(experts, 1)
        expert = torch.arange(experts, device=DEVICE).repeat_interleave(k)
        shuffled = torch.randperm(len(x), device=DEVICE)
        found = many.grouped_linear(x[shuffled], q, expert[shuffled], None)
        assert found is not None
        dense = decoded(q, dtype) if tile_m in NARROW else hb.dequantize(q, dtype)
        assert torch.equal(found, dense.transpose(1, 2).reshape(-1, n)[shuffled]), (n, k)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_gate_meets_its_up(activation: str) -> None:
    """Rows of the identity: the hidden row of a pair is act(gate) * up of the very weights, rounded once."""
    experts, inner, k = 3, 200, 256
    q = stack(experts, 2 * inner, k, "nf4", F16)
    x = torch.eye(k, dtype=F16, device=DEVICE)
    ids = torch.arange(experts, device=DEVICE).repeat(k, 1)
    found = many._products(x, (q,), (None,), (many.Grouping(experts, activation),), ids.numel())
    assert found is not None
    routes = found.sort(ids, experts)
    with poisoned((ids.numel(), inner), F16) as out:
        many._launch(found.each[0], x, routes, None, out, experts)
    right = reference.activate(hb.dequantize(q, F16).float().transpose(1, 2), activation)  # [experts, k, inner]
    torch.testing.assert_close(out.view(experts, k, inner).float(), right, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
@pytest.mark.parametrize("sizes", [(16, 256, 512, 4), (8, 1088, 2112, 2), (5, 2880, 2880, 3)], ids=str)
@sixteen_bits
def test_a_block(sizes: tuple[int, int, int, int], dtype: torch.dtype, format: str, options: dict[str, Any]) -> None:
    _, inner, hidden, k = sizes
    if hidden % options.get("group_size", 64) or inner % options.get("group_size", 64):
        pytest.skip("groups do not divide K")
    kinds = ("usual", "one expert", "out of range", "none")
    cases = zip((513, 700, 1601, 600), kinds, reference.ACTIVATIONS, strict=True)
    for pairs, kind, activation in cases:
        check_block(sizes, -(-pairs // k), kind, activation, dtype, format, options)


@pytest.mark.parametrize("tile_m", [*NARROW, *WIDE])
def test_every_width_of_tiles(tile_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(tile_m, monkeypatch)
    check_block((9, 320, 768, 3), 601, "usual", "silu", BF16, "nf4", {})
    check_block((4, 512, 1024, 2), 1000, "out of range", "swiglu_oai", F16, "int4", {})
    check_block((1, 256, 512, 1), 5000, "usual", "gelu", BF16, "mxfp4", {})


@pytest.mark.parametrize("tile_m", [64, 128, 256])
@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
def test_what_is_read_is_not_overwritten(
    tile_m: int, format: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K ends within a unit, so the copy of its last one is mostly zeros, which come from no memory, and so at once.
    Other work before each call has the CTAs of a launch begin at different times."""
    use_tiles(tile_m, monkeypatch)
    experts, hidden, k = 5, 2880, 3
    if hidden % options.get("group_size", 64):
        pytest.skip("groups do not divide K")
    block = Block(
        *(stack(experts, n, hidden, format, BF16, **options) for n in (2 * hidden, hidden)), "silu", None, None
    )
    x, weights = random(171, hidden), torch.rand((171, k), device=DEVICE)
    ids = routing(171, experts, k, "usual")
    first = many.moe(x, ids, weights, block)
    assert first is not None
    others = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(300):
        torch.full((8 << 20,), 77, dtype=torch.uint8, device=DEVICE)
        others += (many.moe(x, ids, weights, block) != first).any()
    assert others == 0


@pytest.mark.parametrize("tiles_m", [NARROW, WIDE], ids=str)
def test_bits_do_not_depend_on_tiles_or_neighbours(tiles_m: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one kernel: each sum is one CTA's, in the order of K."""
    use_tiles(tiles_m[-1], monkeypatch)
    q, x = stack(8, 300, 1024, "nf4", BF16), random(3000, 1024)
    expert = torch.randint(-1, 9, (3000,), device=DEVICE)
    whole = many.grouped_linear(x, q, expert, None)
    assert whole is not None
    assert not whole[(expert < 0) | (expert > 7)].any()
    for tile_m in tiles_m:
        use_tiles(tile_m, monkeypatch)
        assert torch.equal(many.grouped_linear(x, q, expert, None), whole)
    some = torch.randperm(3000, device=DEVICE)[:700]
    assert torch.equal(many.grouped_linear(x[some], q, expert[some], None), whole[some])


@pytest.mark.parametrize("rows", [513, 5000])
@pytest.mark.parametrize("n", [8, 130, 333, 1040])
def test_grouped_linear(n: int, rows: int) -> None:
    """Nothing is written behind the result, or into rows of nobody."""
    q, bias = stack(40, n, 1024, "nf4", BF16), random(40, n)
    dense = hb.dequantize(q, F32).double()
    x, expert = random(rows, 1024), torch.randint(-1, 41, (rows,), device=DEVICE)
    found = hb.grouped_linear(x, q, expert, bias)
    valid = (expert >= 0) & (expert < 40)
    right = torch.zeros((rows, n), dtype=torch.float64, device=DEVICE)
    for e in range(40):
        right[expert == e] = x[expert == e].double() @ dense[e].t() + bias[e].double()
    assert not found[~valid].any()
    assert error(found, right) < 3e-3
    with poisoned((rows, n), BF16) as out:
        out.zero_()
        products = many._products(x, (q,), (bias,), (many.Grouping(40, scatters=True),), rows)
        assert products is not None
        many._launch(products.each[0], x, products.sort(expert, 40), bias, out, 1)
    assert torch.equal(out, found)


def test_rows_that_are_sorted_ahead() -> None:
    """They get the bits that they get where they are sorted with every call, whatever x is by then."""
    q, x = stack(16, 200, 320, "nf4", BF16), torch.randn((300, 320), dtype=BF16, device=DEVICE)
    ids = torch.randint(-1, 17, (300, 3), device=DEVICE)
    multiply = many.sorted_ahead(x, q, ids)
    assert multiply is not None
    for _ in range(2):
        assert torch.equal(multiply(), many.grouped_linear(x.repeat_interleave(3, 0), q, ids.view(-1), None))
        x.copy_(torch.randn_like(x))


def test_a_graph_whose_ids_change() -> None:
    """Experts that come and go, with one that takes all between."""
    gate_up, down = stack(16, 512, 512, "nf4", BF16), stack(16, 512, 256, "nf4", BF16)
    x, weights, ids = random(400, 512), torch.rand((400, 4), device=DEVICE), routing(400, 16, 4, "usual")
    hb.moe(x, ids, weights, gate_up, down)  # compiles
    graph, replayed = captured(lambda: hb.moe(x, ids, weights, gate_up, down))
    for kind in ("one expert", "usual", "none", "out of range", "usual"):
        ids.copy_(routing(400, 16, 4, kind))
        x.copy_(random(400, 512))
        replayed.fill_(77)
        graph.replay()
        assert torch.equal(replayed, hb.moe(x, ids, weights, gate_up, down)), kind


def test_parts_ids_streams_and_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down = stack(16, 512, 512, "nf4", BF16), stack(16, 512, 256, "nf4", BF16)
    x, weights, ids = random(300, 512), torch.rand((300, 4), device=DEVICE), routing(300, 16, 4, "usual")
    moe: Callable[[Tensor, Tensor], Tensor] = lambda x, ids: hb.moe(x, ids, weights, gate_up, down)  # noqa: E731
    right = moe(x, ids)
    assert torch.equal(on_another_stream(lambda: moe(x, ids.int())), right)
    assert torch.equal(torch.compile(moe, fullgraph=True)(x, ids), right)
    monkeypatch.setattr(many, "MOST_BYTES", 1 << 20)
    assert torch.equal(moe(x, ids), right)


@sixteen_bits
@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
def test_operands_on_the_way_back(
    format: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the identity give the experts as they are dequantized: of each its own rows, and columns that fill no
    tile."""
    for (experts, n, k), tile_m in (
        ((3, 333, 1024), 64),
        ((5, 130, 768), 96),
        ((2, 40, 320), 32),
        ((3, 72, 96), 128),
        ((4, 7, 64), 256),
        ((2, 515, 160), 160),
    ):
        if k % options.get("group_size", min(options.get("block_size", 64), 64)):
            continue
        use_tiles(tile_m, monkeypatch)
        q = stack(experts, n, k, format, dtype, **options)
        grad = torch.eye(n, dtype=dtype, device=DEVICE).repeat(experts, 1)
        expert = torch.arange(experts, device=DEVICE).repeat_interleave(n)
        shuffled = torch.randperm(len(grad), device=DEVICE)
        found = many.grouped_linear_backward(grad[shuffled], q, expert[shuffled])
        assert found is not None
        assert torch.equal(found, hb.dequantize(q, dtype).view(-1, k)[shuffled]), (n, k)


def check_gradient(q: hb.QuantizedWeight, grad: Tensor, expert: Tensor) -> None:
    """The error is not above that of products with dense experts; every call and every replay gives the same bits."""
    experts, _, k = q.shape
    exact, dense = hb.dequantize(q, F32).double(), hb.dequantize(q, grad.dtype)
    right = torch.zeros((len(grad), k), dtype=torch.float64, device=DEVICE)
    theirs = torch.zeros((len(grad), k), dtype=grad.dtype, device=DEVICE)
    for e in range(experts):
        rows = expert == e
        right[rows], theirs[rows] = grad[rows].double() @ exact[e], grad[rows] @ dense[e]
    backward = partial(cuda.grouped_linear_backward, grad, q, expert)
    found = backward()
    assert found is not None
    known = (expert >= 0) & (expert < experts)
    assert not found[~known].any()
    if known.any():
        noise = NOISE if int(known.sum()) * k >= 1 << 14 else 1.5  # few results make a noisy norm
        assert error(found, right) <= noise * error(theirs, right), (tuple(q.shape), len(grad))
    assert torch.equal(backward(), found)
    graph, replayed = captured(backward)
    for _ in range(3):
        replayed.fill_(77)
        graph.replay()
        assert torch.equal(replayed, found)


@sixteen_bits
@pytest.mark.parametrize(("format", "options"), KINDS, ids=str)
@pytest.mark.parametrize("sides", [(16, 512, 512), (128, 192, 256), (5, 2113, 1088), (8, 333, 2880)], ids=str)
def test_gradients_of_rows(
    sides: tuple[int, int, int], format: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of one row and of many; of a router that wants a few experts, one, none, and some that are elsewhere."""
    experts, n, k = sides
    if k % options.get("group_size", min(options.get("block_size", 64), 64)):
        pytest.skip("spans do not divide K")
    q = stack(experts, n, k, format, dtype, **options)
    for rows, kind in ((1, "usual"), (300, "usual"), (700, "one expert"), (1601, "out of range"), (600, "none")):
        expert = routing(rows, experts, 1, kind)[:, 0]
        if rows == 300:
            expert = expert % 2  # no rows for most experts
        check_gradient(q, random(rows, n, dtype=dtype), expert)


@pytest.mark.parametrize("tile_m", BACK_TILES_M)
def test_every_width_on_the_way_back(tile_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of both kinds."""
    use_tiles(tile_m, monkeypatch)
    for sides, rows, dtype, (format, options) in (
        ((9, 640, 768), 3 * tile_m - 7, BF16, KINDS[0]),
        ((4, 1021, 1024), 1000, F16, KINDS[4]),
        ((1, 512, 320), 5000, BF16, KINDS[6]),
    ):
        expert = torch.randint(-1, sides[0] + 1, (rows,), device=DEVICE, dtype=torch.int32)
        check_gradient(stack(*sides, format, dtype, **options), random(rows, sides[1], dtype=dtype), expert)


def test_gradients_do_not_depend_on_tiles_or_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum is one CTA's, in the order of N; nothing is written around the result, or into rows of nobody."""
    q, grad = stack(8, 1030, 320, "nf4", BF16), random(3000, 1030)
    expert = torch.randint(-1, 9, (3000,), device=DEVICE)
    whole = many.grouped_linear_backward(grad, q, expert)
    assert whole is not None
    for tile_m in BACK_TILES_M:
        use_tiles(tile_m, monkeypatch)
        assert torch.equal(many.grouped_linear_backward(grad, q, expert), whole)
    some = torch.randperm(3000, device=DEVICE)[:700]
    assert torch.equal(many.grouped_linear_backward(grad[some], q, expert[some]), whole[some])
    with poisoned((3000, 320), BF16) as out:
        out.zero_()
        products = many._products(grad, (q,), (None,), (many.Grouping(8, scatters=True),), 3000, back=True)
        assert products is not None
        many._launch(products.each[0], grad, products.sort(expert, 8), None, out, 1)
    assert torch.equal(out, whole)


def test_a_step_that_the_host_does_not_wait_for() -> None:
    """Forward and backward of a block, captured; the ids change between replays. No dense expert is made."""
    gate_up, down = stack(16, 1024, 512, "nf4", BF16), stack(16, 512, 512, "nf4", BF16)
    x, weights = random(400, 512).requires_grad_(), torch.rand((400, 4), device=DEVICE).requires_grad_()
    grad, ids = random(400, 512), routing(400, 16, 4, "usual")

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(hb.moe(x, ids, weights, gate_up, down), (x, weights), grad)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, replayed = captured(step)
    for kind in ("one expert", "usual", "none", "out of range"):
        ids.copy_(routing(400, 16, 4, kind))
        for tensor in replayed:
            tensor.fill_(77)
        graph.replay()
        assert all(map(torch.equal, replayed, step())), kind
        assert kind != "none" or not any(map(torch.any, replayed))


def test_gradients_make_no_dense_experts() -> None:
    q, grad = stack(4, 4096, 8192, "nf4", BF16), random(64, 4096)
    expert = torch.arange(64, device=DEVICE) % 4
    cuda.grouped_linear_backward(grad, q, expert)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = cuda.grouped_linear_backward(grad, q, expert)
    torch.cuda.synchronize()
    assert found is not None
    assert torch.cuda.max_memory_allocated() - before < 4096 * 8192  # half of what one dense expert takes


def test_gradients_of_many() -> None:
    """Forward and backward by the kernels."""
    gate_up, down = stack(4, 512, 512, "nf4", BF16), stack(4, 512, 256, "nf4", BF16)
    x, weights = random(200, 512).requires_grad_(), torch.rand((200, 3), device=DEVICE)
    ids = routing(200, 4, 3, "usual")
    hb.moe(x, ids, weights, gate_up, down).float().square().sum().backward()
    exact = [hb.dequantize(q, F32).double() for q in (gate_up, down)]
    again = x.detach().double().requires_grad_()
    block(again, ids, weights.double(), *exact, "silu", (None, None)).square().sum().backward()
    assert x.grad is not None
    assert again.grad is not None
    assert error(x.grad, again.grad) < 3e-2


def test_few_of_a_stack_that_the_kernel_for_few_is_not_for() -> None:
    q = stack(4, 40, 96, "nf4", BF16, block_size=32)
    x, expert = random(5, 96), torch.tensor([0, 3, 9, 3, 1], device=DEVICE)
    found = cuda.grouped_linear(x, q, expert, None)
    assert found is not None
    assert not found[2].any()
    right = torch.stack([x[i].double() @ hb.dequantize(q, F32)[e].double().t() for i, e in ((0, 0), (1, 3), (4, 1))])
    assert error(found[[0, 1, 4]], right) < 3e-3
