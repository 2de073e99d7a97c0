"""The product on Hopper, every plan and format of it: right, the same bits every time, nothing beyond its end.

NVRTC takes a third of a second for a plan's tile and a kind of weight, so most tests share those in CASES.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch

import halfbyte as hb
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.linear import cuda, dispatch, laid_out, side_by_side
from halfbyte.kernels.linear.kernel import plan_for, run
from halfbyte.kernels.linear.laid_out import UNIT_K, span_of
from halfbyte.kernels.linear.problem import INVARIANT_ROWS, Problem, problem_of
from halfbyte.kernels.linear.sm90_streamk import launch as hopper
from halfbyte.kernels.linear.sm90_streamk.shape import StreamKPlan, is_valid
from halfbyte.kernels.linear.tune import h200

from .conftest import BF16, DEVICE, F16, F32, POISON, captured, check_product, decoded, poisoned, sixteen_bits, weight

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
FLAT = {"nested": False}
# x, format, options, the dense weight. Formats of one block size share machine code: the codebook is an argument.
KINDS = (
    *((dtype, "nf4", {"block_size": 64}, dtype) for dtype in (F16, BF16)),
    *((dtype, "fp4", {"block_size": 64} | FLAT, dtype) for dtype in (BF16, F16)),
    (F16, "nf4", {"block_size": 32}, F16),
    (BF16, "fp4", {"block_size": 32}, BF16),
    (BF16, "nf4", {"block_size": 32} | FLAT, BF16),
    (F16, "fp4", {"block_size": 128}, F16),
    (BF16, "nf4", {"block_size": 128} | FLAT, BF16),
    (BF16, "nf4", {"block_size": 256}, BF16),
    (F16, "fp4", {"block_size": 256} | FLAT, F16),
    (F16, "nf4", {"block_size": 4096}, F16),
    (BF16, "fp4", {"block_size": 4096} | FLAT, BF16),
    *((dtype, "int4", {"group_size": size}, dtype) for size in (32, 64) for dtype in (F16, BF16)),
    (F16, "int4", {"group_size": 128}, F16),
    (BF16, "int4", {"group_size": 128}, F32),
    (F16, "int4", {"group_size": 64}, BF16),
)
# Width, groups and stages: the extremes of what the planner chooses from, and a tuner may.
TILES = (
    *((8, 4, 3), (64, 2, 3), (16, 3, 4), (32, 3, 3), (80, 3, 2), (24, 2, 3), (96, 2, 2), (8, 2, 6), (64, 3, 2)),
    *((48, 3, 3), (112, 2, 2), (32, 4, 2), (24, 4, 3), (80, 2, 2), (16, 2, 2), (96, 3, 2), (48, 2, 3), (64, 4, 2)),
    (128, 2, 2),
)
CASES = tuple((*kind, tile) for kind, tile in zip(KINDS, cycle(TILES), strict=False))
cases = pytest.mark.parametrize(("dtype", "format", "options", "stored", "tile"), CASES, ids=str)


def numbers(m: int, k: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """x, with something before and behind it that no sum survives."""
    buffer = torch.full((m * k + 128,), float("nan"), dtype=dtype, device=DEVICE)
    return buffer[64 : 64 + m * k].view(m, k).copy_(torch.randn((m, k), device=DEVICE))


def fused(
    x: torch.Tensor, q: hb.QuantizedWeight, plan: StreamKPlan | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The kernel's result, with poison under it and around it; without a plan, that of any number of rows."""
    plan = plan or plan_for(hopper, x, q, None, True)
    assert plan is not None
    assert is_valid(plan, len(x), *q.shape, span_of(problem_of(x, q, bias)), properties_of(0))
    with poisoned((len(x), q.shape[0]), x.dtype) as out:
        run(hopper, x, q, bias, out, plan)
    return out


