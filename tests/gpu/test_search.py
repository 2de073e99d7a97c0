"""Distances, nearest rows and token ranks on a GPU, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.bench.nearest import Settings, nearest_rows
from halfbyte.formats.spec import FORMATS
from halfbyte.kernels.distance.reference import first_of
from halfbyte.kernels.rank import reference as ranks_reference

from .conftest import DEVICE, check_replay, every_dtype, needs_two_gpus, on_another_stream


def matrices(p: int, v: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries and candidates that hold every query twice, and rows very near to one."""
    query, candidates = torch.randn(p, d, device=DEVICE).to(dtype), torch.randn(v, d, device=DEVICE).to(dtype)
    for i in range(min(p, v // 4)):
        candidates[4 * i] = candidates[4 * i + 1] = query[i]
        candidates[4 * i + 2] = query[i] + 0.01 * torch.randn(d, device=DEVICE).to(dtype)
    return query, candidates


def exact(query: Tensor, candidates: Tensor) -> Tensor:
    return torch.stack([(candidates.double() - q).norm(dim=1) for q in query.double()])


def check_nearest(query: Tensor, candidates: Tensor, k: int) -> None:
    """The rows are the nearest in fp64, but for those that fp32 cannot tell apart."""
    least, rows = hb.nearest(query, candidates, k)
    everything = exact(query, candidates)
    right, right_rows = first_of(everything, None, k)
    there = everything.gather(1, rows)
    torch.testing.assert_close(least.double(), there, rtol=2e-6, atol=0)
    torch.testing.assert_close(there, right, rtol=2e-6, atol=0)
    assert (rows.sort(dim=1).values.diff(dim=1) > 0).all()
    apart = (there - right).abs() > 0
    assert (rows == right_rows)[~apart & (right == 0)].all()


@every_dtype
@pytest.mark.parametrize(
    ("p", "v", "d"),
    [(1, 1, 1), (1, 1000, 4096), (1, 999, 4095), (2, 100, 63), (5, 1000, 768), (64, 5000, 1024), (70, 333, 129)],
)
def test_distances(p: int, v: int, d: int, dtype: torch.dtype) -> None:
    query, candidates = matrices(p, v, d, dtype)
    right = exact(query, candidates)
    torch.testing.assert_close(hb.distances(query, candidates).double(), right, rtol=2.0**-16, atol=0)
    torch.testing.assert_close(hb.distances(query[0], candidates).double(), right[0], rtol=2e-6, atol=0)


@every_dtype
@pytest.mark.parametrize(("p", "v", "d"), [(1, 1, 1), (1, 5000, 512), (3, 999, 63), (64, 20000, 1024)])
@pytest.mark.parametrize("k", [1, 2, 10, 128])
def test_nearest(p: int, v: int, d: int, k: int, dtype: torch.dtype) -> None:
    if k > v:
        pytest.skip("more than there are")
    check_nearest(*matrices(p, v, d, dtype), k)


@every_dtype
@pytest.mark.parametrize(("p", "v", "d"), [(1, 4000, 4096), (1, 33000, 100), (8, 5000, 1024)])
@pytest.mark.parametrize("k", [1, 10, 100])
def test_nearest_are_the_first_of_distances(p: int, v: int, d: int, k: int, dtype: torch.dtype) -> None:
    """Of those to one query, to the bit; whether they come in any order or sorted."""
    query, candidates = matrices(p, v, d, dtype)
    for _ in range(2):
        single = torch.stack([hb.distances(one, candidates) for one in query])
        right, right_rows = first_of(single, None, k)
        least, rows = hb.nearest(query, candidates, k)
        assert torch.equal(rows, right_rows)
        assert torch.equal(least, right)
        candidates = candidates[single[0].argsort()]


@pytest.mark.parametrize("p", [1, 5])
def test_equal_rows_come_in_order(p: int) -> None:
    candidates = torch.ones(3000, 64, device=DEVICE, dtype=torch.bfloat16)
    candidates[7], candidates[70], candidates[700] = float("nan"), float("inf"), 0.5
    for k in (1, 10, 100):
        least, rows = hb.nearest(torch.zeros(p, 64, device=DEVICE, dtype=torch.bfloat16), candidates, k)
        assert rows.tolist() == [[700, *(row for row in range(200) if row not in (7, 70))][:k]] * p
    least, rows = hb.nearest(torch.zeros(p, 64, device=DEVICE), candidates[:100].float(), 100)
    assert rows[:, -2:].tolist() == [[70, 7]] * p
    assert least[:, -1].isnan().all()
    assert least[:, -2].isinf().all()


@pytest.mark.parametrize("p", [1, 3])
def test_mixed_dtypes_and_strides(p: int) -> None:
    wide = torch.randn(500, 200, device=DEVICE)
    candidates = wide.bfloat16()[::3, 7:150]
    query = torch.randn(143, p, device=DEVICE).T
    torch.testing.assert_close(hb.distances(query, candidates).double(), exact(query, candidates), rtol=2e-5, atol=0)
    check_nearest(query, candidates, 9)
    turned = torch.randn(64, 300, device=DEVICE).T
    check_nearest(torch.randn(p, 64, device=DEVICE), turned, 3)


def test_nothing() -> None:
    empty = torch.empty(0, 16, device=DEVICE)
    assert hb.distances(empty, torch.randn(5, 16, device=DEVICE)).shape == (0, 5)
    assert hb.distances(torch.randn(16, device=DEVICE), empty).shape == (0,)
    assert hb.nearest(empty, torch.randn(5, 16, device=DEVICE), 2)[0].shape == (0, 2)


@pytest.mark.parametrize(("p", "k"), [(1, 10), (16, 10)])
def test_more_than_two_thousand_million_elements(p: int, k: int) -> None:
    candidates = torch.randn(530_000, 4096, device=DEVICE, dtype=torch.bfloat16)
    query = candidates[-p:].clone()
    query[0] += 0.01
    least, rows = hb.nearest(query, candidates, k)
    assert rows[:, 0].tolist() == list(range(530_000 - p, 530_000))
    some = hb.distances(query, candidates)
    assert torch.equal(some[0].argmin(), rows[0, 0])
    assert (some[:, -p:].diagonal() - least[:, 0]).abs().max() < 1e-3


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_packed_candidates_are_what_dequantize_gives(format: str) -> None:
    q = hb.quantize(torch.randn(9000, 1024, device=DEVICE, dtype=torch.bfloat16), format)
    dense = hb.dequantize(q)
    query = torch.randn(1024, device=DEVICE, dtype=torch.bfloat16)
    torch.testing.assert_close(hb.distances(query, q), hb.distances(query, dense), rtol=1e-6, atol=0)
    check_rows = [hb.nearest(query, matrix, 20)[1].tolist() for matrix in (q, dense)]
    assert check_rows[0] == check_rows[1]
    hidden, tokens = torch.randn(7, 1024, device=DEVICE, dtype=torch.bfloat16), torch.randint(9000, (7,), device=DEVICE)
    assert torch.equal(hb.token_ranks(hidden, q, tokens), hb.token_ranks(hidden, dense, tokens))


@every_dtype
@pytest.mark.parametrize(("t", "v", "d"), [(1, 1, 1), (3, 999, 63), (130, 5000, 1024), (512, 32000, 4096)])
def test_ranks(t: int, v: int, d: int, dtype: torch.dtype) -> None:
    hidden, lm_head = torch.randn(t, d, device=DEVICE).to(dtype), torch.randn(v, d, device=DEVICE).to(dtype)
    lm_head[v // 2] = lm_head[v // 3]
    tokens = torch.randint(v, (t,), device=DEVICE)
    tokens[0] = v // 2
    right = torch.zeros_like(tokens)
    ranks_reference.count_above(hidden, lm_head, ranks_reference.own_logits(hidden, lm_head, tokens), tokens, 0, right)
    assert torch.equal(hb.token_ranks(hidden, lm_head, tokens), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_logits_rank_by_index(dtype: torch.dtype) -> None:
    """More of them than the list of near ones holds."""
    hidden, lm_head = torch.randn(3, 64, device=DEVICE).to(dtype), torch.ones(3000, 64, device=DEVICE).to(dtype)
    tokens = torch.tensor([0, 4, 2999], device=DEVICE)
    assert hb.token_ranks(hidden, lm_head, tokens).tolist() == [0, 4, 2999]


def test_numbers_of_one_sign() -> None:
    """Tensor cores cut off what they add up, always downwards: all logits are off by nearly as much."""
    hidden, lm_head = torch.rand(64, 4096, device=DEVICE).bfloat16(), torch.rand(30000, 4096, device=DEVICE).bfloat16()
    tokens = torch.randint(30000, (64,), device=DEVICE)
    right = torch.zeros_like(tokens)
    ranks_reference.count_above(hidden, lm_head, ranks_reference.own_logits(hidden, lm_head, tokens), tokens, 0, right)
    assert torch.equal(hb.token_ranks(hidden, lm_head, tokens), right)


def test_tokens_outside_of_the_vocabulary() -> None:
    hidden = torch.randn(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="tokens holds 5; the vocabulary has 5 tokens"):
        hb.token_ranks(hidden, torch.randn(5, 64, device=DEVICE), torch.tensor([1, 5], device=DEVICE))


@pytest.mark.parametrize("p", [1, 8])
def test_graph_and_stream(p: int) -> None:
    query, candidates = matrices(p, 4000, 512, torch.bfloat16)
    tokens = torch.randint(4000, (p,), device=DEVICE)

    def everything() -> list[Tensor]:
        ranks = hb.token_ranks(query, candidates, tokens)
        return [hb.distances(query, candidates), *hb.nearest(query, candidates, 5), ranks]

    expected = everything()
    assert all(map(torch.equal, on_another_stream(everything), expected))
    check_replay(everything, expected)


def test_compiles_whole() -> None:
    query, candidates = matrices(4, 500, 64, torch.float32)
    nearest = torch.compile(lambda q, c: hb.nearest(q, c, 3), fullgraph=True)
    assert all(map(torch.equal, nearest(query, candidates), hb.nearest(query, candidates, 3)))


@needs_two_gpus
def test_another_device() -> None:
    query, candidates = (tensor.to("cuda:1") for tensor in matrices(3, 500, 64, torch.float32))
    least, rows = hb.nearest(query, candidates, 3)
    assert least.device == query.device
    assert torch.equal(rows.cpu(), first_of(exact(query, candidates), None, 3)[1].cpu())


@needs_two_gpus
@pytest.mark.alone
def test_two_gpus_find_the_nearest_rows_sooner_than_one() -> None:
    """The same rows, which the bench compares; the host never waits in between."""
    one, two = nearest_rows(DEVICE, Settings(rounds=30))
    assert two["median_us"] < one["median_us"]
