"""Attention over caches that are filled by a part, captured, replayed, on other streams and devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.attention import reference
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.sm90.plan import ClusterPlan
from halfbyte.kernels.attention.spans import spans_of
from halfbyte.kernels.attention.turn import turn
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.common.norm import Norm

from .conftest import BF16, DEVICE, F16, captured, error, needs_two_gpus, on_another_stream, poisoned, sixteen_bits

front = pytest.importorskip("halfbyte.kernels.attention.attend")
kernels = pytest.importorskip("halfbyte.kernels.attention.triton")
needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
both = pytest.mark.parametrize("attend", [front.attend, kernels.attend], ids=["chosen", "triton"])
BOUND = {F16: 8e-4, BF16: 6e-3}
Attend = Callable[..., Tensor]


def causal(spans: list[tuple[int, int]], new: int, tokens: int, device: torch.device = DEVICE) -> Tensor:
    """A mask: each text sees from its first token on, its last new one up to the end, those before it one less each."""
    first, end = torch.tensor(spans, device=device).T
    place, row = torch.arange(tokens, device=device), torch.arange(new, device=device)[:, None]
    return ((place >= first[:, None, None]) & (place < (end[:, None] - new + 1 + row.T)[:, :, None]))[:, None]


def random(*shape: int, dtype: torch.dtype = BF16, device: torch.device = DEVICE) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def exact(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *others: object) -> Tensor:
    return reference.attend(query.double(), keys.double(), values.double(), mask, 0.09, *others)  # type: ignore[arg-type]


@sixteen_bits
@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("texts", "group", "new"), [(1, 1, 1), (1, 4, 1), (3, 8, 1), (3, 4, 4), (2, 8, 8)])
@pytest.mark.parametrize("way", ["chosen", "one launch", "two launches"])
def test_long_caches(size: int, texts: int, group: int, new: int, way: str, dtype: torch.dtype) -> None:
    """What lies outside of the spans, in front of the cache and behind it is neither read nor written."""
    shared, tokens = 2, 4500
    spans = [(3, 4100), (1000, 1000 + new), (0, tokens)][:texts]
    mask = causal(spans, new, tokens)
    query = random(texts, shared * group, new, size, dtype=dtype)
    shape = (texts, shared, tokens, size)
    with poisoned(shape, dtype) as keys, poisoned(shape, dtype) as values:
        keys.copy_(random(*shape, dtype=dtype))
        values.copy_(random(*shape, dtype=dtype))
        right = exact(query, keys, values, mask)
        for text, (first, end) in enumerate(spans):
            for tensor in (keys, values):
                tensor[text, :, :first] = float("nan")
                tensor[text, :, end:] = float("nan")
        if way == "chosen":
            found = front.attend(query, keys, values, mask, 0.09)
        else:
            plan = kernels.plan_for(properties_of(0), texts * shared, tokens, size, group * new)
            found = kernels.attend(query, keys, values, mask, 0.09, plan=replace(plan, one_launch=way == "one launch"))
    assert error(found, right) < BOUND[dtype]


@needs_hopper
@sixteen_bits
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    "plan", [(1, 8, 4), (1, 2, 16), (2, 4, 2), (1, 8, 16, True), (1, 4, 32, True), (2, 2, 8, True), (1, 2, 3, True)]
)
def test_every_way_to_meet(plan: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    """In a CTA, a cluster, and memory, one launch after the other, which leaves room for the next."""
    clusters = pytest.importorskip("halfbyte.kernels.attention.sm90.launch")
    texts, shared, group, tokens = 3, 4, 4 * plan[0], 3000
    mask = causal([(3, 2100), (1000, 1001), (0, tokens)], 1, tokens)
    query, caches = (
        random(texts, shared * group, 1, size, dtype=dtype),
        random(2, texts, shared, tokens, size, dtype=dtype),
    )
    spans, sinks = spans_of(mask, texts), random(shared * group, dtype=dtype)
    right = exact(query, *caches, mask, None, sinks)
    found = [
        clusters.attend(query, *caches, mask, 0.09, None, sinks, spans, None, False, ClusterPlan(*plan))
        for _ in range(3)
    ]
    assert error(found[0], right) < BOUND[dtype]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not spans[:, 2:].any()


@needs_hopper
@pytest.mark.parametrize("plan", [(1, 8, 16, True), (1, 4, 32, True), (1, 8, 4)])
def test_no_number_is_a_sum(plan: tuple[int, ...]) -> None:
    """Of a text whose keys and values are no numbers: CTAs wait for sums of certain bits, which these are not."""
    clusters = pytest.importorskip("halfbyte.kernels.attention.sm90.launch")
    tokens = 3000
    mask = causal([(0, tokens), (0, tokens)], 1, tokens)
    query, caches = random(2, 16, 1, 128), random(2, 2, 4, tokens, 128)
    right = clusters.attend(query, *caches, mask, 0.09, None, None, spans_of(mask, 2), None, False, ClusterPlan(*plan))
    caches[:, 1].view(torch.int16).fill_(-1)
    found = clusters.attend(query, *caches, mask, 0.09, None, None, spans_of(mask, 2), None, False, ClusterPlan(*plan))
    assert torch.equal(found[0], right[0])
    assert not found[1].isfinite().any()


@both
@sixteen_bits
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize(("texts", "group"), [(1, 4), (3, 1), (3, 8), (2, 24)])
def test_a_new_token(attend: Attend, size: int, texts: int, group: int, dtype: torch.dtype) -> None:
    """It is normed, rotated and put into the cache by one of many programs; all attend to it, replay after replay."""
    shared, tokens = 2, 3000
    joined = random(texts, 1, (group + 2) * shared * size, dtype=dtype)
    sizes = [group * shared * size, shared * size, shared * size]
    query, key, new = (part.view(texts, 1, -1, size).transpose(1, 2) for part in joined.split(sizes, -1))
    angles = 3 * random(texts, 1, size // 2)
    cos, sin = (torch.cat((t, t), -1).to(dtype) for t in (angles.cos(), angles.sin()))
    norms = Norm(random(size, dtype=dtype), 1e-6, 1.0), Norm(random(size, dtype=dtype), 1e-5, 1.0)
    slot = torch.zeros((), dtype=torch.int64, device=DEVICE)
    caches = [random(texts, shared, tokens, size, dtype=dtype) for _ in range(2)]
    graph, (found, spans, mask) = captured(
        lambda: attend_new(attend, query, caches, Fresh(key, new, cos, sin, slot, *norms))
    )
    for place in (0, 1, 63, 64, 2999, 777):
        slot.fill_(place)
        exactly = [cache.double() for cache in caches]
        fresh = Fresh(key.double(), new.double(), cos.double(), sin.double(), slot, *norms)
        turned = reference.put(query.double(), *exactly, fresh)
        for cache in caches:
            cache[:, :, place] = float("nan")
        graph.replay()
        assert not spans[:, 2:].any()
        right = exact(turned, *exactly, mask)
        assert error(found, right) < 2 * BOUND[dtype], place
        assert error(caches[0][:, :, place], exactly[0][:, :, place]) < BOUND[dtype]
        assert torch.equal(caches[1][:, :, place].double(), exactly[1][:, :, place])


@both
@sixteen_bits
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize(("texts", "group", "new"), [(1, 4, 8), (3, 1, 2), (3, 8, 5), (2, 24, 8)])
def test_several_new_tokens(attend: Attend, size: int, texts: int, group: int, new: int, dtype: torch.dtype) -> None:
    """They see one another through the cache, into which they have just been put, replay after replay."""
    shared, tokens = 2, 3000
    joined = random(texts, new, (group + 2) * shared * size, dtype=dtype)
    sizes = [group * shared * size, shared * size, shared * size]
    query, key, added = (part.view(texts, new, -1, size).transpose(1, 2) for part in joined.split(sizes, -1))
    angles = 3 * random(texts, new, size // 2)
    cos, sin = (torch.cat((t, t), -1).to(dtype) for t in (angles.cos(), angles.sin()))
    norms = Norm(random(size, dtype=dtype), 1e-6, 1.0), Norm(random(size, dtype=dtype), 1e-5, 1.0)
    slot = torch.zeros((), dtype=torch.int64, device=DEVICE)
    caches = [random(texts, shared, tokens, size, dtype=dtype) for _ in range(2)]
    graph, (found, _, mask) = captured(
        lambda: attend_new(attend, query, caches, Fresh(key, added, cos, sin, slot, *norms))
    )
    for place in (0, 1, 63, 2999 - new, 777):
        slot.fill_(place)
        exactly = [cache.double() for cache in caches]
        fresh = Fresh(key.double(), added.double(), cos.double(), sin.double(), slot, *norms)
        turned = reference.put(query.double(), *exactly, fresh)
        for cache in caches:
            cache[:, :, place : place + new] = float("nan")
        graph.replay()
        assert error(found, exact(turned, *exactly, mask)) < 2 * BOUND[dtype], place
        written = slice(place, place + new)
        assert error(caches[0][:, :, written], exactly[0][:, :, written]) < BOUND[dtype]
        assert torch.equal(caches[1].double(), exactly[1])


def attend_new(attend: Attend, query: Tensor, caches: list[Tensor], fresh: Fresh) -> tuple[Tensor, Tensor, Tensor]:
    """With a mask that shows each token what lies up to its slot, made on the device."""
    tokens, new = caches[0].shape[2], query.shape[2]
    slots = fresh.slot + torch.arange(new, device=DEVICE)[:, None]
    mask = (torch.arange(tokens, device=DEVICE) <= slots).expand(len(query), 1, new, tokens).contiguous()
    spans = kernels.spans_of(mask, len(query))
    return attend(query, *caches, mask, 0.09, spans=spans, fresh=fresh), spans, mask


@sixteen_bits
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize(("texts", "group", "tokens"), [(1, 4, 9), (3, 1, 300), (2, 24, 17), (1, 5, 1000), (2, 4, 1)])
@pytest.mark.parametrize("kind", ["norms", "halves", "plain"])
def test_a_prompt_is_turned(kind: str, size: int, texts: int, group: int, tokens: int, dtype: torch.dtype) -> None:
    """Into the beginning of a longer cache, past which nothing is written; angles are all texts' or each one's."""
    shared = 3
    joined = random(texts, tokens, (group + 2) * shared * size, dtype=dtype)
    sizes = [group * shared * size, shared * size, shared * size]
    query, key, new = (part.view(texts, tokens, -1, size).transpose(1, 2) for part in joined.split(sizes, -1))
    angles = 3 * random(texts if kind == "norms" else 1, tokens, size // (4 if kind == "plain" else 2))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if kind != "halves":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    norms = (Norm(random(size, dtype=dtype), 1e-6, 1.0), Norm(random(size, dtype=dtype), 1e-5, 1.0))
    of_query, of_key = norms if kind == "norms" else (None, None)
    shape = (texts, shared, tokens + 7, size)
    exactly = [torch.zeros(shape, dtype=torch.float64, device=DEVICE)[:, :, :tokens] for _ in range(2)]
    wide = [None if norm is None else norm._replace(weight=norm.weight.double()) for norm in (of_query, of_key)]
    fresh = Fresh(key.double(), new.double(), cos.double(), sin.double(), None, *wide, kind == "halves")
    right = reference.turn(query.double(), *exactly, fresh)
    with poisoned(shape, dtype) as keys, poisoned(shape, dtype) as values:
        rest = [tensor[:, :, tokens:].clone() for tensor in (keys, values)]
        into = [tensor[:, :, :tokens] for tensor in (keys, values)]
        for _ in range(3):  # Triton's launch, and from then on the driver's
            found = turn(query, *into, Fresh(key, new, cos, sin, None, of_query, of_key, kind == "halves"))
        assert found.shape == query.shape
        assert error(found, right) < BOUND[dtype]
        assert error(into[0], exactly[0]) < BOUND[dtype]
        assert torch.equal(into[1].double(), exactly[1])
        for tensor, before in zip((keys, values), rest, strict=True):
            assert torch.equal(tensor[:, :, tokens:].view(torch.int16), before.view(torch.int16))


@both
def test_soft_caps_and_sinks(attend: Attend) -> None:
    mask = causal([(5, 700), (0, 64)], 4, 1024)
    query, keys, values = random(2, 16, 4, 64), random(2, 2, 1024, 64), random(2, 2, 1024, 64)
    numbers = torch.where(mask, 0.0, torch.finfo(BF16).min).to(BF16)
    for cap, sinks in ((5.0, None), (None, random(16)), (30.0, random(16).float())):
        right = exact(query, keys, values, mask, cap, sinks)
        for seen in (mask, numbers):
            found = attend(query, keys, values, seen, 0.09, softcap=cap, sinks=sinks)
            assert error(found, right) < BOUND[BF16]


def attention_of(attend: Attend, mask: Tensor, layers: int) -> Callable[[], list[Tensor]]:
    """Layers over one cache each, with the spans of one mask."""
    given = [(random(len(mask), 8, 1, 128), *(random(len(mask), 2, 4096, 128) for _ in "kv")) for _ in range(layers)]

    def attention() -> list[Tensor]:
        spans = kernels.spans_of(mask, len(mask))
        return [attend(*layer, mask, 0.09, spans=spans) for layer in given]

    return attention


@both
def test_a_graph_follows_its_mask(attend: Attend) -> None:
    """A bucket that fills: the same graph reads more and more, and where parts meet is ready every time."""
    mask = causal([(0, 1), (7, 20)], 1, 4096)
    attention = attention_of(attend, mask, 3)
    graph, results = captured(attention)
    for end in (20, 21, 500, 4096, 30):
        mask.copy_(causal([(0, end), (7, end)], 1, 4096))
        graph.replay()
        replayed = [result.clone() for result in results]
        assert all(map(torch.equal, replayed, attention()))


@both
def test_several_streams(attend: Attend) -> None:
    mask = causal([(0, 4000)], 1, 4096)
    attention = attention_of(attend, mask, 8)
    right = attention()
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for stream in streams * 4:
        with torch.cuda.stream(stream):
            found.append(attention())
    torch.cuda.synchronize()
    for results in (*found, on_another_stream(attention)):
        assert all(map(torch.equal, results, right))


@both
@needs_two_gpus
def test_on_another_device(attend: Attend) -> None:
    other = torch.device("cuda", 1)
    mask = causal([(0, 900), (3, 4)], 2, 1024, other)
    query, keys, values = (random(2, heads, n, 64, device=other) for heads, n in ((4, 2), (2, 1024), (2, 1024)))
    with torch.cuda.device(other):
        found = attend(query, keys, values, mask, 0.09)
    assert error(found, exact(query, keys, values, mask)) < BOUND[BF16]
