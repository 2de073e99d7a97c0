"""A block of experts on the CPU for a few pairs of a token and an expert, as `moe` has it for any: the same bits.

The products of one token take half a millisecond on two cores, and the operations around them, which are small and out
of the cache each time, would take as long. So there are as few as can be: pairs are sorted in a list, and only the
activation is left to torch.

x [T, H], ids and weights [T, k] -> [T, H]. Bytes and flops: as experts/cpu.py.
"""

# numba's kernels have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common import products
from halfbyte.kernels.common.device import cpu_capability
from halfbyte.kernels.common.fused_rows import most_fused_rows
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.experts.cpu import combine
from halfbyte.kernels.experts.reference import activate
from halfbyte.kernels.linear import cpu

MOST_PAIRS, MOST_ROWS = 64, 16  # in all, and of an expert


def moe(x: Tensor, top_k_index: Tensor, weights: Tensor, block: Block) -> Tensor | None:
    """What experts of x [T, H], contiguous, give, weighted and added up; or None where there are more pairs, or an
    expert has so many that it is not multiplied with by a kernel. weights: fp32 [T, k]."""
    if top_k_index.numel() > MOST_PAIRS:
        return None
    ids, count = top_k_index.reshape(-1).tolist(), block.gate_up.shape[0]
    order = sorted((pair for pair, expert in enumerate(ids) if 0 <= expert < count), key=ids.__getitem__)
    rows = Counter(ids[pair] for pair in order)
    if not rows or max(rows.values()) > min(_most_rows(q, x.dtype) for q in block.stacks):
        return None
    experts, first = np.array(list(rows)), np.array([0, *rows.values()]).cumsum()
    own = np.array(order)
    y = _sums(x, own // top_k_index.shape[1], block.gate_up, block.gate_up_bias, experts, first)
    inner = activate(torch.from_numpy(y), block.activation).to(x.dtype)
    y = _sums(inner, np.arange(len(own)), block.down, block.down_bias, experts, first)
    row_of = np.full(len(ids), -1)
    row_of[own] = np.arange(len(own))
    return combine(y, row_of.reshape(top_k_index.shape), weights, x.dtype)


def _most_rows(q: QuantizedWeight, dtype: torch.dtype) -> float:
    """Of an expert."""
    _, n, k = q.shape
    return min(MOST_ROWS, cpu.most_few(dtype, k), most_fused_rows(n, k, dtype, cpu_capability()))


def _sums(x: Tensor, source: Any, q: QuantizedWeight, bias: Tensor | None, experts: Any, first: Any) -> Any:
    """y [first[-1], N] fp32: y[i] = x[source[i]] @ W[expert].T + bias[expert], of the expert whose group has i."""
    weight = products.weight_arguments(q.packed, q.scale, q.nested, q.spec, q.block_size)
    y = cpu.sums(x, source, weight, q.spec, q.block_size, q.shape[1], experts, first)
    if bias is not None:
        torch.from_numpy(y).add_(bias[torch.from_numpy(np.repeat(experts, np.diff(first)))].float())
    return y
