"""The distance and rank kernels give what the reference gives, for any size, and write nothing past their ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from pairs import every_pair
from torch import Tensor

from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.distance import products, reference, select, shards, shards_triton
from halfbyte.kernels.distance import triton as distance
from halfbyte.kernels.rank import reference as rank_reference
from halfbyte.kernels.rank import triton as rank

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow).*:RuntimeWarning")
POISON = 768.0

dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def matrices(p: int, v: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and candidates that hold every query twice, and rows very near to one."""
    query, candidates = torch.randn(p, d).to(dtype), torch.randn(v, d).to(dtype)
    for i in range(min(p, v // 4)):
        candidates[4 * i] = query[i]
        candidates[4 * i + 1] = query[i]
        candidates[4 * i + 2] = query[i] + 0.01 * torch.randn(d).to(dtype)
    return query, candidates


def exact(query: Tensor, candidates: Tensor) -> Tensor:
    return torch.stack([(candidates.double() - q).norm(dim=1) for q in query.double()])


SIZES = [(1, 1, 1), (1, 5, 3), (1, 70, 64), (1, 130, 100), (3, 33, 17), (5, 70, 129), (17, 130, 64), (70, 20, 33)]
KERNELS: dict[str, Any] = {"direct": distance, "products": products}


@every_pair({"p, v, d": SIZES, "dtype": FLOAT_DTYPES, "name": [*KERNELS]})
def test_distances(name: str, p: int, v: int, d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KERNELS[name]
    monkeypatch.setattr(distance, "FEW", 100)
    monkeypatch.setattr(distance, "FEW_WIDE", 100)
    query, candidates = matrices(p, v, d, dtype)
    buffer = torch.full((p, v + 3), POISON)
    kernels.distances(query, candidates, buffer[:, :v])
    torch.testing.assert_close(buffer[:, :v].double(), exact(query, candidates), rtol=2.0**-16, atol=0)
    assert (buffer[:, v:] == POISON).all()


NEAREST = [(1, 1, 1, 1), (1, 70, 33, 1), (2, 70, 64, 7), (2, 90, 20, 33)]


@every_pair({"p, v, d, k": NEAREST, "dtype": FLOAT_DTYPES, "name": [*KERNELS]})
def test_nearest(
    name: str, p: int, v: int, d: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = KERNELS[name]
    monkeypatch.setattr(distance, "FEW", 100)
    monkeypatch.setattr(distance, "FEW_WIDE", 100)
    query, candidates = matrices(p, v, d, dtype)
    least, rows = kernels.nearest(query, candidates, k)
    right, right_rows = reference.first_of(exact(query, candidates), None, k)
    torch.testing.assert_close(least.double(), right, rtol=1e-5, atol=0)
    assert torch.equal(rows, right_rows)


@pytest.mark.parametrize("kernels", [distance, products], ids=["direct", "products"])
def test_ties_infinities_and_nan(kernels: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "FEW", 100)
    monkeypatch.setattr(distance, "FEW_WIDE", 100)
    candidates = torch.ones(60, 20)
    candidates[10], candidates[20], candidates[30] = float("nan"), float("inf"), 1e30
    candidates[40:43] = 2.0
    least, rows = kernels.nearest(torch.full((2, 20), 2.0), candidates, 60)  # type: ignore[attr-defined]
    others = [row for row in range(60) if row not in (10, 20, 30, 40, 41, 42)]
    assert rows[0].tolist() == rows[1].tolist() == [40, 41, 42, *others, 20, 30, 10]
    assert least[0, :3].tolist() == [0, 0, 0]
    assert least[0, 57:59].isinf().all()
    assert least[0, 59].isnan()


SELECTED = [(1, 1), (40, 1), (5, 2), (64, 16), (65, 16), (1500, 3), (1300, 10), (130, 100), (1100, 33)]
ORDERS = ["random", "sorted", "equal", "in the groups' rhythm"]


@every_pair({"n, k": SELECTED, "order": ORDERS, "keys": [True, False]})
def test_select(keys: bool, order: str, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In most orders few keys reach the floor; if the nearest are all of one group, more than there is room for."""
    monkeypatch.setattr(select, "TAKEN", {torch.float32: 1024, torch.int64: 512})
    away = torch.rand(2, n + 3)[:, :n]
    if order == "sorted":
        away = away.sort(dim=1).values
    elif order == "equal":
        away = torch.ones(2, n)
    elif order != "random":
        away = away + torch.arange(n) % (2 * triton.next_power_of_2(k))
    rows = torch.arange(n) * 3 if keys else torch.arange(n)
    source = ~((away.contiguous().view(torch.int32).long() << 32) | rows) if keys else away
    least, found = select.select(source, k)
    right, right_rows = reference.first_of(away, None, k)
    assert torch.equal(found, rows[right_rows])
    assert torch.equal(least, right)


def ranks(hidden: Tensor, lm_head: Tensor, tokens: Tensor) -> Tensor:
    own = rank.own_logits(hidden, lm_head, tokens)
    above = torch.zeros_like(tokens)
    for first in (0, len(lm_head) // 3):
        last = len(lm_head) // 3 if first == 0 else len(lm_head)
        rank.count_above(hidden, lm_head[first:last], own, tokens, first, above)
    return above


@dtypes
@pytest.mark.parametrize(("t", "v", "d"), [(1, 9, 1), (3, 200, 33), (20, 300, 64)])
def test_ranks(t: int, v: int, d: int, dtype: torch.dtype) -> None:
    hidden, lm_head = torch.randn(t, d).to(dtype), torch.randn(v, d).to(dtype)
    lm_head[v // 2] = lm_head[v // 3]  # the same logit twice
    tokens = torch.randint(v, (t,))
    tokens[0] = v // 2
    right = torch.zeros_like(tokens)
    own = rank_reference.own_logits(hidden, lm_head, tokens)
    rank_reference.count_above(hidden, lm_head, own, tokens, 0, right)
    assert torch.equal(ranks(hidden, lm_head, tokens), right)


@pytest.mark.parametrize("room", [0, 1, 32])
def test_equal_logits_rank_by_index(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are on the list or find it full."""
    monkeypatch.setattr(rank, "PAIRS", room)
    tokens = torch.tensor([0, 4, 17])
    assert ranks(torch.randn(3, 8), torch.ones(70, 8), tokens).tolist() == [0, 4, 17]


@pytest.mark.parametrize(("p", "k"), [(1, 1), (1, 5), (3, 17), (2, 128)])
@pytest.mark.parametrize("counts", [(9, 30), (40, 0, 200, 3), (128,)], ids=str)
def test_shards(p: int, k: int, counts: tuple[int, ...]) -> None:
    """What processes send and make of it: NaN last, equal distances in the order of rows, nothing of missing rows."""
    everyone, right = [], []
    for count in counts:
        away = torch.randint(0, 6, (p, count)).float()
        away[torch.rand(p, count) < 0.1] = float("nan")
        away[torch.rand(p, count) < 0.1] = float("inf")
        right.append(away)
        least, rows = reference.first_of(away, None, min(k, count))
        sent = shards.pack(least, rows, count, k)
        assert torch.equal(shards_triton.pack(least, rows, count, k), sent)
        everyone.append(sent)
    if k > sum(counts):
        return
    least, rows = shards_triton.merge(torch.stack(everyone), p, k)
    for found, expected in zip((least, rows), shards.merge(torch.stack(everyone), p, k), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    wanted, columns = reference.first_of(torch.cat(right, dim=1), None, k)
    torch.testing.assert_close(least, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rows, columns)
