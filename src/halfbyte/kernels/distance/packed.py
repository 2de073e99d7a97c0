"""L2 distances and nearest rows straight from 4-bit candidates on a GPU: one pass, and no dense copy of them.

query [P, D], candidates a QuantizedWeight [V, D] -> fp32, as triton.py gives for the dense [V, D] that `dequantize`
makes: codebook[nibble] * scale in fp32, rounded once to the weight's dtype, and (c - q)^2 of that summed in fp32.
Bytes: the 4-bit candidates once (0.516 a weight, nested at 64), the query from cache. Flops: 4 a weight and query.

At that rate instructions count as much as bytes: an H200 issues 3.5 of them in the time that it reads a weight. Here
are 6.6. A thread takes parts of 32 or 64 weights that share a scale, so that scales and addresses cost little. The
codebook lives in registers, one entry a lane, and a look-up is a shuffle, which takes a lane's number from the low bits
of a register and ignores the rest: a nibble need only be shifted there. Rounding to bf16 leaves an fp32 number, in one
instruction. The query is laid out beforehand so that neighbouring threads read neighbouring elements of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats.spec import codebook_tensor
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.arithmetic import add, multiply, power_of_two
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin
from halfbyte.kernels.distance import packed_plan as plans
from halfbyte.kernels.distance.packed_plan import PackedPlan
from halfbyte.kernels.distance.select import select

PACKING = 80  # the first target with cvt.rn.{bf16x2,f16x2}.f32
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
FEW = 4  # queries that take the candidates one after the other; for more it pays to make them dense once


@triton.jit
def _one(pointers, PTX: tl.constexpr):
    """What each pointer points to, bytes as int32. Not `tl.load`, which would put the numbers where loads of them are
    widest, and the parts that go with them: the threads of a warp would read bytes that are far apart."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if PTX == 0:
        value = tl.load(pointers)
    elif dtype == tl.uint8:
        value = tl.inline_asm_elementwise(
            "ld.global.nc.u8 $0, [$1];", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    elif dtype == tl.float32:
        value = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        value = tl.inline_asm_elementwise(
            "ld.global.nc.b16 $0, [$1];", "=h,l", [pointers.to(tl.int64)], dtype=tl.int16, is_pure=True, pack=1
        ).to(dtype, bitcast=True)
    return value


@triton.jit
def _four(pointers, PTX: tl.constexpr):
    """Four 32-bit words from each pointer on; there is nothing else in a thread's 16 bytes."""
    if PTX > 0:
        words = tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [pointers.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        words = tl.load(pointers), tl.load(pointers + 1), tl.load(pointers + 2), tl.load(pointers + 3)
    return words


@triton.jit
def _table(codebook, like, PTX: tl.constexpr):
    """The codebook as look-ups want it: the entry of each lane's number or, without PTX, all sixteen. `like`: any
    integers that are not all the same, or Triton would take the lane for a number that threads share."""
    if PTX > 0:
        entry = tl.inline_asm_elementwise(
            "mov.u32 $0, %laneid; // $1", "=r,r", [like], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        entry = tl.arange(0, 16)
    return _one(codebook + (entry & 15), PTX)


@triton.jit
def _look_up(table, words, SHIFT: tl.constexpr, PTX: tl.constexpr):
    """The codebook's value of the nibble at bit SHIFT of each word."""
    if PTX > 0:
        # Segments of 16 lanes: of an index, bits 0 to 3 count.
        value = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x101f, 0xffffffff;", "=f,f,r", [table, words >> SHIFT],
            dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        nibbles = ((words >> SHIFT) & 15).reshape(words.shape[0] * words.shape[1])
        value = tl.gather(table, nibbles, 0).reshape(words.shape)
    return value


@triton.jit
def _rounded(first, second, dtype: tl.constexpr, PACKS: tl.constexpr):
    """Two fp32 numbers, each rounded to `dtype`, in fp32."""
    if dtype == tl.float32:
        pass
    elif not PACKS:
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    elif dtype == tl.bfloat16:
        # The high half of a pair, over a zero, is an fp32 number already.
        first, second = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, 0f00000000; cvt.rn.bf16x2.f32 $1, $3, 0f00000000;", "=r,=r,f,f", [first, second],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        first, second = first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)
    else:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            .reg .f16 low, high;
            cvt.rn.f16x2.f32 pair, $3, $2;
            mov.b32 {low, high}, pair;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }""",
            "=f,=f,f,f", [first, second], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return first, second


@triton.jit
def _scales(
    scale, code, absmax, offset, block, NESTED: tl.constexpr, SHIFT: tl.constexpr, EXPONENTS: tl.constexpr,
    FLUSH: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """fp32: the scales of blocks. NESTED: they are codes, and 2**SHIFT of them share an entry of `absmax`. EXPONENTS:
    they are exponents of two."""
    scales = _one(scale + block, PTX)
    if NESTED:
        product = multiply(_one(code + scales.to(tl.int32), PTX), _one(absmax + (block >> SHIFT), PTX), FLUSH)
        scales = add(product, tl.load(offset), PTX > 0)
    if EXPONENTS:
        scales = power_of_two(scales.to(tl.int32))
    return scales.to(tl.float32)


@triton.jit
def _sum_of_squares(
    query, packed, scale, code, absmax, offset, table, rows, n_parts,
    ROWS: tl.constexpr, PARTS: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
    NESTED: tl.constexpr, SHIFT: tl.constexpr, EXPONENTS: tl.constexpr, LOW_FIRST: tl.constexpr, FLUSH: tl.constexpr,
    DTYPE: tl.constexpr, PTX: tl.constexpr, PACKS: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS]: the sum of (c - q)^2 for each of `rows`, which are inside."""
    total = tl.zeros((ROWS, PARTS), tl.float32)
    place = tl.arange(0, PARTS)[None, :]
    line = rows[:, None] * n_parts
    for start in range(0, n_parts, PARTS):
        column = start + place
        part = line + (column if EVEN else tl.minimum(column, n_parts - 1))
        scales = _scales(scale, code, absmax, offset, part >> BLOCK, NESTED, SHIFT, EXPONENTS, FLUSH, PTX)
        some = tl.zeros((ROWS, PARTS), tl.float32)
        for load in tl.static_range(LOADS):
            words = _four(packed + part.to(tl.int64) * (4 * LOADS) + 4 * load, PTX)
            for group in tl.static_range(8):
                q = _four(query + start * (32 * LOADS) + (load * 8 + group) * (4 * PARTS) + 4 * place, PTX)
                for pair in tl.static_range(2):
                    low = _look_up(table, words[group // 2], group % 2 * 16 + pair * 8, PTX)
                    high = _look_up(table, words[group // 2], group % 2 * 16 + pair * 8 + 4, PTX)
                    low, high = _rounded(multiply(low, scales, FLUSH), multiply(high, scales, FLUSH), DTYPE, PACKS)
                    low -= (q[2 * pair] if LOW_FIRST else q[2 * pair + 1]).to(tl.float32, bitcast=True)
                    high -= (q[2 * pair + 1] if LOW_FIRST else q[2 * pair]).to(tl.float32, bitcast=True)
                    some = tl.fma(high, high, tl.fma(low, low, some))
        total += some if EVEN else tl.where(column < n_parts, some, 0)
    return tl.sum(total, axis=1)


@triton.jit
def distances_kernel(
    query, packed, scale, code, absmax, offset, codebook, out, n_queries, n_rows, n_parts, q_stride, o_stride,
    ROWS: tl.constexpr, PARTS: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
    NESTED: tl.constexpr, SHIFT: tl.constexpr, EXPONENTS: tl.constexpr, LOW_FIRST: tl.constexpr, FLUSH: tl.constexpr,
    DTYPE: tl.constexpr, PTX: tl.constexpr, PACKS: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """query: [P, q_stride] words of fp32, as `_laid_out` makes them. packed: int32. A part is 32 * LOADS weights;
    n_parts: of a row. EVEN: PARTS divides them. BLOCK: 2**BLOCK parts share a scale. LOW_FIRST: the first weight of a
    byte is in its low nibble. FLUSH: products flush subnormal numbers to zero. DTYPE: of the dense weight.

    Queries are the faster side of the grid, so that programs next to each other read the same candidates."""
    if FOLLOWED:
        let_the_next_begin()
    program = tl.program_id(0)
    q = program % n_queries
    row = program // n_queries * ROWS + tl.arange(0, ROWS)
    total = _sum_of_squares(
        query + q * q_stride, packed, scale, code, absmax, offset, _table(codebook, tl.arange(0, PARTS)[None, :], PTX),
        tl.minimum(row, n_rows - 1), n_parts,
        ROWS, PARTS, LOADS, EVEN, BLOCK, NESTED, SHIFT, EXPONENTS, LOW_FIRST, FLUSH, DTYPE, PTX, PACKS,
    )  # fmt: skip
    tl.store(out + q.to(tl.int64) * o_stride + row, tl.sqrt_rn(total), mask=row < n_rows)


def takes(q: QuantizedWeight, queries: int) -> bool:
    """Whether these kernels are for so many queries against q; else its rows are better made dense first."""
    return queries <= FEW and plans.takes(q)


def distances(query: Tensor, q: QuantizedWeight, out: Tensor, plan: PackedPlan | None = None) -> None:
    """Write every distance into `out`, fp32 [P, V] with rows of stride 1, of query [P, D] and q [V, D], on the current
    device."""
    p, v = out.shape
    if p == 0 or v == 0:
        return
    tile = plan or plans.plan(q.shape[1], q.block_size)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        return triton.cdiv(v, tile.rows) * p, _constants(q, tile, properties)

    arguments = (*_arguments(query, q, tile, out), out.stride(0))
    launch(distances_kernel, out.get_device(), arguments, _key(q, tile), configure)


def nearest(query: Tensor, q: QuantizedWeight, k: int, plan: PackedPlan | None = None) -> tuple[Tensor, Tensor]:
    """The k least distances, fp32 [P, k], ascending, and their rows, int64 [P, k]."""
    away = query.new_empty((len(query), q.shape[0]), dtype=torch.float32)
    distances(query, q, away, plan)
    return select(away, k)


def _arguments(query: Tensor, q: QuantizedWeight, tile: PackedPlan, out: Tensor) -> tuple[Tensor | int, ...]:
    """What both kernels begin with."""
    codebook = codebook_tensor(q.spec, q.device)
    code, absmax, offset = q.nested[:3] if q.nested else (codebook, codebook, codebook)  # not read
    lines = _laid_out(query, tile)
    sizes = (len(query), q.shape[0], q.shape[1] // (plans.LOAD * tile.loads), lines.stride(0))
    return lines, q.packed.view(-1).view(torch.int32), q.scale, code, absmax, offset, codebook, out, *sizes


def _laid_out(query: Tensor, tile: PackedPlan) -> Tensor:
    """fp32 bits [P, n] of a query [P, D]: for every tile, groups of four neighbours, and of each group all parts."""
    p, d = query.shape
    groups = plans.LOAD * tile.loads // plans.WORDS
    width = tile.parts * groups * plans.WORDS
    if d % width:
        query = torch.nn.functional.pad(query, (0, -d % width))
    lines = query.new_empty((p, query.shape[1] // width, groups, tile.parts, plans.WORDS), dtype=torch.float32)
    lines.copy_(query.reshape(p, -1, tile.parts, groups, plans.WORDS).transpose(2, 3))
    return lines.view(torch.int32).view(p, -1)


def _constants(q: QuantizedWeight, tile: PackedPlan, properties: DeviceProperties) -> dict[str, Any]:
    part = plans.LOAD * tile.loads
    return {
        "ROWS": tile.rows, "PARTS": tile.parts, "LOADS": tile.loads, "EVEN": q.shape[1] // part % tile.parts == 0,
        "BLOCK": (q.block_size // part).bit_length() - 1, "NESTED": q.nested is not None,
        "SHIFT": q.nested.block_size.bit_length() - 1 if q.nested else 0, "EXPONENTS": q.spec.has_exponents,
        "LOW_FIRST": q.spec.low_first,
        "FLUSH": properties.ptx > 0 and q.spec.flushes, "DTYPE": TYPES[q.dtype], "PTX": properties.ptx,
        "PACKS": properties.ptx >= PACKING, "FOLLOWED": properties.ptx >= SINCE, "num_warps": tile.warps,
        "enable_fp_fusion": False,
    }  # fmt: skip


def _key(q: QuantizedWeight, tile: PackedPlan) -> tuple[Any, ...]:
    nested_size = q.nested.block_size if q.nested else 0
    return tile, q.format, q.block_size, nested_size, q.dtype, q.scale.dtype
