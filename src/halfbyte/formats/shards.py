"""4-bit weights cut and put together without a change of their values: what tensor parallelism and merged layers need.

A cut between rows takes whole bytes of every format. "nf4" and "fp4" run their scale blocks over the flattened weight,
so a cut must fall between two blocks; nested scales share a number among 256 blocks, and where a cut falls inside such
a group they are turned into plain fp32 scales first. Weights of different nested scales have different offsets: put
together, they are plain, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from halfbyte.formats.spec import PER_WORD
from halfbyte.formats.weight import QuantizedWeight, part_of


def unnested(q: QuantizedWeight) -> QuantizedWeight:
    """The same weight with plain fp32 scales, to the bit; itself where they are plain already."""
    nested = q.nested
    if nested is None:
        return q
    codes = q.scale.view(-1)
    group = torch.arange(codes.numel(), dtype=torch.int64, device=codes.device) // nested.block_size
    # A rounded multiply, then a rounded add, as all who read nested scales do.
    scale = nested.code[codes.long()] * nested.absmax.view(-1)[group] + nested.offset
    return replace(q, scale=scale, nested=None)


def rows(q: QuantizedWeight, first: int, last: int) -> QuantizedWeight:
    """Rows `first` to before `last` of a weight [N, K], in memory of their own; q itself where that is all of it.

    Scales stay nested where the cut begins between two of their groups. Raises ValueError where it falls inside a block
    of weights that share a scale.
    """
    n, k = q.shape
    if (first, last) == (0, n):
        return q
    size = q.block_size
    if not q.spec.along_k:
        if first * k % size or (last * k % size and last < n):
            raise _cuts_block(q, f"rows {first} to {last}", f"a row has {k} weights, and {size} share a scale")
        if q.nested is not None and first * k // size % q.nested.block_size:
            q = unnested(q)
    part = part_of(q, first, last)
    nested = None if part.nested is None else part.nested._replace(absmax=part.nested.absmax.clone())
    return replace(part, packed=part.packed.clone(), scale=part.scale.clone(), nested=nested)


def columns(q: QuantizedWeight, first: int, last: int) -> QuantizedWeight:
    """Columns `first` to before `last` of a weight [N, K], in memory of their own; q itself where that is all of it.

    Nested scales become plain. Raises ValueError where the cut falls inside a block of weights that share a scale.
    """
    n, k = q.shape
    if (first, last) == (0, k):
        return q
    size = q.block_size
    if k % size or first % size or last % size:
        raise _cuts_block(q, f"columns {first} to {last}", f"{size} weights of a row share a scale")
    q = unnested(q)
    each = PER_WORD if q.spec.words else 2
    packed = q.packed.view(n, k // each)[:, first // each : last // each].contiguous()
    scale = q.scale.view(n, k // size)[:, first // size : last // size].contiguous()
    shape = (n, last - first)
    return replace(
        q, packed=packed.view(q.spec.packed_shape(shape)), scale=scale.view(q.spec.scale_shape(shape, size)),
        shape=shape,
    )  # fmt: skip


def concatenated(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight [N1 + N2 + ..., K] of several [N, K] of one format, block size and K; its scales are plain.

    Raises ValueError where they differ, or where one does not end with a whole block.
    """
    first, k = weights[0], weights[0].shape[1]
    if len(weights) == 1:
        return first
    kinds = {(q.format, q.block_size, q.shape[1]) for q in weights}
    if len(kinds) > 1:
        raise ValueError(f"weights of several formats, block sizes or K cannot be one: {sorted(kinds)}")
    if not first.spec.along_k and any(q.numel % q.block_size for q in weights[:-1]):
        raise ValueError(f"a weight has {k} columns and does not end with a whole block of {first.block_size}")
    shape = (sum(q.shape[0] for q in weights), k)
    plain = [unnested(q) for q in weights]
    packed = torch.cat([q.packed.reshape(-1) for q in plain])
    scale = torch.cat([q.scale.reshape(-1) for q in plain])
    return replace(
        plain[0], packed=packed.view(first.spec.packed_shape(shape)), shape=shape,
        scale=scale.view(first.spec.scale_shape(shape, first.block_size)),
    )  # fmt: skip


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """A stack [E, N, K] of weights [N, K]; its scales are plain. Raises ValueError where kinds or shapes differ."""
    shapes = {q.shape for q in weights}
    if len(shapes) > 1:
        raise ValueError(f"experts of one stack have one shape; these have {sorted(shapes)}")
    q = unnested(concatenated(weights))
    shape, spec = (len(weights), *weights[0].shape), q.spec
    return replace(
        q, packed=q.packed.view(spec.packed_shape(shape)), scale=q.scale.view(spec.scale_shape(shape, q.block_size)),
        shape=shape,
    )  # fmt: skip


def _cuts_block(q: QuantizedWeight, what: str, why: str) -> ValueError:
    return ValueError(f"{what} of a {q.format} weight {list(q.shape)} cut a scale block: {why}")