def shared_by(tile: tuple[int, int, int], m: int, n: int, k: int) -> list[StreamKPlan]:
    """Plans for a lone CTA, some CTAs, one for each tile, two for each and a little, one for each unit; for CTAs that
    hold x for a unit, or two, and add up in memory or, where a cluster has room for all of a tile, in that; and for
    CTAs that end a tile together, or leave registers to what lays x out."""
    tiles, depth = -(-n // (64 * tile[1])) * -(-m // tile[0]), -(-k // UNIT_K)
    units = tiles * depth
    shared = [StreamKPlan(*tile, ctas) for ctas in sorted({1, 7, tiles, 2 * tiles + 1, units}) if ctas <= units]
    held = [StreamKPlan(*tile, tiles * -(-depth // held), held) for held in {1, min(2, depth)}]
    clusters = [replace(plan, cluster=plan.ctas // tiles) for plan in held if plan.ctas > tiles]
    equal = [StreamKPlan(*tile, tiles * shares, shares=shares) for shares in (2, 5, 16) if shares <= depth]
    equal += [replace(plan, shares=plan.ctas // tiles) for plan in held if plan.ctas > tiles]
    beside = [replace(shared[1], beside=True)] if len(shared) > 1 else []
    others = held + clusters + equal + beside
    return shared + [plan for plan in others if is_valid(plan, m, n, k, 32, properties_of(0))]


def check(x: torch.Tensor, q: hb.QuantizedWeight, plans: list[StreamKPlan]) -> None:
    check_product(x, q, partial(fused, x, q), plans)


@pytest.mark.parametrize("shape", [(1, 64), (77, 320), (515, 960), (1029, 1024), (700, 5376), (129, 14336)])
@cases
def test_error(
    dtype: torch.dtype,
    format: str,
    options: dict[str, object],
    stored: torch.dtype,
    tile: tuple[int, int, int],
    shape: tuple[int, int],
) -> None:
    n, k = shape
    q = weight(n, k, format, stored, **options)
    for m in (1, tile[0], tile[0] + 1):
        check(numbers(m, k, dtype), q, shared_by(tile, m, n, k))


@pytest.mark.parametrize(("width", "groups"), [*h200.STREAMK_TILES, (64, 4)])
def test_every_tile(width: int, groups: int) -> None:
    """As few and as many stages as there can be, and more units than stages a CTA."""
    m, n = 2 * width + 3, 777
    for k, pick in ((1024, 0), (960, -1)):
        q, x = weight(n, k), numbers(m, k)
        plans = (StreamKPlan(width, groups, stages, 1) for stages in range(2, 9))
        stages = [plan.stages for plan in plans if is_valid(plan, m, n, k, 64, properties_of(0))][pick]
        check(x, q, shared_by((width, groups, stages), m, n, k))


@pytest.mark.parametrize("parts", range(6, 13))
@sixteen_bits
def test_a_row_alone_has_the_bits_it_has_among_others(dtype: torch.dtype, parts: int) -> None:
    """Whatever the tile's width is, from 6 to 12 CTAs add up their parts in one order."""
    k = next(k for k in range(256, 16384, 256) if cuts(2049, k) == parts)
    for block_size, nested in ((64, True), (128, False), (512, False)):
        q = weight(2049, k, "nf4", dtype, block_size=block_size, nested=nested)
        x = torch.randn((INVARIANT_ROWS, k), device=DEVICE).to(dtype)
        whole = hb.linear(x, q, batch_invariant=True)
        for m in (1, 2, 5, 9, 17, 40, 100):
            assert torch.equal(hb.linear(x[:m], q, batch_invariant=True), whole[:m]), (m, block_size)


def cuts(n: int, k: int) -> int:
    """Into how many parts a tile of W [n, k] is cut where sums must not depend on the rows of x."""
    plan = hopper.plan(1, Problem(BF16, n, k, "nf4", 64, torch.uint8, 256), properties_of(0), True)
    return plan.ctas // -(-n // plan.rows) if plan else 0


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_number_of_rows(batch_invariant: bool) -> None:
    q = weight(515, 1024)
    for m in range(1, 131):
        x = numbers(m, 1024)
        check(x, q, [plan_for(hopper, x, q, None, batch_invariant)])


@pytest.mark.parametrize("cluster", range(2, 9))
def test_clusters_run_at_once(cluster: int) -> None:
    """As many as the planner goes by: else some would begin when others are done."""
    q, x = weight(256, 256 * cluster), numbers(16, 256 * cluster)
    plan = StreamKPlan(16, 2, 4, 2 * cluster, 1, cluster)
    check(x, q, [plan])
    compiled = hopper.variant(problem_of(x, q, None), plan, properties_of(0))
    _, multiply = laid_out.make_launches(x.get_device(), (1, cluster), plan, compiled)
    assert multiply.most_clusters() >= properties_of(0).clusters(cluster)


@pytest.mark.parametrize("k", [32, 96, 352])
def test_half_of_a_span_of_64(k: int) -> None:
    """K is a multiple of 32 only, as far as blocks are of 32."""
    small = [case for case in CASES if case[2].get("block_size") == 32]
    assert len(small) == 3
    for dtype, format, options, stored, tile in small:
        q = weight(130, k, format, stored, **options)
        check(numbers(9, k, dtype), q, shared_by(tile, 9, 130, k))


@pytest.mark.parametrize("k", [960, 1024])
@cases
def test_identity_gives_the_decoded_weights(
    dtype: torch.dtype,
    format: str,
    options: dict[str, object],
    stored: torch.dtype,
    tile: tuple[int, int, int],
    k: int,
) -> None:
    """Every weight comes out as its 16-bit codebook value times its scale, rounded once: no nibble in a wrong place, no
    scale in another's. For int4 that is what dequantize gives."""
    n = 133
    q = weight(n, k, format, stored, **options)
    bytes_of = q.packed.view(torch.uint8).view(-1)
    bytes_of.copy_(torch.randint(0, 256, bytes_of.shape, device=DEVICE))  # every nibble, -8 included
    values = decoded(q, dtype)
    eye = torch.eye(k, dtype=dtype, device=DEVICE)
    for plan in shared_by(tile, k, n, k):
        assert torch.equal(fused(eye, q, plan), values.t())
    for first in range(0, k, 93):
        part = slice(first, first + 93)
        x = eye[part].contiguous()
        assert torch.equal(fused(x, q, shared_by(tile, len(x), n, k)[-1]), values.t()[part])


@pytest.mark.parametrize("shape", [(1024, 4096), (129, 14336), (5000, 1024)])
def test_a_row_does_not_depend_on_its_neighbours(shape: tuple[int, int]) -> None:
    n, k = shape
    q, x = weight(n, k), numbers(150, k)
    bias = torch.randn(n, device=DEVICE).bfloat16()
    whole = fused(x, q, None, bias)
    for m in (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 129):
        assert torch.equal(fused(x[:m], q, None, bias), whole[:m])
        assert torch.equal(fused(x[m : m + 1], q, None, bias), whole[m : m + 1])
    order = torch.randperm(len(x), device=DEVICE)
    assert torch.equal(fused(x[order], q, None, bias), whole[order])


def test_what_is_not_a_number_stays_in_its_row() -> None:
    k = 1024
    q, x = weight(100, k, "fp4", block_size=64, nested=False), numbers(20, k)
    plans = shared_by((16, 3, 4), 20, 100, k)
    rights = [fused(x, q, plan) for plan in plans]
    x[3, 5], x[19, 1000] = float("nan"), float("inf")
    scales = q.scale.clone()
    scales[100] = float("nan")  # of row 6
    q = hb.QuantizedWeight("fp4", q.packed, scales, q.shape, q.dtype, 64)
    others = [row for row in range(20) if row not in (3, 19)]
    columns = [column for column in range(100) if column != 6]
    for plan, right in zip(plans, rights, strict=True):
        y = fused(x, q, plan)
        assert torch.equal(y[others][:, columns], right[others][:, columns])
        assert y[3].isnan().all()
        assert not y[19].isfinite().any()
        assert y[:, 6].isnan().all()


def test_more_than_two_to_the_31_weights() -> None:
    k, tail = 4096, 193
    n = (1 << 31) // k + tail
    packed = torch.randint(0, 256, (n * k // 2,), dtype=torch.uint8, device=DEVICE)
    q = hb.QuantizedWeight("fp4", packed, torch.rand(n * k // 64, device=DEVICE), (n, k), F16, 64)
    last = hb.QuantizedWeight("fp4", packed[-tail * k // 2 :], q.scale[-tail * k // 64 :], (tail, k), F16, 64)
    x = numbers(3, k, F16)
    plan, small = (StreamKPlan(32, 3, 3, -(-rows // 192)) for rows in (n, tail))  # a CTA a tile: sums in one order
    assert torch.equal(fused(x, q, plan)[:, -tail:], fused(x, last, small))


def test_more_sums_than_there_was_room_for() -> None:
    q, few = weight(33001, 512), weight(333, 512)
    x = numbers(64, 512)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            check(x[:9], few, shared_by((8, 2, 7), 9, 333, 512))
            check(x, q, shared_by((8, 2, 7), 64, 33001, 512)[-1:])


def test_more_ctas_than_there_is_room_for() -> None:
    """The CTA that begins a tile waits for all that share it, some of which can begin only when others have ended."""
    q = weight(500, 14336)  # tiles of 56 units
    for m, (width, groups, stages) in ((8, (8, 2, 6)), (40, (64, 2, 3)), (16, (16, 3, 3))):
        x, tiles = numbers(m, 14336), -(-500 // (64 * groups))
        for ctas in (56 * tiles, 41 * tiles + 1):
            plan = StreamKPlan(width, groups, stages, ctas)
            check(x, q, [plan])
            first = fused(x, q, plan)
            streams = [torch.cuda.Stream() for _ in range(4)]
            torch.cuda.synchronize()
            found = []
            for stream in streams * 5:
                with torch.cuda.stream(stream):
                    found.append(fused(x, q, plan))
            torch.cuda.synchronize()
            assert all(torch.equal(first, y) for y in found)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_sums_that_are_no_numbers_are_not_waited_for(value: float) -> None:
    q, x = weight(500, 4096), numbers(8, 4096)
    x[3, 4000], x[5, 10] = value, -value
    for ctas in (3, 40, 48):
        y = fused(x, q, StreamKPlan(8, 3, 3, ctas))
        assert y[[3, 5]].isfinite().sum() == 0
        assert y[[0, 1, 2, 4, 6, 7]].isfinite().all()


def test_launches_one_after_the_other() -> None:
    """A launch may begin before the one ahead is done, whose result it multiplies, and whose memory it may take."""
    k, plans = 2048, (StreamKPlan(8, 2, 6, 31), StreamKPlan(64, 2, 3, 33), StreamKPlan(16, 3, 3, 29))
    weights, next_weights = ([weight(k, k) for _ in range(6)] for _ in range(2))
    x = numbers(8, k)

    def chain(pause: bool) -> list[torch.Tensor]:
        found, y = [], x
        for i in range(60):
            q, now = weights[i % 6], next_weights[i % 6] if i % 5 == 4 else weights[i % 6]
            packed, scale = q.packed.clone(), q.scale.clone()
            if pause:
                torch.cuda.synchronize()
            packed.copy_(now.packed), scale.copy_(now.scale)  # written right before they are read
            q = hb.QuantizedWeight("nf4", packed, scale, q.shape, q.dtype, 64, now.nested)
            out = torch.empty_like(x)
            for plan in plans[: 1 + i % 3]:
                if pause:
                    torch.cuda.synchronize()
                run(hopper, y, q, None, out, plan)
                y, out = out, torch.empty_like(x)
            found.append(y)
        return found

    right = chain(pause=True)
    assert 0.1 < right[-1].double().square().mean() < 10
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(chain(pause=False), right, strict=True))


def test_streams_at_once() -> None:
    """Launches that run beside each other share neither counters nor sums: few CTAs each, so that they do."""
    q = weight(500, 14336)
    tiles = ((8, 2, 6), (64, 2, 3), (16, 3, 3), (8, 2, 6))
    inputs = [numbers(m, 14336) for m in (8, 70, 16, 5)]
    plans = [StreamKPlan(*tile, ctas) for tile, ctas in zip(tiles, (30, 37, 29, 31), strict=True)]
    outs = [fused(x, q, plan) for x, plan in zip(inputs, plans, strict=True)]
    rights, wrong = [out.clone() for out in outs], torch.zeros(4, dtype=torch.int64, device=DEVICE)
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i].fill_(POISON)
                run(hopper, inputs[i], q, None, outs[i], plans[i])
                run(hopper, inputs[i], q, None, outs[i], plans[i])
                wrong[i] += (outs[i] != rights[i]).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0, 0, 0]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is no other kernel. Of many rows another one is faster with one weight after the other."""
    choices = dispatch.choose, dispatch.choose_group
    monkeypatch.setattr(dispatch, "KERNELS", (hopper,))
    for choice in choices:
        choice.cache_clear()
    yield
    for choice in choices:
        choice.cache_clear()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_several_weights_of_one_x(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """x is laid out once; each gets the bits that its plan gives it alone, in a graph too, whose x then changes."""
    monkeypatch.setattr(side_by_side, "are_alike", lambda group: False)
    dispatch.choose_group.cache_clear()
    for m, sizes in (
        (33, (9000, 5701, 8500)),
        (64, (9000, 6002)),
        (130, (9000, 6001, 5800)),
        (192, (9000, 6001, 5000)),
    ):
        weights = [hb.quantize(torch.randn((n, 2304), device=DEVICE).bfloat16(), format) for n in sizes]
        biases = [None, *(torch.randn(n, device=DEVICE).bfloat16() for n in sizes[1:])]
        x = numbers(m, 2304)
        group = tuple(problem_of(x, q, bias) for q, bias in zip(weights, biases, strict=True))
        choice = dispatch.choose_group(m, group, properties_of(0))
        assert choice is not None
        assert choice.kernel is hopper
        cuda.linear_group(x, weights, biases)
        graph, outs = captured(partial(cuda.linear_group, x, weights, biases))
        for _ in range(3):
            found = cuda.linear_group(x, weights, biases)
            graph.replay()
            assert found is not None
            for y, out, q, bias, plan in zip(found, outs, weights, biases, choice.plan.plans, strict=True):
                alone = torch.empty_like(y)
                run(hopper, x, q, bias, alone, plan)
                assert torch.equal(y, alone)
                assert torch.equal(out, alone)
            x.copy_(torch.randn_like(x))
    dispatch.choose_group.cache_clear()


def test_cuda_graphs_on_two_streams() -> None:
    """Two graphs beside each other and beside plain launches, and one graph on two streams, which take turns."""
    q, x = weight(500, 14336), numbers(40, 14336)
    plans = [StreamKPlan(8, 2, 6, 31), StreamKPlan(64, 2, 3, 33), StreamKPlan(16, 3, 3, 29)]
    outs = [fused(x, q, plan) for plan in plans]
    rights = [out.clone() for out in outs]
    torch.cuda.synchronize()

    def twice(out: torch.Tensor, plan: StreamKPlan) -> None:
        for _ in range(2):
            out.fill_(POISON)
            run(hopper, x, q, None, out, plan)

    graphs = [captured(partial(twice, out, plan))[0] for out, plan in zip(outs[:2], plans[:2], strict=True)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    torch.cuda.synchronize()
    for turn in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i < 2:
                    graphs[i].replay()
                else:
                    outs[i].fill_(POISON)
                    run(hopper, x, q, None, outs[i], plans[i])
                wrong[i] += (outs[i] != rights[i]).sum()
        if turn % 5 == 4:
            torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0, 0]
    x.copy_(torch.randn_like(x))  # the same addresses, other numbers
    rights = [fused(x, q, plan) for plan in plans]
    torch.cuda.synchronize()
    for stream in streams[:2] * 3:
        with torch.cuda.stream(stream):
            graphs[0].replay()
            graphs[1].replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, right) for out, right in zip(outs[:2], rights[:2], strict=True))


def test_graphs_of_torch_compile() -> None:
    """They own what is allocated while they warm up and record, and refuse what is kept beyond that."""
    q = hb.quantize(torch.randn((2048, 14336), device=DEVICE).bfloat16() / 14336**0.5)
    x = numbers(40, 14336)
    assert dispatch.choose(40, problem_of(x, q, None), properties_of(0), False).kernel is hopper
    step = torch.compile(lambda x: hb.linear(x, q) * 2, mode="reduce-overhead", fullgraph=True)
    with torch.cuda.stream(torch.cuda.Stream()):  # one that has no room yet
        for _ in range(5):
            x.copy_(torch.randn_like(x))
            right = (hb.linear(x, q) * 2).clone()
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(step(x), right)
