"""distances, nearest, token_ranks and fidelity on the CPU: against fp64, refusals, tracing, several processes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import kinds, quantize
from torch import Tensor

import halfbyte as hb
from halfbyte import eager_search
from halfbyte.formats.parts import matrix_parts
from halfbyte.formats.rows import row_chunks
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.distance import cpu, reference
from halfbyte.kernels.rank import reference as ranks_reference

dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def exact(query: Tensor, candidates: Tensor) -> Tensor:
    return torch.stack([(candidates.double() - q).norm(dim=1) for q in query.double()])


def refused(error: type[Exception], words: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    with pytest.raises(error, match=re.escape(words)):
        function(*arguments, **keywords)


# Distances and the nearest.


@dtypes
@settings(max_examples=25)
@given(st.data())
def test_nearest_are_the_first_distances(dtype: torch.dtype, data: st.DataObject) -> None:
    """With rows in many lists, equal rows, infinities and NaN."""
    p, v, d = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 300)), data.draw(st.integers(1, 40))
    k = data.draw(st.integers(1, min(v, 128)))
    query, candidates = torch.randn(p, d).to(dtype), torch.randn(v, d).to(dtype)
    for row in data.draw(st.lists(st.integers(0, v - 1), max_size=6)):
        candidates[row] = query[0]
    for row in data.draw(st.lists(st.integers(0, v - 1), max_size=3)):
        candidates[row, 0] = data.draw(st.sampled_from([float("inf"), float("nan")]))
    everything = hb.distances(query, candidates)
    torch.testing.assert_close(everything.double(), exact(query, candidates), rtol=1e-5, atol=0, equal_nan=True)
    least, rows = hb.nearest(query, candidates, k)
    right, right_rows = torch.sort(everything, dim=1, stable=True)
    torch.testing.assert_close(least, right[:, :k], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rows, right_rows[:, :k])


@dtypes
def test_the_reference_agrees(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    query, candidates = torch.randn(3, 50).to(dtype), torch.randn(70, 50).to(dtype)
    expected = hb.nearest(query, candidates, 5)
    monkeypatch.setattr(reference, "CHUNK", 500)
    monkeypatch.setattr(eager_search, "backend", lambda *_: reference)
    torch.testing.assert_close(hb.nearest(query, candidates, 5), expected)


def test_one_query_and_many_have_their_shapes() -> None:
    query, candidates = torch.randn(2, 8), torch.randn(5, 8)
    assert hb.distances(query[0], candidates).shape == (5,)
    assert hb.distances(query, candidates).shape == (2, 5)
    assert [part.shape for part in hb.nearest(query[0], candidates, 3)] == [(3,), (3,)]
    assert [part.shape for part in hb.nearest(query, candidates)] == [(2, 1), (2, 1)]
    assert hb.distances(query[:0], candidates).shape == (0, 5)
    assert hb.distances(query, candidates[:0]).shape == (2, 0)
    assert hb.nearest(query[:0], candidates, 2)[1].shape == (0, 2)


def test_strides_and_mixed_dtypes() -> None:
    candidates = torch.randn(90, 60).bfloat16()[::3, 5:40]
    query = torch.randn(35, 2, dtype=torch.float64).float().T
    torch.testing.assert_close(hb.distances(query, candidates).double(), exact(query, candidates), rtol=1e-5, atol=0)
    turned = torch.randn(35, 20).T
    torch.testing.assert_close(hb.distances(query, turned).double(), exact(query, turned), rtol=1e-5, atol=0)


def test_lists_of_fewer_rows_than_k() -> None:
    """The last list may have one row only, and its empty places are behind NaN."""
    candidates = torch.randn(cpu.LISTS * 3 + 1, 4)
    candidates[-1] = float("nan")
    rows = hb.nearest(torch.zeros(4), candidates, 128)[1]
    assert torch.equal(rows, torch.sort(hb.distances(torch.zeros(4), candidates), stable=True).indices[:128])


@kinds
@pytest.mark.parametrize("shape", [(300, 128), (33, 384)])
def test_packed_candidates_are_what_dequantize_gives(
    format: str, size: int, nested: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = quantize(torch.randn(shape).bfloat16(), format, size, nested)
    monkeypatch.setattr(eager_search, "CHUNK", {"cpu": 1})  # as small as they come
    dense, query, tokens = hb.dequantize(q), torch.randn(2, shape[1]).bfloat16(), torch.tensor([5, 32])
    torch.testing.assert_close(hb.distances(query, q), hb.distances(query, dense), rtol=1e-6, atol=0)
    assert torch.equal(hb.nearest(query, q, 7)[1], hb.nearest(query, dense, 7)[1])
    assert torch.equal(hb.token_ranks(query, q, tokens), hb.token_ranks(query, dense, tokens))


@pytest.mark.parametrize(("shape", "size"), [((7, 33), 64), ((300, 64), 64), ((40, 4096), 32), ((5, 1), 32)])
@pytest.mark.parametrize("nested", [True, False])
def test_row_chunks_are_the_rows(shape: tuple[int, int], size: int, nested: bool) -> None:
    q = hb.quantize(torch.randn(shape), "nf4", block_size=size, nested=nested)
    parts = [hb.dequantize(chunk) for _, chunk in row_chunks(q, 1)]
    assert torch.equal(torch.cat(parts), hb.dequantize(q))
    assert [first for first, _ in row_chunks(q, 1)] == [sum(map(len, parts[:i])) for i in range(len(parts))]


# Ranks.


@dtypes
@pytest.mark.parametrize(("t", "v", "d"), [(1, 1, 1), (5, 300, 33), (40, 2000, 64)])
def test_ranks(t: int, v: int, d: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.kernels.rank.cpu.TILE", 2**14)
    hidden, lm_head = torch.randn(t, d).to(dtype), torch.randn(v, d).to(dtype)
    lm_head[v // 2] = lm_head[v // 3]
    tokens = torch.randint(v, (t,))
    tokens[0] = v // 2
    logits = hidden.double() @ lm_head.double().T
    order = logits.sort(dim=1, descending=True, stable=True).indices
    right = (order == tokens[:, None]).int().argmax(dim=1)
    found = hb.token_ranks(hidden, lm_head, tokens)
    same_logit = logits.gather(1, tokens[:, None]) == logits
    assert ((found == right) | (same_logit.sum(dim=1) > 1)).all()
    above = torch.zeros_like(tokens)
    own = ranks_reference.own_logits(hidden, lm_head, tokens)
    ranks_reference.count_above(hidden, lm_head, own, tokens, 0, above)
    assert torch.equal(found, above)


def test_equal_logits_rank_by_index() -> None:
    tokens = torch.tensor([0, 4, 19])
    assert hb.token_ranks(torch.randn(3, 8), torch.ones(20, 8), tokens).tolist() == [0, 4, 19]


def test_logits_that_fp32_cannot_tell_apart() -> None:
    """Sums of large numbers that cancel to small ones; their differences are below what fp32 keeps."""
    hidden = torch.tensor([[2.0**12, 2.0**-10, 1.0]])
    lm_head = torch.tensor([[1.0, k * 2.0**-8, -(2.0**12)] for k in (3, 1, 2, 0)])
    assert [int(hb.token_ranks(hidden, lm_head, torch.tensor([token]))) for token in range(4)] == [0, 2, 1, 3]


def test_fidelity() -> None:
    lm_head = torch.eye(6)
    hidden = torch.tensor([[5.0, 4, 3, 2, 1, 0]] * 3)
    result = hb.fidelity(hidden, lm_head, torch.tensor([0, 1, 5]), top_k=2)
    assert result.ranks.tolist() == [0, 1, 5]
    assert (result.top_1, result.within, result.median_rank, result.mean_rank) == (1 / 3, 2 / 3, 1.0, 2.0)
    assert result.reciprocal_rank == pytest.approx((1 + 1 / 2 + 1 / 6) / 3)


# Tracing.


def test_compiles_whole() -> None:
    query, candidates = torch.randn(2, 32), torch.randn(50, 32)
    q = hb.quantize(torch.randn(64, 32), "nf4", block_size=32)
    tokens = torch.tensor([3, 60])

    def everything(query: Tensor, candidates: Tensor) -> tuple[Tensor, ...]:
        ranks = hb.token_ranks(query, q, tokens)
        return hb.distances(query, candidates), *hb.nearest(query, candidates, 4), *hb.nearest(query, q), ranks

    compiled = torch.compile(everything, fullgraph=True)
    for result, right in zip(compiled(query, candidates), everything(query, candidates), strict=True):
        assert torch.equal(result, right)


def test_operators_are_sound() -> None:
    query, candidates = torch.randn(2, 32), torch.randn(50, 32)
    parts = matrix_parts(candidates)
    torch.library.opcheck(torch.ops.halfbyte.distances, (query, *parts))
    torch.library.opcheck(torch.ops.halfbyte.nearest, (query, *parts, 3))
    torch.library.opcheck(torch.ops.halfbyte.token_ranks, (query, *parts, torch.tensor([1, 2])))


# Refusals.


def test_refusals() -> None:
    query, candidates = torch.randn(2, 8), torch.randn(5, 8)
    refused(TypeError, "query is a list", hb.distances, [1.0], candidates)
    refused(TypeError, "candidates is a list; it must be a torch.Tensor or a QuantizedWeight", hb.distances, query, [])
    refused(TypeError, "query has dtype torch.float64", hb.distances, query.double(), candidates)
    refused(
        ValueError,
        "query has shape [2, 7]; candidates of shape [5, 8] take [8]",
        hb.distances,
        query[:, :7],
        candidates,
    )
    refused(ValueError, "candidates has shape [8]; it must be [V, D]", hb.distances, query, candidates[0])
    refused(
        ValueError,
        "k is 6; nearest takes 1 to 128, and no more than the 5 candidates",
        hb.nearest,
        query,
        candidates,
        6,
    )
    refused(ValueError, "k is 0", hb.nearest, query, candidates, 0)
    refused(TypeError, "k is a float", hb.nearest, query, candidates, 1.0)
    refused(ValueError, "one device", hb.distances, query, candidates.to("meta"))
    refused(TypeError, "layout", hb.distances, query, candidates.to_sparse())
    tokens = torch.tensor([1, 4])
    refused(
        ValueError, "tokens holds 5; the vocabulary has 5 tokens, 0 to 4", hb.token_ranks, query, candidates, tokens + 1
    )
    refused(ValueError, "tokens holds -1", hb.token_ranks, query, candidates, tokens - 2)
    refused(TypeError, "tokens has dtype torch.float32", hb.token_ranks, query, candidates, tokens.float())
    refused(ValueError, "takes one a line", hb.token_ranks, query, candidates, tokens[:1])
    refused(ValueError, "hidden has shape [8]", hb.token_ranks, query[0], candidates, tokens)
    refused(ValueError, "top_k is 0", hb.fidelity, query, candidates, tokens, top_k=0)
    refused(ValueError, "there are no tokens", hb.fidelity, query[:0], candidates, tokens[:0])


# Several processes.

PROCESS = """
import sys
import torch
import torch.distributed as dist
import halfbyte as hb
from halfbyte import sharded

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
query, candidates, tokens = torch.randn(3, 16), torch.randn(41, 16), torch.tensor([0, 6, 40])
candidates[30] = candidates[2]
candidates[9] = float("nan")
mine = candidates[:7] if rank == 0 else candidates[7:]
gathers = []  # of numbers: whoever keeps the group beyond its end makes torch abort now and then
gather = sharded.gathered
sharded.gathered = lambda mine, group: gathers.append(mine.numel()) or gather(mine, group)
for k in (1, 10, 41):
    least, rows = hb.nearest(query, mine, k, group=dist.group.WORLD)
    right, right_rows = hb.nearest(query, candidates, k)
    assert torch.equal(rows, right_rows), (k, rows, right_rows)
    torch.testing.assert_close(least, right, rtol=0, atol=0, equal_nan=True)
