"""The CPU kernel of experts: what it writes and what it leaves alone, the same bits always; the plans above it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import kinds, quantize
from torch import Tensor

import halfbyte as hb
from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.kernels.common import paired_products
from halfbyte.kernels.experts import cpu, reference
from halfbyte.kernels.experts.plan import Group, groups_of, plan
from halfbyte.kernels.linear import cpu as linear

POISON = 12345.0
BOUND = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
dtypes = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def fused(
    x: Tensor, q: hb.QuantizedWeight, expert: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The kernel's products of x [S, K]; rows of experts that there are not stay poisoned."""
    order, groups = reference.sort(expert, q.shape[0])
    out = torch.full((len(x), q.shape[1]), POISON, dtype=dtype or x.dtype)
    weight = q.packed, q.scale, q.nested, q.spec, q.block_size
    cpu.grouped_linear(x, order, groups, *weight, bias, out, order)
    return out


def exact(x: Tensor, q: hb.QuantizedWeight, expert: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((len(x), q.shape[1]), POISON, dtype=torch.float64)
    dense = hb.dequantize(q, torch.float32).double()
    for row, number in enumerate(expert.tolist()):
        if 0 <= number < len(dense):
            out[row] = dense[number] @ x[row].double()
            out[row] += 0 if bias is None else bias[number]
    return out


@dtypes
@kinds
def test_against_fp64(format: str, size: int, nested: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q = quantize(torch.randn(5, 37, 256), format, size, nested)
    x, bias = torch.randn(33, 256).to(dtype), torch.randn(5, 37).to(dtype)
    expert = torch.randint(-1, 6, (33,))
    for added in (None, bias):
        right = exact(x, q, expert, added)
        assert (fused(x, q, expert, added).double() - right).norm() <= BOUND[dtype] * right.norm()
        wide = fused(x, q, expert, added, torch.float32)
        rounds = format == "nf4" and paired_products.supports(dtype, 256)  # the codebook, to x's dtype
        assert (wide.double() - right).norm() <= BOUND[dtype if rounds else torch.float32] * right.norm()


@dtypes
@kinds
def test_bits_of_the_linear_kernel(format: str, size: int, nested: bool, dtype: torch.dtype) -> None:
    """A row does not know of others, nor of the stack that its expert is in, where an expert has a few."""
    torch.manual_seed(0)
    q = quantize(torch.randn(4, 64, 512), format, size, nested)
    x, expert = torch.randn(9, 512).to(dtype), torch.tensor([0, 1, 3, 3, 1, 0, 3, 1, 3])  # at most four an expert
    found = fused(x, q, expert)
    stack = torch.empty(9, 4 * 64, dtype=dtype)
    linear.linear(x, q.packed, q.scale, q.nested, q.spec, q.block_size, None, stack)
    assert torch.equal(found, stack.view(9, 4, 64)[torch.arange(9), expert])


@dtypes
@kinds
def test_few_and_many_rows(format: str, size: int, nested: bool, dtype: torch.dtype) -> None:
    """Each expert's rows as the linear kernel multiplies so many."""
    torch.manual_seed(0)
    q = quantize(torch.randn(5, 48, 1024), format, size, nested)
    bias = torch.randn(5, 48).to(dtype)
    expert = torch.tensor([3] * 40 + [0] * 3 + [5] * 20 + [1] * 17 + [4] * 16)[torch.randperm(96)]
    x = torch.randn(96, 1024).to(dtype)
    found = fused(x, q, expert, bias)
    for one in range(5):
        rows, own = x[expert == one], q[one]
        out = torch.empty(len(rows), 48, dtype=dtype)
        linear.linear(rows, own.packed, own.scale, own.nested, own.spec, size, bias[one], out, False)
        assert torch.equal(found[expert == one], out)
    assert (found[expert == 5] == POISON).all()


@settings(max_examples=60)
@given(
    count=st.integers(1, 9),
    n=st.integers(0, 20),
    steps=st.integers(1, 9),
    ids=st.lists(st.integers(-2, 10), max_size=40),
    threads=st.integers(1, 5),
    wide=st.booleans(),
)
def test_any_shape(count: int, n: int, steps: int, ids: list[int], threads: int, wide: bool) -> None:
    """Blocks may reach from one expert into the next; rows that no expert has stay as they are."""
    torch.manual_seed(n)
    k = 32 * steps
    q = hb.quantize(torch.randn(count, n, k), block_size=256 if wide else 32, nested=not wide)
    x, expert = torch.randn(len(ids), k), torch.tensor(ids, dtype=torch.int64)
    right = exact(x, q, expert)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        torch.testing.assert_close(fused(x, q, expert).double(), right, rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_the_same_bits_with_any_number_of_threads() -> None:
    """Experts of one row and of very many share the threads."""
    q = hb.quantize(torch.randn(16, 130, 1152))
    x, expert = torch.randn(300, 1152).bfloat16(), torch.cat((torch.zeros(280).int(), torch.arange(-2, 18).int()))
    outs, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            outs.append(fused(x, q, expert))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_writes_nothing_past_its_end() -> None:
    q, expert = hb.quantize(torch.randn(3, 7, 64), block_size=32), torch.tensor([2, 0, 2, 1, 0])
    x = torch.randn(5, 64).half()
    around = torch.full((5 * 7 + 128,), POISON, dtype=torch.float16)
    out = around[64 : 64 + 5 * 7].view(5, 7)
    order, groups = reference.sort(expert, 3)
    cpu.grouped_linear(x, order, groups, q.packed, q.scale, q.nested, q.spec, q.block_size, None, out, order)
    assert torch.equal(out, fused(x, q, expert))
    assert (around[:64] == POISON).all()
    assert (around[64 + 5 * 7 :] == POISON).all()


def test_rows_are_sorted_by_expert_then_by_place() -> None:
    order, groups = reference.sort(torch.tensor([3, -1, 0, 3, 9, 0, 4, 3], dtype=torch.int32), 4)
    assert order.tolist() == [2, 5, 0, 3, 7]
    assert groups == (Group(0, 0, 2), Group(3, 2, 5))
    assert reference.sort(torch.empty(0, dtype=torch.int64), 4)[1] == ()


def test_plans() -> None:
    """Each expert for itself; none is fused where K is no whole number of steps, or where there is no kernel."""
    groups = groups_of([3, 0, 900, 17])
    assert groups == (Group(0, 0, 3), Group(2, 3, 903), Group(3, 903, 920))

    def fused_experts(*arguments: object) -> list[int]:
        made = plan(groups, *arguments)  # type: ignore[arg-type]
        assert sorted(made.fused + made.dense) == list(groups)
        return [group.expert for group in made.fused]

    assert fused_experts(1536, 2048, torch.bfloat16, "cpu", "AMX") == [0]
    assert fused_experts(1536, 2048, torch.bfloat16, "cpu", "AVX512") == [0, 2, 3]
    assert fused_experts(1536, 2048, torch.bfloat16, "cpu", "AVX512-BF16") == [0, 3]
    assert fused_experts(1536, 2080, torch.bfloat16, "cpu", "AVX512-BF16") == [0]  # not multiplied in pairs
    assert fused_experts(28672, 4096, torch.bfloat16, "cpu", "AVX2") == [0, 3]
    assert fused_experts(1536, 2048, torch.float32, "cpu", "AVX512") == [0, 2, 3]
    assert fused_experts(1536, 2048, torch.float16, "cpu", "DEFAULT") == [0]
    assert fused_experts(1536, 2047, torch.float32, "cpu", "AVX512") == []
    assert fused_experts(1536, 2048, torch.float32, "cuda") == []
