"""Attention of few new tokens agrees with fp64, whatever the sizes, the strides, the mask and the cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import every_pair
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from halfbyte.kernels.attention import fresh as fresh_module
from halfbyte.kernels.attention import reference
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.plan import LEAST_ROWS, MOST_PARTS, MOST_ROWS, AttentionPlan, plan_for
from halfbyte.kernels.attention.put import put
from halfbyte.kernels.attention.spans import WIDTH, spans_of
from halfbyte.kernels.attention.triton import attend, supports
from halfbyte.kernels.common.device import DeviceProperties, properties_for
from halfbyte.kernels.common.norm import Norm

#        texts, heads, heads of keys, new tokens, tokens, size of keys, of values
SIZES = [
    (1, 1, 1, 1, 1, 8, 8),
    (2, 6, 3, 2, 37, 80, 80),
    (3, 8, 1, 1, 64, 128, 64),
    (1, 20, 1, 4, 130, 256, 256),
    (2, 2, 2, 8, 9, 96, 1),
]
PLANS = [
    None,
    AttentionPlan(16, 9, 16, 4, 1),
    AttentionPlan(32, 3, 32, 4, 2, one_launch=False),
    AttentionPlan(16, 4, 16, 4, 1, least=2),
    AttentionPlan(64, 1, 64),
]
LOWEST = torch.finfo(torch.float16).min
RIGHT = {"rtol": 2e-3, "atol": 2e-3}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).half()


def inputs(texts: int, heads: int, shared: int, new: int, tokens: int, size: int, value: int) -> list[Tensor]:
    """A query as a projection leaves it, a part of something larger; keys and values of a cache."""
    query = random(texts, new, heads, size + 3)[..., :size].transpose(1, 2)
    return [query, random(texts, shared, tokens, size), random(texts, shared, tokens, value)]


def exact(given: list[Tensor], mask: Tensor | None, *others: object) -> Tensor:
    if mask is not None and mask.is_floating_point():
        mask = mask.double().masked_fill(mask == LOWEST, torch.finfo(torch.float64).min)
    return reference.attend(*(tensor.double() for tensor in given), mask, *others)  # type: ignore[arg-type]


# Sizes with every kind, and plans with every kind: the interpreter is slow, and a GPU has all three together.
KINDS = ["no mask", "mask", "numbers and cap", "sinks and cap"]
ATTENDED = [(sizes, PLANS[(i + j) % len(PLANS)], kind) for i, sizes in enumerate(SIZES) for j, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("sizes", "plan", "kind"), ATTENDED, ids=str)
def test_attend(sizes: tuple[int, ...], plan: AttentionPlan | None, kind: str) -> None:
    texts, heads, _, new, tokens, _, _ = sizes
    given = inputs(*sizes)
    masks: list[Tensor | None] = [None]
    if kind != "no mask":
        mask = random(texts, 1, new, tokens, seed=1) < 0.3
        mask[0] = False  # sees nothing
        mask[-1, ..., 0] = True
        masks = [mask, mask[-1:], mask[-1:].expand(texts, 1, new, tokens)][: 3 if kind == "mask" else 1]
    if kind == "numbers and cap":
        masks = [torch.where(mask, random(texts, 1, new, tokens), LOWEST)]
    cap = 1.5 if "cap" in kind else None
    sinks = random(heads) if "sinks" in kind else None
    for mask in masks:
        assert supports(*given, mask, sinks)
        found = attend(*given, mask, 0.3, softcap=cap, sinks=sinks, plan=plan)
        right = exact(given, mask, 0.3, cap, sinks)
        assert found.shape == right.shape
        torch.testing.assert_close(found.double(), right, **RIGHT)


NEW_SIZES = [(2, 6, 3, 37, 80, 80), (3, 8, 1, 64, 128, 64), (1, 40, 1, 130, 256, 256)]
NEW_KINDS = ["no mask", "mask, norms and cap", "numbers and sinks"]
PUT = [(NEW_SIZES[(i + j) % 3], plan, kind) for i, plan in enumerate(PLANS) for j, kind in enumerate(NEW_KINDS)]


@pytest.mark.parametrize(("sizes", "plan", "kind"), PUT, ids=str)
def test_a_new_token(sizes: tuple[int, ...], plan: AttentionPlan | None, kind: str) -> None:
    """Its query and key are normed and rotated, key and value put into the cache; nobody reads what was there."""
    texts, heads, shared, tokens, size, value = sizes
    rotary = size if kind == "no mask" else size // 4 * 2
    joined = random(texts, 1, heads * size + shared * (size + value), seed=2)
    query, key, new = joined.split([heads * size, shared * size, shared * value], -1)
    query, key, new = (t.view(texts, 1, -1, s).transpose(1, 2) for t, s in ((query, size), (key, size), (new, value)))
    halves = "sinks" in kind
    angles = random(texts if kind == "no mask" else 1, 1, rotary // (2 if halves else 1), seed=3)
    slot = torch.tensor(tokens // 2)
    norms = (Norm(random(size), 1e-6, 1.0), Norm(random(size, seed=9), 1e-3, 1.0))
    fresh = Fresh(key, new, angles.cos(), angles.sin(), slot, *(norms if "norms" in kind else ()))._replace(
        halves=halves
    )
    keys, values = random(texts, shared, tokens, size), random(texts, shared, tokens, value)
    mask = None
    if kind != "no mask":
        mask = random(texts, 1, 1, tokens, seed=1) < 0.3
        mask[..., tokens // 2] = True
        mask[0] = kind != "numbers and sinks"  # where this is false the text sees nothing, not even its own token
        if "numbers" in kind:
            mask = torch.where(mask, random(texts, 1, 1, tokens), LOWEST)
    cap, sinks = 1.5 if "cap" in kind else None, random(heads) if "sinks" in kind else None
    exactly = Fresh(*(t.double() for t in fresh[:4]), *fresh[4:])
    right_keys, right_values = keys.double(), values.double()
    turned = reference.put(query.double(), right_keys, right_values, exactly).half()
    right = exact([turned, right_keys.half(), right_values], mask, 0.3, cap, sinks)
    for cache in (keys, values):
        cache[:, :, tokens // 2] = float("nan")
    assert supports(query, keys, values, mask, sinks)
    assert fresh_module.supports(fresh, query, keys, values)
    found = attend(query, keys, values, mask, 0.3, softcap=cap, sinks=sinks, fresh=fresh, plan=plan)
    torch.testing.assert_close(found.double(), right, **RIGHT)
    torch.testing.assert_close(keys.double(), right_keys, rtol=1e-3, atol=1e-3)
    assert torch.equal(values.double(), right_values)


@every_pair(
    {
        "sizes": [(2, 6, 3, 5, 37, 80, 80), (3, 8, 1, 8, 64, 128, 64), (1, 40, 1, 2, 130, 256, 1)],
        "kind": ["plain", "norms", "halves"],
        "room": [0, 3],
    }
)
def test_several_new_tokens(sizes: tuple[int, ...], kind: str, room: int) -> None:
    """They are put into the cache one behind the other, none past its end, and see one another there."""
    texts, heads, shared, new, tokens, size, value = sizes
    rotary = size if kind == "plain" else size // 4 * 2
    joined = random(texts, new, heads * size + shared * (size + value), seed=2)
    query, key, added = joined.split([heads * size, shared * size, shared * value], -1)
    query, key, added = (
        t.view(texts, new, -1, s).transpose(1, 2) for t, s in ((query, size), (key, size), (added, value))
    )
    angles = random(texts if kind == "plain" else 1, new, rotary // (2 if kind == "halves" else 1), seed=3)
    norms = (Norm(random(size), 1e-6, 1.0), Norm(random(size, seed=9), 1e-3, 1.0)) if kind == "norms" else ()
    last = tokens if room == 0 else tokens // 2 + new
    slot = torch.tensor(last - new)
    fresh = Fresh(key, added, angles.cos(), angles.sin(), slot, *norms)._replace(halves=kind == "halves")
    keys, values = random(texts, shared, tokens, size), random(texts, shared, tokens, value)
    place, row = torch.arange(tokens), torch.arange(new)[:, None]
    mask = (place < last - new + 1 + row).expand(texts, 1, new, tokens)
    exactly = Fresh(*(t.double() for t in fresh[:4]), *fresh[4:])
    right_keys, right_values = keys.double(), values.double()
    turned = reference.put(query.double(), right_keys, right_values, exactly)
    right = exact([turned.half(), right_keys.half(), right_values], mask, 0.3)
    for cache in (keys, values):
        cache[:, :, last - new : last] = float("nan")
    assert supports(query, keys, values, mask)
    assert fresh_module.supports(fresh, query, keys, values)
    found = attend(query, keys, values, mask, 0.3, fresh=fresh)
    torch.testing.assert_close(found.double(), right, **RIGHT)
    torch.testing.assert_close(keys.double(), right_keys, rtol=1e-3, atol=1e-3)
    assert torch.equal(values.double(), right_values)
    slot.add_(1 if room == 0 else tokens - last)  # now the last ones have no room
    larger_keys, larger_values = (torch.zeros(texts, shared, tokens + new, s).half() for s in (size, value))
    larger = [tensor[:, :, :tokens] for tensor in (larger_keys, larger_values)]
    put(query, *larger, fresh)
    assert not larger_keys[:, :, tokens:].any()
    assert not larger_values[:, :, tokens:].any()


@pytest.mark.parametrize("one_launch", [True, False])
def test_spans(one_launch: bool) -> None:
    """Texts of different lengths, padded on the left, verify several tokens that are causal among themselves. What lies
    outside of their spans is not read, the counters are zeros again, and the same spans serve once more."""
    new, tokens, lengths = 3, 150, ((0, 0), (7, 8), (20, 150), (64, 128), (33, 97))
    texts = len(lengths)
    given = inputs(texts, 4, 2, new, tokens, 32, 32)
    place = torch.arange(tokens)
    mask = torch.stack(
        [
            torch.stack([(place >= first) & (place < max(first, end - new + row + 1)) for row in range(new)])
            for first, end in lengths
        ]
    )[:, None]
    mask[0] = False
    spans = spans_of(mask, texts)
    assert spans.shape == (texts, WIDTH)
    assert spans[:, :2].tolist() == [list(pair) for pair in lengths]
    plan = AttentionPlan(16, 4, 16, 4, 1, one_launch=one_launch)
    right = attend(*given, mask, 0.2, plan=plan)
    torch.testing.assert_close(right.double(), exact(given, mask, 0.2), **RIGHT)
    assert not right[0].any()
    for text, (first, end) in enumerate(lengths):
        for tensor in given[1:]:
            tensor[text, :, :first] = float("nan")
            tensor[text, :, end:] = float("inf")
    for _ in range(2):
        assert torch.equal(attend(*given, mask, 0.2, spans=spans, plan=plan), right)
        assert not spans[:, 2:].any()
    given[1][2, :, 149] = float("nan")
    assert attend(*given, mask, 0.2, spans=spans, plan=plan)[2, 2].isnan().all()


def test_spans_without_a_mask() -> None:
    given = inputs(2, 4, 2, 2, 90, 16, 16)
    spans = torch.zeros(2, WIDTH, dtype=torch.int32)
    spans[:, :2] = torch.tensor([[5, 200], [-3, 33]])  # nothing is read behind the cache, nor before it
    place = torch.arange(90)
    mask = torch.stack([place >= 5, place < 33])[:, None, None].expand(2, 1, 2, 90)
    found = attend(*given, None, 0.2, spans=spans, plan=AttentionPlan(16, 3))
    torch.testing.assert_close(found.double(), exact(given, mask, 0.2), **RIGHT)


def test_blocks_outside_of_spans_cost_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a part that has no block: its program ends before it reads a query."""
    given, mask = inputs(1, 2, 2, 1, 4096, 16, 16), torch.zeros(1, 1, 1, 4096, dtype=torch.bool)
    mask[..., 1000:1040] = True
    turns = []
    dot = InterpreterBuilder.create_dot

    def counted(*args: Any) -> Any:
        turns.append(1)
        return dot(*args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    attend(*given, mask, 0.2, plan=AttentionPlan(16, 8, 16, 4, 1))
    assert len(turns) == 2 * 2 * 3  # products, heads, blocks from 992 to 1040


@pytest.mark.parametrize("tiles", [1, 3])
def test_caches_within_larger_ones(tiles: int) -> None:
    """The first texts of a bucket, and heads behind tokens in its memory; queries of more rows than a program has."""
    heads = 16 * tiles
    keys, values = random(4, 80, 1, 24).transpose(1, 2)[:2], random(5, 1, 96, 16)[1:3, :, :80]
    given = [random(2, heads, 1, 24), keys, values]
    assert supports(*given, None)
    found = attend(*given, None, 0.2, plan=AttentionPlan(16, 2, 16))
    torch.testing.assert_close(found.double(), exact(given, None, 0.2), **RIGHT)


def test_what_it_does_not_take() -> None:
    query, keys, mask = torch.zeros(2, 4, 1, 16).half(), torch.zeros(2, 2, 8, 16).half(), torch.ones(2, 1, 1, 8).bool()
    sinks = torch.zeros(4)
    assert supports(query, keys, keys, mask, sinks)
    assert supports(query.expand(2, 4, 8, 16), keys, keys, mask.expand(2, 1, 8, 8))
    assert supports(query, keys, keys, mask.half())
    for found in (
        (query.float(), keys.float(), keys.float(), mask),
        (query.bfloat16(), keys, keys, mask),
        (query.expand(2, 4, 9, 16), keys, keys, mask.expand(2, 1, 9, 8)),
        (query.expand(2, 4, 2, 16), keys, keys, mask),
        (query[:1], keys, keys, mask),
        (query[:, :3], keys, keys, mask),
        (query, keys.mT.contiguous().mT, keys, mask),
        (query, keys, keys[:, :, :7], mask),
        (query, keys, keys, mask.float()),
        (query, keys, keys, mask.expand(2, 4, 1, 8)),
        (query, keys, keys, mask[..., :7]),
        (query, keys[:, :, :0], keys[:, :, :0], mask[..., :0]),
        (query[0], keys[0], keys[0], mask),
        (torch.zeros(2, 4, 1, 512).half(), torch.zeros(2, 2, 8, 512).half(), keys, mask),
        (torch.zeros(2, 1024, 1, 16).half(), keys, keys, mask),
        (query.to("meta"), keys, keys, mask),
        (query, keys, keys, mask, sinks[:3]),
        (query, keys, keys, mask, sinks.to("meta")),
    ):
        assert not supports(*found)


@pytest.mark.parametrize("properties", [*map(properties_for, ("sm_90", "sm_75")), DeviceProperties("hip", 0, 304)])
@pytest.mark.parametrize("heads", [1, 8, 64, 256, 5000])
@pytest.mark.parametrize("size", [64, 80, 256])
def test_plans(properties: DeviceProperties, heads: int, size: int) -> None:
    """No part has less than a block, and programs are on most multiprocessors where there are tokens enough."""
    for tokens in range(1, 40000, 97):
        for rows in (1, 32):
            plan = plan_for(properties, heads, tokens, size, rows)
            blocks = -(-tokens // plan.block)
            assert 1 <= plan.parts <= min(blocks, MOST_PARTS)
            assert LEAST_ROWS <= plan.rows <= MOST_ROWS
            programs = heads * plan.tiles(rows)
            assert plan.parts * programs >= 0.2 * min(properties.sms, blocks * programs)