assert len(gathers) == 3  # one a call
empty = candidates if rank == 0 else candidates[:0]
assert torch.equal(hb.nearest(query, empty, 5, group=dist.group.WORLD)[1], hb.nearest(query, candidates, 5)[1])
one, _ = hb.nearest(query[0], mine, 2, group=dist.group.WORLD)
assert one.shape == (2,)
head, own = candidates.nan_to_num(), mine.nan_to_num()
assert torch.equal(hb.token_ranks(query, own, tokens, group=dist.group.WORLD), hb.token_ranks(query, head, tokens))
assert hb.fidelity(query, own, tokens, group=dist.group.WORLD) .mean_rank == hb.fidelity(query, head, tokens).mean_rank
try:
    hb.nearest(query, mine, 42, group=dist.group.WORLD)
except ValueError as error:
    assert "42" in str(error) and "41 candidates" in str(error)
else:
    raise AssertionError("more than there are")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_rows_split_over_two_processes(tmp_path: Any) -> None:
    command = [sys.executable, "-c", PROCESS]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "".join(errors)


@dtypes
def test_ranks_of_numbers_of_one_sign(dtype: torch.dtype) -> None:
    """Logits are large beside their differences."""
    hidden, lm_head = torch.rand(6, 500).to(dtype), torch.rand(3000, 500).to(dtype)
    tokens = torch.randint(3000, (6,))
    above = torch.zeros_like(tokens)
    own = ranks_reference.own_logits(hidden, lm_head, tokens)
    ranks_reference.count_above(hidden, lm_head, own, tokens, 0, above)
    assert torch.equal(hb.token_ranks(hidden, lm_head, tokens), above)


def test_ranks_of_infinite_logits() -> None:
    """What fp16 cannot hold, fp64 can."""
    hidden, lm_head = torch.full((2, 40), 200.0).half(), (100 + torch.arange(50).half())[:, None].repeat(1, 40)
    assert hb.token_ranks(hidden, lm_head, torch.tensor([49, 0])).tolist() == [0, 49]
