"""L2 distances and nearest rows straight from 4-bit candidates on a GPU: one pass, and no dense copy of them.

query [P, D], candidates a QuantizedWeight [V, D] -> fp32, as triton.py gives for the dense [V, D] that `dequantize`
makes: codebook[nibble] * scale in fp32, rounded once to the weight's dtype, and (c - q)^2 of that summed in fp32.
Bytes: the 4-bit candidates once (0.516 a weight, nested at 64), the query from cache. Flops: 4 a weight and query.

At that rate instructions count as much as bytes do: an H200 issues 3.5 for every weight that it reads. So a thread takes
parts of 16 bytes, 32 weights, which never straddle two scales; scale and addresses then cost little. The codebook lives
in registers, one entry a lane, and a look-up is a shuffle: it takes a lane's number from the low bits of a register and
ignores the rest, so a nibble need only be shifted there. Rounding to bf16 leaves an fp32 number, in one instruction.
The query is laid out beforehand so that neighbouring threads read neighbouring elements of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.formats import blockwise, grouped
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.arithmetic import add, multiply
from halfbyte.kernels.common.device import DeviceFacts
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.distance import packed_plan as plans
from halfbyte.kernels.distance.keys import EMPTY, key_of, leading, merge

PART = tl.constexpr(32)  # weights that a thread takes at a time: the smallest scale block
PACKING = 80  # the first target with cvt.rn.{bf16x2,f16x2}.f32
FEW = 2  # queries that take the candidates one after the other; for more it pays to make them dense once


@triton.jit
def _four(pointers, PTX: tl.constexpr):
    """Four 32-bit words from each pointer on; there is nothing else in a thread's 16 bytes."""
    if PTX > 0:
        return tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [pointers.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.load(pointers), tl.load(pointers + 1), tl.load(pointers + 2), tl.load(pointers + 3)


@triton.jit
def _lane_entry(codebook, like, PTX: tl.constexpr):
    """The codebook as look-ups want it: the entry of each lane's number or, without PTX, all sixteen."""
    if PTX > 0:
        lane = tl.inline_asm_elementwise(
            "mov.u32 $0, %laneid; // $1", "=r,r", [like], dtype=tl.int32, is_pure=True, pack=1
        )
        return tl.load(codebook + (lane & 15))
    return tl.load(codebook + tl.arange(0, 16))


@triton.jit
def _look_up(table, words, SHIFT: tl.constexpr, PTX: tl.constexpr):
    """The codebook's value of the nibble at bit SHIFT of each word."""
    if PTX > 0:
        # Segments of 16 lanes: of an index, bits 0 to 3 count.
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x101f, 0xffffffff;", "=f,f,r", [table, words >> SHIFT],
            dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    nibbles = ((words >> SHIFT) & 15).reshape(words.shape[0] * words.shape[1])
    return tl.gather(table, nibbles, 0).reshape(words.shape)


@triton.jit
def _rounded(first, second, dtype: tl.constexpr, PACKS: tl.constexpr):
    """Two fp32 numbers, each rounded to `dtype`, in fp32."""
    if dtype == tl.float32:
        return first, second
    elif not PACKS:
        return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    elif dtype == tl.bfloat16:
        # The high half of a pair, over a zero, is an fp32 number already.
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, 0f00000000; cvt.rn.bf16x2.f32 $1, $3, 0f00000000;", "=r,=r,f,f", [first, second],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
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
