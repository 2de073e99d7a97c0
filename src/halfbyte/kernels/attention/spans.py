"""The span of tokens that each text sees, from its mask, on the device.

A cache is as long as its texts may become, and mostly one is filled by a part. What lies before the first and behind
the last token that any new token of a text sees is not read by `attend`, and costs no turn of its loop. One launch
finds the spans, and every layer with the same mask uses them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.launch import launch
from halfbyte.kernels.common.overlap import SINCE, let_the_next_begin, wait_for_the_one_ahead

WIDTH = 256  # of a text's row: the first token, the one behind the last, and counters, which are 0
COUNTERS = WIDTH - 2
BLOCK = 8192  # bytes of masks at once


@triton.jit
def attend_spans_kernel(
    spans, mask, tokens, mask_text, mask_new,
    NEW: tl.constexpr, LOWEST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program i: text i."""
    text = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    if OVERLAPS:
        wait_for_the_one_ahead()
        let_the_next_begin()
    first = tl.full((BLOCK,), 0, tl.int32) + tokens
    end = tl.zeros((BLOCK,), tl.int32)
    for new in range(NEW):
        row = mask + text.to(tl.int64) * mask_text + new * mask_new
        for begin in range(0, tokens, BLOCK):
            token = begin + place
            seen = tl.load(row + token, token < tokens, LOWEST) > LOWEST
            first = tl.where(seen, tl.minimum(first, token), first)
            end = tl.where(seen, tl.maximum(end, token + 1), end)
    last = tl.max(end, axis=0)
    at = tl.arange(0, WIDTH)
    found = tl.where(at == 0, tl.minimum(tl.min(first, axis=0), last), tl.where(at == 1, last, 0))
    tl.store(spans + text * WIDTH + at, found)


def spans_of(mask: Tensor, texts: int) -> Tensor:
    """int32 [texts, WIDTH]: the first token that any row of the text's mask sees, the one behind the last, and zeros.

    mask: as for `attend`, on the current device. A text that sees nothing gets 0 and 0. The zeros are counters:
    launches of `attend` with the same spans must follow each other, as they do on one stream, and leave zeros again.
    """
    spans = torch.empty((texts, WIDTH), dtype=torch.int32, device=mask.device)
    _, _, new, tokens = mask.shape
    strides = 0 if len(mask) == 1 else mask.stride(0), 0 if new == 1 else mask.stride(2)

    def configure(properties: DeviceProperties) -> tuple[int, dict[str, Any]]:
        constants = {"NEW": new, "LOWEST": lowest(mask), "WIDTH": WIDTH, "BLOCK": BLOCK // mask.itemsize}
        return texts, constants | {"OVERLAPS": properties.ptx >= SINCE, "num_warps": 8}

    arguments = (spans, mask.view(torch.uint8) if mask.dtype is torch.bool else mask, tokens, *strides)
    launch(attend_spans_kernel, mask.get_device(), arguments, (mask.dtype, new, texts), configure)
    return spans


def lowest(mask: Tensor) -> float:
    """What stands in a mask for a token that is not seen; -inf is the same."""
    return 0 if mask.dtype is torch.bool else torch.finfo(mask.dtype).min
