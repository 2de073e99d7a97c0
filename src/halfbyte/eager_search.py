"""The operations of search.py without checks of arguments: a kernel is picked and runs, on the tensors' device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from halfbyte.eager import backend, dequantize, on_its_device
from halfbyte.formats.parts import Matrix
from halfbyte.formats.rows import row_chunks
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.slow import no_kernels
from halfbyte.kernels.distance.reference import first_of

MOST_NEAREST = 128
# 4-bit weights that are dense at a time: as bf16 they fit into the last cache of a large GPU, or of a CPU.
CHUNK = {"cuda": 2**24, "cpu": 2**21}


@on_its_device
def distances(query: Tensor, candidates: Matrix) -> Tensor:
    queries = lines_of(query)
    out = queries.new_empty((len(queries), candidates.shape[0]), dtype=torch.float32)
    packed = _packed_kernels(queries, candidates)
    if packed is not None:
        packed.distances(queries, candidates, out)
    else:
        kernels = backend("distance", queries.device.type)
        for first, dense in dense_chunks(candidates):
            kernels.distances(queries, dense, out[:, first : first + len(dense)])
    return out[0] if query.dim() == 1 else out


@on_its_device
def nearest(query: Tensor, candidates: Matrix, k: int) -> tuple[Tensor, Tensor]:
    queries = lines_of(query)
    packed = _packed_kernels(queries, candidates)
    if packed is not None:
        least, rows = packed.nearest(queries, candidates, k)
        return (least[0], rows[0]) if query.dim() == 1 else (least, rows)
    kernels = backend("distance", queries.device.type)
    found: list[tuple[Tensor, Tensor]] = []
    for first, dense in dense_chunks(candidates):
        least, rows = kernels.nearest(queries, dense, min(k, len(dense)))
        found.append((least, rows + first if first else rows))
    least, rows = found[0] if len(found) == 1 else _merged(found, k)
    return (least[0], rows[0]) if query.dim() == 1 else (least, rows)


def _merged(found: list[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The first k of several lists, whose rows ascend from list to list."""
    least, rows = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return first_of(least, rows, k)


@on_its_device
def token_ranks(hidden: Tensor, lm_head: Matrix, tokens: Tensor) -> Tensor:
    lines, tokens = lines_of(hidden), tokens.detach().long()
    check = TokenCheck(tokens, lm_head.shape[0])
    kernels = backend("rank", lines.device.type)
    own = kernels.own_logits(lines, *rows_of(lm_head, tokens))
    above = torch.zeros_like(tokens)
    for first, dense in dense_chunks(lm_head):
        kernels.count_above(lines, dense, own, tokens, first, above)
    check()
    return above


def _packed_kernels(queries: Tensor, candidates: Matrix) -> Any:
    """The kernels that take 4-bit candidates as they are, or None where their rows are made dense first."""
    if not isinstance(candidates, QuantizedWeight):
        return None
    kernels = _packedbackend(queries.device.type)
    return kernels if kernels is not None and kernels.supports(candidates, len(queries)) else None


@cache
def _packedbackend(device_type: str) -> Any:
    if no_kernels(device_type) is not None:
        return None
    return import_module(f"halfbyte.kernels.distance.{'packed_cpu' if device_type == 'cpu' else 'packed'}")


def lines_of(query: Tensor) -> Tensor:
    """[P, D], contiguous."""
    lines = query.detach().resolve_neg()
    return (lines[None] if lines.dim() == 1 else lines).contiguous()


def dense_chunks(candidates: Matrix) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of a matrix: all of a dense one, a few megabytes after the other of a 4-bit one."""
    if not isinstance(candidates, QuantizedWeight):
        dense = candidates.detach().resolve_neg()
        yield 0, dense if dense.stride(-1) == 1 else dense.contiguous()
        return
    buffer: Tensor | None = None
    for first, chunk in row_chunks(candidates, CHUNK.get(candidates.device.type, 2**24)):
        if buffer is None:
            buffer = candidates.scale.new_empty(chunk.shape, dtype=candidates.dtype)
        dense = buffer[: chunk.shape[0]]
        dequantize(chunk, dense)
        yield first, dense


def rows_of(matrix: Matrix, index: Tensor) -> tuple[Tensor, Tensor]:
    """(dense rows, which of them) so that the second picks rows `index` of the matrix from the first."""
    if not isinstance(matrix, QuantizedWeight):
        return next(dense_chunks(matrix))[1], index
    rows = matrix.scale.new_zeros((len(index), matrix.shape[1]), dtype=matrix.dtype)
    for first, dense in dense_chunks(matrix):
        inside = (index >= first) & (index < first + len(dense))
        rows = torch.where(inside[:, None], dense[(index - first).clamp(0, len(dense) - 1)], rows)
    return rows, torch.arange(len(index), dtype=torch.int64, device=index.device)


class TokenCheck:
    """The check of numbers that are on a device: they are fetched first, and looked at when the work is under way.

    A capture cannot wait, and then nobody looks.
    """

    def __init__(self, tokens: Tensor, vocabulary: int) -> None:
        self.tokens, self.vocabulary = tokens, vocabulary
        self.fetched = None
        if tokens.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                self.tokens = tokens[:0]
                return
            self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=True)
            self.tokens.copy_(tokens, non_blocking=True)
            self.fetched = torch.cuda.Event()
            self.fetched.record()

    def __call__(self) -> None:
        if self.fetched is not None:
            self.fetched.synchronize()
        if not len(self.tokens):
            return
        least, most = (int(end) for end in self.tokens.aminmax())
        if least < 0 or most >= self.vocabulary:
            wrong, last = least if least < 0 else most, self.vocabulary - 1
            raise ValueError(f"tokens holds {wrong}; the vocabulary has {self.vocabulary} tokens, 0 to {last}")
