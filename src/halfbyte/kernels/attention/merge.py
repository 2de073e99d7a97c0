"""The parts that a head's tokens are cut into: where each of them lies, and how their sums are added up.

A part leaves its sum, its highest score and its weights in fp32. They are rescaled to the highest score of all and
added in the parts' order, by the last program of a head to end or by a kernel of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.common.overlap import let_the_next_begin, wait_for_the_one_ahead


@triton.jit
def cut(spans, text, tokens, parts, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, SPANS: tl.constexpr):
    """The first token that a text sees, the one behind the last, the first block, the number of blocks, and how many
    parts these are worth."""
    if SPANS:
        first = tl.maximum(tl.load(spans + text * WIDTH), 0)
        end = tl.minimum(tl.load(spans + text * WIDTH + 1), tokens)  # a caller's own may say more than there is
    else:
        first = 0 * tokens
        end = tokens
    begin = first // BLOCK
    blocks = (end + BLOCK - 1) // BLOCK - begin
    return first, end, begin, blocks, tl.minimum(parts, tl.maximum((blocks + LEAST - 1) // LEAST, 1))


@triton.jit
def added(
    sums, statistics, place, used, held, inside, HELD: tl.constexpr, E: tl.constexpr, MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """[rows, E]: the parts from number `place` on, of which `used` have been stored. held, inside: their rows."""
    e = tl.arange(0, E)
    part = tl.arange(0, MOST)
    there = (part < used)[:, None] & inside[None, :]
    at = statistics + (place + part)[:, None] * (2 * HELD) + held[None, :]
    highest = tl.load(at, there, float("-inf"), cache_modifier=".cg")
    weights = tl.load(at + HELD, there, 0, cache_modifier=".cg")
    top = tl.max(highest, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.sum(weights * tl.exp2(highest - top[None, :]), axis=0)
    total = tl.zeros((held.shape[0], E), tl.float32)
    for begin in range(0, used, CHUNK):
        some = begin + tl.arange(0, CHUNK)
        stored = (some < used)[:, None] & inside[None, :]
        scores = tl.load(
            statistics + (place + some)[:, None] * (2 * HELD) + held[None, :],
            stored,
            float("-inf"),
            cache_modifier=".cg",
        )
        rows = sums + ((place + some)[:, None] * HELD + held[None, :])[:, :, None] * E + e[None, None, :]
        part_sums = tl.load(rows, stored[:, :, None], 0, cache_modifier=".cg")
        total += tl.sum(part_sums * tl.exp2(scores - top[None, :])[:, :, None], axis=0)
    return total / tl.maximum(weight, 1.0)[:, None]  # the highest score's weight alone is 1


@triton.jit
def store_rows(
    out, result, row, inside, shared, heads, GROUP: tl.constexpr, NEW: tl.constexpr, VALUE: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Rows of a head of keys into out [new tokens, heads of queries, VALUE]."""
    e = tl.arange(0, E)
    at = (row % NEW * heads + shared) * GROUP + row // NEW
    tl.store(out + at[:, None] * VALUE + e[None, :], result, inside[:, None] & (e < VALUE)[None, :])


@triton.jit
def attend_merge_kernel(
    spans, out, sums, statistics, tokens, heads, parts,
    GROUP: tl.constexpr, NEW: tl.constexpr, ROWS: tl.constexpr, HELD: tl.constexpr, VALUE: tl.constexpr,
    E: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr,
    SPANS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: row i % HELD of what HELD programs' rows stand for, of a text's head of keys (see attend_kernel)."""
    TILES: tl.constexpr = (GROUP * NEW + ROWS - 1) // ROWS
    which = tl.program_id(0) // HELD
    owner = which // TILES
    text = (owner // heads).to(tl.int64)
    held = tl.program_id(0) % HELD + tl.arange(0, 1)
    row = which % TILES * ROWS + held
    inside = row < GROUP * NEW
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    _, _, _, _, used = cut(spans, text, tokens, parts, WIDTH, BLOCK, LEAST, SPANS)
    if used > 1:  # one alone has stored the result
        result = added(sums, statistics, which * parts, used, held, inside, HELD, E, MOST, CHUNK)
        out += text * heads * GROUP * NEW * VALUE
        store_rows(out, result, row, inside, owner % heads, heads, GROUP, NEW, VALUE, E)
