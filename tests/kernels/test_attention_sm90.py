"""The attention kernel with clusters, without a GPU: its plans, that it compiles for every target that it is for, and
that it computes the right thing on a CPU."""

from __future__ import annotations

import ctypes
import math
import random
import struct
from dataclasses import replace
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import Shape
from gpus import H200, MI300X
from hypothesis import given
from hypothesis import strategies as st
from rings import operations, usage
from torch import Tensor

from halfbyte.kernels.attention import reference
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.sm90 import launch, paged
from halfbyte.kernels.attention.sm90.plan import (
    ENOUGH_TURNS,
    HELPERS,
    MOST_ROWS,
    OF_A_MULTIPROCESSOR,
    PAGES_SIZES,
    ClusterPlan,
    cluster_plan,
    pages_plan,
)
from halfbyte.kernels.attention.spans import WIDTH
from halfbyte.kernels.common.device import properties_for
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.common.nvrtc import Variant, compile_cubin
from halfbyte.kernels.common.workspace import Workspace

BF16, F16 = torch.bfloat16, torch.float16
BOUND = {BF16: 2.0**-6, F16: 2.0**-9}  # weights and results are rounded to it


def on_cpu(
    folder: Path,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    plan: ClusterPlan,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
    fresh: Fresh | None = None,
) -> Tensor:
    """The source itself, thread by thread, within the bounds of caches and masks."""
    texts, heads, new, size = query.shape
    shared = keys.shape[1]
    out = torch.full((texts + 1, new, heads, size), 777.0, dtype=query.dtype)
    sums = plan.sums(texts * shared, heads // shared * new, size)
    workspace = Workspace(sums, query.device)
    first = workspace.take(sums)  # by a launch ahead
    (ctypes.c_float * sums).from_address(first[0])[:] = [7.0] * sums
    told = launch.arguments(query, keys, values, mask, 0.09, softcap, sinks, spans, fresh, workspace.take(sums), out)
    group, kinds = heads // shared, (launch.mask_kind(mask), launch.sinks_kind(None if sinks is None else sinks.dtype))
    variant = launch.variant(
        H200, group, new, size, plan, True, query.dtype, *kinds, spans is not None, bool(softcap), fresh is not None,
        launch.turning_of(fresh), overlaps=False,
    )  # fmt: skip
    readable = [keys, values, *(t for t in (mask, spans, sinks) if t is not None)]
    if fresh is not None:
        norms = [norm.weight for norm in (fresh.query_norm, fresh.key_norm) if norm is not None]
        readable += [fresh.cos, fresh.sin, fresh.slot, *norms]
    shared_bytes = plan.shared_bytes(group * new, size, 0 if fresh is None else new)
    grid = launch.grid(texts * shared, plan)
    together = plan.ctas if plan.in_memory else 1
    shape = Shape(grid[0], plan.threads(group * new), shared_bytes, y=grid[1], cluster=plan.cluster, together=together)
    bits = struct.pack("".join(launch.LAYOUT), *told)
    assert cuda_on_cpu.run(folder, variant, "attend", bits, shape, readable) == 0
    assert (out[texts:] == 777).all()
    assert set((ctypes.c_int32 * sums).from_address(first[0])) <= {-1}  # room for the next launch
    return out[:texts]


def exact(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *others: object) -> Tensor:
    return reference.attend(query.double(), keys.double(), values.double(), mask, 0.09, *others)  # type: ignore[arg-type]


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def causal(spans: list[tuple[int, int]], new: int, tokens: int) -> Tensor:
    """[texts, 1, new, tokens]: each text sees from its first token on, its last new one up to the end."""
    first, end = torch.tensor(spans).T
    place, row = torch.arange(tokens), torch.arange(new)[:, None]
    return ((place >= first[:, None, None]) & (place < (end[:, None] - new + 1 + row.T)[:, :, None]))[:, None]


def rows_of(spans: list[tuple[int, int]]) -> Tensor:
    rows = torch.zeros((len(spans), WIDTH), dtype=torch.int32)
    rows[:, :2] = torch.tensor(spans)
    return rows


# Of the heads: size, those that share keys, new tokens. Of the plan: columns, warps that share rows, CTAs, and whether
# these meet in memory.
CASES = [
    (128, 4, 1, BF16, (1, 4, 2)),
    (64, 8, 2, F16, (1, 2, 1)),
    (64, 5, 5, BF16, (2, 3, 3)),  # CTAs have unequal shares
    (128, 3, 4, BF16, (2, 2, 1)),
    (64, 3, 1, F16, (1, 2, 16)),  # more CTAs than a lane's pairs
    (128, 4, 1, BF16, (1, 2, 8, True)),
    (64, 5, 5, F16, (2, 2, 3, True)),
    (256, 2, 1, BF16, (1, 2, 4, True)),
    (256, 4, 2, F16, (1, 3, 2)),
]


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize(("size", "group", "new", "dtype", "shape"), CASES, ids=str)
def test_caches(size: int, group: int, new: int, dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    """What lies outside of the spans is not read."""
    torch.manual_seed(0)
    shared, tokens, spans = 2, 150, [(3, 131), (40, 40 + new), (0, 150)]
    mask = causal(spans, new, tokens)
    query = torch.randn(3, shared * group, new, size).to(dtype)
    keys, values = (torch.randn(3, shared, tokens, size).to(dtype) for _ in "kv")
    right = exact(query, keys, values, mask)
    for text, (first, end) in enumerate(spans):
        for tensor in (keys, values):
            tensor[text, :, :first] = float("nan")
            tensor[text, :, end:] = float("nan")
    plan = ClusterPlan(*shape)
    found = on_cpu(tmp_path, query, keys, values, mask, plan, spans=rows_of(spans))
    assert error(found, right) < BOUND[dtype]


# As above; numbers of a head that turn, whether angles are of a half, whether heads are normed, and the first slot.
NEW_TOKENS = [
    (128, 4, 1, BF16, (1, 2, 2), 128, False, True, 77),
    (64, 8, 1, BF16, (1, 3, 1), 64, True, False, 99),
    (128, 4, 8, BF16, (2, 2, 2), 128, False, True, 42),  # in two blocks
    (64, 8, 3, F16, (2, 1, 1), 32, False, True, 98),  # the last of them behind the end
    (128, 2, 1, BF16, (1, 2, 4, True), 96, False, False, 64),
    (256, 2, 1, BF16, (1, 2, 4, True), 256, False, True, 71),
    (256, 8, 1, F16, (1, 2, 2), 64, True, False, 3),
]


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize(("size", "group", "new", "dtype", "shape", "rotary", "halves", "normed", "slot"), NEW_TOKENS)
def test_new_tokens(
    size: int, group: int, new: int, dtype: torch.dtype, shape: tuple[int, ...], rotary: int, halves: bool,
    normed: bool, slot: int, tmp_path: Path,
) -> None:  # fmt: skip
    """They are normed, turned and put into the cache, also of a text whose span is empty; nothing else is written."""
    torch.manual_seed(1)
    texts, shared, tokens = 3, 2, 100
    seen = min(slot + new, tokens)
    mask = causal([(0, seen), (min(3, slot), seen), (0, seen)], new, tokens)
    mask[2] = False
    joined = torch.randn(texts, new, (group + 2) * shared * size).to(dtype)
    sizes = [group * shared * size, shared * size, shared * size]
    query, key, value = (part.view(texts, new, -1, size).transpose(1, 2) for part in joined.split(sizes, -1))
    angles = 3 * torch.randn(texts, new, rotary // 2)
    cos, sin = (t if halves else torch.cat((t, t), -1) for t in (angles.cos().to(dtype), angles.sin().to(dtype)))
    norms = [Norm(torch.randn(size).to(dtype), epsilon, 1.0) if normed else None for epsilon in (1e-6, 1e-5)]
    caches = [torch.randn(texts, shared, tokens, size).to(dtype) for _ in range(2)]
    place = torch.tensor(slot)
    exactly = [torch.cat((cache.double(), torch.zeros(texts, shared, new, size)), 2) for cache in caches]
    fresh = Fresh(key.double(), value.double(), cos.double(), sin.double(), place, *norms, halves)
    turned = reference.put(query.double(), *exactly, fresh)
    exactly = [cache[:, :, :tokens] for cache in exactly]
    right = exact(turned, *exactly, mask)
    for cache in caches:
        cache[:, :, slot : slot + new] = float("nan")
    fresh = Fresh(key, value, cos, sin, place, *norms, halves)
    spans = rows_of([(0, seen), (min(3, slot), seen), (0, 0)])
    found = on_cpu(tmp_path, query, *caches, mask, ClusterPlan(*shape), spans=spans, fresh=fresh)
    assert error(found, right) < 2 * BOUND[dtype]
    assert not found[2].any()
    assert error(caches[0], exactly[0]) < BOUND[dtype]
    assert torch.equal(caches[1].double(), exactly[1])


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize("kind", ["numbers", "cap and sinks", "wide sinks without a mask"])
def test_what_changes_scores(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    query, keys, values = torch.randn(2, 8, 2, 64), torch.randn(2, 2, 70, 64), torch.randn(2, 2, 70, 64)
    query, keys, values = (tensor.to(BF16) for tensor in (query, keys, values))
    mask = None if "without" in kind else causal([(5, 60), (0, 70)], 2, 70)
    if kind == "numbers":
        mask = torch.where(mask, torch.randn(2, 1, 2, 70), torch.finfo(BF16).min).to(BF16)
    cap = 5.0 if "cap" in kind else None
    sinks = torch.randn(8).to(torch.float32 if "wide" in kind else BF16) if "sinks" in kind else None
    spans = None if mask is None else rows_of([(5, 60), (0, 70)])
    plan = ClusterPlan(1, 2, 2, "cap" in kind)
    found = on_cpu(tmp_path, query, keys, values, mask, plan, softcap=cap, sinks=sinks, spans=spans)
    assert error(found, exact(query, keys, values, mask, cap, sinks)) < BOUND[BF16]


# Of the heads: size, those that share keys, and the window. Of the plan: columns, warps, CTAs, not in memory, helpers,
# turns that are not too many, CTAs at once.
PAGES = [
    (128, 4, 0, BF16, (1, 2, 1, False, 20, 1, 25)),
    (128, 4, 50, F16, (1, 1, 2, False, 32, 1, 40)),
    (64, 8, 0, F16, (1, 1, 2, False, 40, 1, 50)),
    (64, 8, 0, F16, (1, 4, 1)),
    (64, 12, 33, BF16, (2, 2, 4)),
]


def meet_in_memory(
    folder: Path, dtype: torch.dtype, heads: tuple[int, int, int], page: int, window: int, lengths: list[int],
    plan: ClusterPlan,
) -> bool:  # fmt: skip
    """Whether CTAs do so, for the batch whose result is compared. heads: that share keys, of keys, and their size.

    A page's tokens lie one behind the other, a token's heads too, each with its key and its value side by side. Of the
    cache only what texts see is read, and only their new tokens are written.
    """
    (group, shared, size), width = heads, max(1, -(-max(lengths) // page))
    texts = len(lengths)
    pages = torch.full((texts * width + 1, page, shared, 2 * size), torch.nan, dtype=dtype)
    keys, values = pages.split(size, -1)
    numbers = torch.randperm(texts * width).to(torch.int32).view(texts, width)
    table = torch.full((texts, width), 1 << 30, dtype=torch.int32)
    joined = torch.randn(texts, group * shared + 2 * shared, size).to(dtype)
    query, key, value = joined.split([group * shared, shared, shared], 1)
    right = torch.zeros(texts, group * shared, size, dtype=torch.float64)
    for text, length in enumerate(lengths):
        used = -(-length // page)
        table[text, :used] = numbers[text, :used]
        if length == 0:
            continue
        own = [torch.randn(length, shared, size).to(dtype) for _ in "kv"]
        first = max(0, length - window) if window else 0
        for cache, tokens, new in zip((keys, values), own, (key, value), strict=True):
            tokens[-1] = new[text]
            for token in range(first, length - 1):
                cache[numbers[text, token // page], token % page] = tokens[token]
        seen = [tokens[first:].transpose(0, 1)[None] for tokens in own]
        right[text] = exact(query[text][None, :, None], *seen, None)[0, 0]
    before = pages.clone()
    kind = paged.Kind(dtype, group * shared, shared, size, page)
    out = torch.full((texts + 1, group * shared, size), 777.0, dtype=dtype)
    sums = torch.full((plan.sums(texts * shared, group, size),), float("nan"))
    counters = torch.zeros(texts * shared, dtype=torch.int32)
    slots = torch.tensor(
        [
            int(numbers[text, (length - 1) // page]) * page + (length - 1) % page if length else -1
            for text, length in enumerate(lengths)
        ]
    )
    slots[-1] = -1  # is seen, and not kept
    held = paged.PagedCache(keys, values, table, torch.tensor(lengths, dtype=torch.int32), slots)
    told = paged.arguments(query, key, value, held, None, sums, counters, out, 0.09, 0.0, window)
    variant = kind.variant(H200, plan, overlaps=False)
    x, y = launch.grid(texts * shared, plan)
    shape_of = Shape(x, plan.threads(group), plan.shared_bytes(group, size, 1), y=y, cluster=plan.cluster)
    bits = struct.pack("".join(launch.LAYOUT), *told)
    assert cuda_on_cpu.run(folder, variant, "attend", bits, shape_of, [pages, table, held.lengths, slots]) == 0
    assert (out[texts:] == 777).all()
    assert not counters.any()
    assert error(out[:texts], right) < BOUND[dtype] if any(lengths) else not out[:texts].any()
    assert not any(out[text].any() for text, length in enumerate(lengths) if not length)
    for text, slot in enumerate(slots.tolist()):
        if slot >= 0:
            token = before.view(-1, shared, 2 * size)[slot]
            token[:, :size], token[:, size:] = key[text], value[text]
    assert torch.equal(pages.view(torch.int16), before.view(torch.int16))
    return not bool(sums.isnan().all())


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize(("size", "group", "window", "dtype", "shape"), PAGES, ids=str)
def test_pages(size: int, group: int, window: int, dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(3)
    lengths, plan = [1, 70, 0, 129, 16], ClusterPlan(*shape)
    if plan.helpers == 40:  # more texts than a warp has lanes
        lengths += [1] * 30 + [160]
    assert meet_in_memory(tmp_path, dtype, (group, 2, size), 32, window, lengths, plan) == (plan.helpers > 0)


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
def test_random_batches_of_pages(tmp_path: Path) -> None:
    """Of few texts and of many, with a long one here and there."""
    draw, met = random.Random(0), []
    for seed in range(12):
        torch.manual_seed(seed)
        texts = draw.choice([1, 2, 5, 33, 40])
        rare = 1.0 if texts < 9 else 0.1
        lengths = [draw.choice([0, 1, draw.randint(1, 60), *[200] * (draw.random() < rare)]) for _ in range(texts)]
        heads = draw.choice([1, 4, 8, 12]), draw.choice([1, 2, 3]), draw.choice(PAGES_SIZES)
        cluster, at_once = draw.choice([1, 2, 4]), draw.randint(4, 60)
        helpers = math.ceil(HELPERS * at_once / cluster) * cluster
        columns, warps, turns = 1 if heads[0] <= 8 else 2, draw.choice([1, 2, 4]), draw.choice([1, 2])
        plan = ClusterPlan(columns, warps, cluster, False, helpers, turns, at_once)
        page, window, dtype = draw.choice([16, 32, 48]), draw.choice([0, 0, 7, 100]), draw.choice([BF16, F16])
        met.append(meet_in_memory(tmp_path, dtype, heads, page, window, lengths, plan))
    assert {True, False} == set(met)


# -- Plans and machine code --------------------------------------------------------------------------------------------


@given(
    heads=st.integers(1, 3000),
    tokens=st.integers(1, 1 << 20),
    size=st.sampled_from([64, 128, 256]),
    rows=st.integers(1, MOST_ROWS),
    capability=st.sampled_from([90, 100, 120]),
    sms=st.integers(8, 200),
)
def test_every_plan_fits(heads: int, tokens: int, size: int, rows: int, capability: int, sms: int) -> None:
    properties = replace(properties_for(f"sm_{capability}"), sms=sms)
    plan = cluster_plan(properties, heads, tokens, size, rows)
    if plan is None and size == 256:
        assert rows > 8
        return
    if plan is None:
        assert rows > 16
        assert tokens > 4096 or (rows > 32 and heads * tokens > 65536)
        return
    assert plan.threads(rows) <= 512
    assert plan.cluster <= (16 if capability == 90 else 8)
    assert plan.shared_bytes(rows, size, min(rows, 8)) <= properties.shared_memory
    assert plan.columns * 8 * plan.row_tiles(rows) >= rows


@given(
    texts=st.integers(1, 3000),
    shared=st.integers(1, 16),
    tokens=st.integers(1, 1 << 20),
    size=st.sampled_from(PAGES_SIZES),
    rows=st.integers(1, MOST_ROWS),
    capability=st.sampled_from([90, 100, 120]),
    sms=st.integers(8, 200),
)
def test_every_plan_of_pages_fits(
    texts: int, shared: int, tokens: int, size: int, rows: int, capability: int, sms: int
) -> None:
    properties = replace(properties_for(f"sm_{capability}"), sms=sms)
    plan = pages_plan(properties, texts * shared, tokens, size, rows)
    assert plan is not None
    assert not plan.in_memory
    assert plan.threads(rows) <= 512
    assert plan.shared_bytes(rows, size, 1) <= properties.shared_memory
    assert plan.helpers % plan.ctas == 0
    assert (plan.helpers > 0) == (tokens > 16 * plan.token_warps * plan.ctas * ENOUGH_TURNS)
    assert plan.helpers >= 0.8 * plan.at_once or not plan.helpers  # as many as share.cuh may want


@given(
    lengths=st.lists(st.integers(0, 40) | st.integers(0, 5000), min_size=1, max_size=90),
    heads=st.integers(1, 8),
    cluster=st.sampled_from([1, 2, 4]),
    warps=st.sampled_from([2, 8]),
    at_once=st.integers(4, 300),
)
def test_helpers_suffice(lengths: list[int], heads: int, cluster: int, warps: int, at_once: int) -> None:
    """As share.cuh deals them out: never more than there are, whatever the lengths."""
    blocks = [-(-length // 16) for length in lengths]
    share = max(warps * ENOUGH_TURNS, sum(blocks) * heads * 5 // (4 * at_once) + 1)
    wanted = sum(max(cluster, min(32, -(-one // share))) - cluster for one in blocks) * heads
    assert wanted <= math.ceil(HELPERS * at_once)


def test_what_the_kernel_reads_of_pages() -> None:
    """Whatever else it were given, it would read as these dtypes, numbers side by side."""
    query, new = torch.zeros(3, 4, 64, dtype=BF16), torch.zeros(3, 2, 64, dtype=BF16)
    keys, values = torch.zeros(5, 16, 2, 128, dtype=BF16).split(64, -1)
    table, lengths = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    held = paged.PagedCache(keys, values, table, lengths, torch.zeros(3, dtype=torch.int64))
    assert paged.is_readable(query, new, new, held)
    assert paged.is_readable(query[:0], new[:0], new[:0], held)
    for name, other in [
        ("table", table.long()),
        ("table", torch.zeros(2, 3, dtype=torch.int32).T),
        ("lengths", lengths.long()),
        ("lengths", torch.zeros(6, dtype=torch.int32)[::2]),
        ("slots", lengths),
        ("keys", keys.half()),
        ("values", values.contiguous()),
        ("keys", torch.zeros(5, 16, 2, 132, dtype=BF16)[..., :64]),
    ]:
        assert not paged.is_readable(query, new, new, held._replace(**{name: other}))
    assert not paged.is_readable(query.half(), new, new, held)
    assert not paged.is_readable(torch.zeros(3, 64, 4, dtype=BF16).transpose(1, 2), new, new, held)


def test_what_other_kernels_compute() -> None:
    assert cluster_plan(H200, 8, 300, 256, 9) is None
    assert cluster_plan(H200, 8, 300, 80, 4) is None
    assert cluster_plan(H200, 8, 300, 128, 65) is None
    assert cluster_plan(properties_for("sm_89"), 8, 300, 128, 4) is None
    assert cluster_plan(MI300X, 8, 300, 128, 4) is None
    query, cache = torch.zeros(1, 4, 1, 128, dtype=BF16), torch.zeros(1, 2, 9, 128, dtype=BF16)
    odd = torch.zeros(1, 4, 1, 132, dtype=BF16)[..., :128]  # heads that do not lie at multiples of 16 bytes
    assert launch.plan_for(odd, cache, cache, None) is None
    assert launch.plan_for(query, cache, cache[..., :64], None) is None
    for kind in (
        paged.Kind(torch.float32, 8, 2, 64, 16),
        paged.Kind(BF16, 8, 2, 96, 16),
        paged.Kind(BF16, 8, 3, 64, 16),
    ):
        assert kind.plan(H200, 3, 500) is None
    assert paged.Kind(BF16, 8, 2, 64, 24).plan(H200, 3, 500) is None  # a block is in two pages
    assert paged.Kind(BF16, 8, 2, 64, 16).plan(properties_for("sm_89"), 3, 500) is None


def has_room(used: dict[str, int], plan: ClusterPlan, rows: int, size: int) -> bool:
    """Whether as many CTAs as the plan says, and at least one, have registers; they come eight by eight."""
    of_cta = -(-used["REG"] // 8) * 8 * plan.threads(rows)
    return max(1, plan.resident(rows, size)) * of_cta <= OF_A_MULTIPROCESSOR


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(90, BF16), (100, F16), (120, BF16)])
def test_compiles_into_registers(capability: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Nothing is spilled, so many CTAs as the planner reckons with have registers, and a kernel that is to wait
    for the one ahead loads nothing before, while one that begins early has loads on their way."""
    properties = properties_for(f"sm_{capability}")

    def used_by(made: Variant) -> tuple[dict[str, int], list[str]]:
        path = tmp_path / "attend.cubin"
        path.write_bytes(compile_cubin(made.source, made.capability, dict(made.constants)))
        return usage(path, "attend"), operations(path)

    for heads, size, texts in [(32, 128, 1), (32, 128, 32), (32, 64, 8), (64, 64, 40), (128, 128, 8)]:
        kind = paged.Kind(dtype, heads, 8, size, 16, heads == 64, torch.float32 if heads == 64 else None)
        plan = kind.plan(properties, texts, 1 << 17)
        assert plan is not None
        assert plan.helpers
        used, _ = used_by(kind.variant(properties, plan))
        assert used["STACK"] == used["LOCAL"] == 0, (plan, used)
        assert has_room(used, plan, heads // 8, size), (plan, used)
    shapes = [(64, 8, 1), (64, 7, 3), (128, 4, 1), (128, 8, 1), (128, 4, 8), (128, 8, 8)]
    for i, (size, group, new) in enumerate(shapes, capability // 10):
        rows = group * new
        plan = cluster_plan(properties, 8, 300, size, rows)
        assert plan is not None
        mask, sinks = (2, 1) if size == 64 else (1, 0)
        normed, settled = i % 2 == 1, i % 3 > 0
        rotary = size, size == 64, normed, normed
        made = launch.variant(
            properties, group, new, size, plan, settled, dtype, mask, sinks, True, size == 64, True, rotary
        )
        used, names = used_by(made)
        assert used["STACK"] == used["LOCAL"] == 0, (plan, used)
        assert has_room(used, plan, rows, size), (plan, used)
        ahead = names[: names.index("ACQBULK")].count("LDG")
        assert ahead > 8 if settled else ahead == 0
    for group, new, turning in [(2, 1, (256, False, True, True)), (8, 1, (64, False, True, True)), (1, 4, (0,) * 4)]:
        plan, puts = ClusterPlan(1, 8, 16 if group == 2 else 4, group == 2), turning[0] > 0
        made = launch.variant(
            properties,
            group,
            new,
            256,
            plan,
            True,
            dtype,
            2,
            0,
            True,
            group == 2,
            puts,
            (turning[0], *map(bool, turning[1:])),
        )
        used, _ = used_by(made)
        assert used["STACK"] == used["LOCAL"] == 0, (plan, used)
