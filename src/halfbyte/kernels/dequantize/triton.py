"""Dequantize on a GPU: packed nibbles and scales in, numbers out, in one pass with no buffer in between.

One kernel serves every format, for all of them are sixteen values and a scale for each run of weights. A program owns a
tile of [blocks, bytes of a block]. A thread loads 4 packed bytes, looks their 8 nibbles up in the codebook, which sits
in 64 bytes of shared memory, multiplies by the block's scale in fp32, rounds once, and stores 16 bytes. Nested scales
are decoded on the way, one per row of the tile: no fp32 scales in memory. An int4 word is four little-endian bytes with
the low nibble first, and its groups are blocks, since rows are whole groups.

Bytes a weight, bf16: 1/2 packed + 2 out + 1/block_size of nested scales (2.516 at 64). Flops: one multiply. Bound by
memory everywhere. bitsandbytes' CUDA library is built with flush-to-zero arithmetic, so its formats are multiplied with
`mul.ftz` on NVIDIA; a nested scale is a rounded multiply, then a rounded add, never fused. An e8m0 scale becomes the
exponent of an fp32 number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from halfbyte.formats.spec import Format, codebook_tensor
from halfbyte.formats.weight import NestedScale
from halfbyte.kernels.common.arithmetic import add, multiply, power_of_two
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.dequantize.plan import DequantizePlan
from halfbyte.kernels.dequantize.plan import plan as make_plan

PACKING = 80  # the first target with cvt.rn.{bf16x2,f16x2}.f32, which rounds two numbers into one word


@triton.jit
def _pack(first, second, BF16: tl.constexpr):
    """Two fp32 numbers, rounded and put side by side into one 32-bit word, the first in its low half."""
    if BF16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _fetch_ahead(packed, n_bytes, TILE: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr):
    """One thread of every CHUNK-th program asks for the packed bytes of CHUNK programs to come."""
    program = tl.program_id(0)
    if program % CHUNK == 0:
        start = (program.to(tl.int64) + AHEAD) * TILE
        if start + CHUNK * TILE <= n_bytes:
            tl.inline_asm_elementwise(
                """{
                .reg .pred first;
                .reg .b32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 first, thread, 0;
                @first cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.b32 $0, 0;
                }""",
                "=r,l,r", [(packed + start).to(tl.int64), tl.full((), CHUNK * TILE, tl.int32)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def dequantize_kernel(
    packed, scale, code, absmax, offset, codebook, out, numel, n_bytes,
    BLOCK_BYTES: tl.constexpr, BLOCKS: tl.constexpr, NESTED: tl.constexpr, LOW_FIRST: tl.constexpr,
    EXPONENTS: tl.constexpr, FLUSH: tl.constexpr, WORDS: tl.constexpr, ODD: tl.constexpr, AHEAD: tl.constexpr,
    CHUNK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """NESTED: scales that share an entry of `absmax`, 0 for plain scales. LOW_FIRST: the first weight of a byte is in
    its low nibble. EXPONENTS: scales are exponents of two. FLUSH: products flush subnormal numbers to zero. WORDS:
    store pairs of 16-bit numbers as words (`out` must be 4-byte aligned). ODD: numel is odd, and the last byte's second
    nibble is nothing. n_bytes is an argument of its own so that the compiler knows when it is a multiple of 16, and
    keeps wide accesses under their masks."""
    TILE: tl.constexpr = BLOCKS * BLOCK_BYTES
    if AHEAD > 0:
        _fetch_ahead(packed, n_bytes, TILE, AHEAD, CHUNK)
    first_block = tl.program_id(0).to(tl.int64) * BLOCKS
    first_byte = first_block * BLOCK_BYTES
    left = tl.minimum(n_bytes - first_byte, TILE).to(tl.int32)

    # Four bytes a thread for the loads makes sixteen for the stores, in one layout.
    block = tl.arange(0, BLOCKS)
    byte = block[:, None] * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    byte = tl.max_contiguous(byte, (1, 4))
    pairs = tl.load(packed + first_byte + byte, mask=byte < left, other=0, eviction_policy="evict_first").to(tl.int32)

    in_range = block * BLOCK_BYTES < left
    scales = tl.load(scale + first_block + block, mask=in_range, other=0)
    if NESTED > 0:
        step = tl.load(absmax + first_block // NESTED)
        scales = add(multiply(tl.load(code + scales.to(tl.int32)), step, FLUSH), tl.load(offset), PTX > 0)
    if EXPONENTS:
        scales = power_of_two(scales.to(tl.int32))
    scales = tl.broadcast_to(scales.to(tl.float32)[:, None], (BLOCKS, BLOCK_BYTES))

    table = tl.load(codebook + tl.arange(0, 16))
    nibbles = pairs.reshape(TILE)
    high = tl.gather(table, nibbles >> 4, 0).reshape(BLOCKS, BLOCK_BYTES)
    low = tl.gather(table, nibbles & 15, 0).reshape(BLOCKS, BLOCK_BYTES)
    first = multiply(low if LOW_FIRST else high, scales, FLUSH)
    second = multiply(high if LOW_FIRST else low, scales, FLUSH)

    dtype: tl.constexpr = out.dtype.element_ty
    if WORDS:
        full = left
        if ODD:
            full = tl.minimum(numel // 2 - first_byte, TILE).to(tl.int32)
            tl.store(out + 2 * first_byte + 2 * byte, first.to(dtype), mask=(byte >= full) & (byte < left))
        words = _pack(first, second, dtype == tl.bfloat16)
        tl.store(out.to(tl.pointer_type(tl.int32)) + first_byte + byte, words, mask=byte < full)
    else:
        values = tl.join(first, second).reshape(BLOCKS, 2 * BLOCK_BYTES).to(dtype)
        element = block[:, None] * (2 * BLOCK_BYTES) + tl.arange(0, 2 * BLOCK_BYTES)[None, :]
        left = tl.minimum(numel - 2 * first_byte, 2 * TILE).to(tl.int32)
        tl.store(out + 2 * first_byte + element, values, mask=element < left)


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    nested: NestedScale | None,
    format: Format,
    block_size: int,
    out: torch.Tensor,
    plan: DequantizePlan | None = None,
) -> None:
    """Write the numbers of a weight into `out`: fp16, bf16 or fp32, the shape of the dense weight, contiguous.

    packed, scale: as formats/spec.py describes them, or scale uint8 [blocks] with `nested`. All on the current device.
    """
    numel = out.numel()
    if numel == 0:
        return
    code, absmax, offset, nested_size = nested or (scale, scale, scale, 0)  # without nesting the three are not read
    words = out.itemsize == 2 and out.data_ptr() % 4 == 0
    fetch = packed.data_ptr() % 16 == 0  # what the bulk prefetch asks of an address

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        tile = plan or make_plan(numel, block_size, nested_size or None, properties)
        constants = {
            "BLOCK_BYTES": block_size // 2, "BLOCKS": tile.blocks, "NESTED": nested_size, "LOW_FIRST": format.low_first,
            "EXPONENTS": format.has_exponents, "FLUSH": properties.ptx > 0 and format.flushes,
            "WORDS": words and properties.ptx >= PACKING, "ODD": numel % 2 == 1, "AHEAD": tile.ahead if fetch else 0,
            "CHUNK": tile.chunk, "PTX": properties.ptx,
        }  # fmt: skip
        grid = triton.cdiv(numel, block_size * tile.blocks)
        return grid, constants | {"num_warps": tile.warps, "enable_fp_fusion": False}

    codebook = codebook_tensor(format, out.device)
    arguments = (
        packed.view(torch.uint8) if format.words else packed,
        scale,
        code,
        absmax,
        offset,
        codebook,
        out,
        numel,
        (numel + 1) // 2,
    )
    key = (numel, out.dtype, scale.dtype, block_size, nested_size, format, words, fetch, plan)
    launch(dequantize_kernel, out.get_device(), arguments, key, configure)
