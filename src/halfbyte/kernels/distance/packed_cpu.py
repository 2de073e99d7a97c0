"""L2 distances and nearest rows straight from 4-bit candidates on the CPU, through numba: no dense copy of them.

query [P, D], candidates a QuantizedWeight [V, D] -> fp32, as cpu.py gives for the dense [V, D] that `dequantize` makes.
A thread decodes one row into a buffer of its own, in the weight's dtype, which stays in the L1 or L2 cache of its core,
and meets it with every query. Bytes: the 4-bit candidates once. Flops: 3 a weight and query, and 16 a scale block.
"""

# numba finds out the types of kernels by itself.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.decode import WEIGHTS, decode
from halfbyte.kernels.common.floats import BITS
from halfbyte.kernels.common.products import weight_arguments
from halfbyte.kernels.common.scales import scale_of
from halfbyte.kernels.common.threads import parallel
from halfbyte.kernels.distance.cpu import SUMS, by_lists, distance, grain, insert
from halfbyte.kernels.distance.packed_plan import has_whole_blocks


def supports(q: QuantizedWeight, queries: int) -> bool:
    """Whether these kernels are for q, however many the queries: its rows must be whole scale blocks."""
    return has_whole_blocks(q)


def distances(query: Tensor, q: QuantizedWeight, out: Tensor) -> None:
    """Write every distance into `out`, fp32 [P, V], of query [P, D] and q [V, D]."""
    parallel(_distances, q.shape[0], grain(query), query.float().numpy(), *_rows(q), out.numpy())


def nearest(query: Tensor, q: QuantizedWeight, k: int) -> tuple[Tensor, Tensor]:
    """The k least distances, fp32 [P, k], ascending, and their rows, int64 [P, k]."""
    return by_lists(_nearest, query, q.shape[0], k, query.float().numpy(), *_rows(q), q.shape[0])


def _rows(q: QuantizedWeight) -> tuple[Any, ...]:
    """What `_decode_row` takes after the row: the packed bytes, six to say what scales are, ..."""
    packed, *scales, log2, codebook = weight_arguments(q.packed, q.scale, q.nested, q.spec, q.block_size)
    like = np.empty(0, torch.empty(0, dtype=BITS[q.dtype], device="cpu").numpy().dtype)
    return packed, tuple(scales), codebook, log2, q.spec.low_first, like


@njit(nogil=True, cache=True, fastmath=False, error_model="numpy")  # a function inherits what it does not say
def _decode_row(row, packed, scales, codebook, log2, low_first, out):
    """Row number `row`, as many weights as `out` has: bits of fp16, bf16 or fp32. scales: what `scale_of` takes."""
    flat, codes, code, absmax, offset, nested_log2 = scales
    blocks = out.size >> log2
    for place in range(blocks):
        block = row * blocks + place
        scale = scale_of(block, flat, codes, code, absmax, offset, nested_log2)
        decode(packed, (block << log2) // 2, (1 << log2) // WEIGHTS, scale, codebook, low_first, out, place << log2)


@njit(nogil=True, cache=True, fastmath=SUMS, error_model="numpy")
def _distances(begin, end, queries, packed, scales, codebook, log2, low_first, like, out):
    row = np.empty(queries.shape[1], like.dtype)
    for v in range(begin, end):
        _decode_row(v, packed, scales, codebook, log2, low_first, row)
        for p in range(len(queries)):
            out[p, v] = distance(queries[p], row)


@njit(nogil=True, cache=True, fastmath=SUMS, error_model="numpy")
def _nearest(begin, end, queries, packed, scales, codebook, log2, low_first, like, rows, block, least, found):
    """Lists `begin` to `end`, each of the `block` rows that are its own."""
    k = least.shape[2]
    row = np.empty(queries.shape[1], like.dtype)
    for piece in range(begin, end):
        order = np.empty((len(queries), k), np.uint32)
        counts = np.zeros(len(queries), np.int64)
        for v in range(piece * block, min((piece + 1) * block, rows)):
            _decode_row(v, packed, scales, codebook, log2, low_first, row)
            for p in range(len(queries)):
                there = distance(queries[p], row)
                counts[p] = insert(order[p], least[p, piece], found[p, piece], counts[p], there, v)
