"""Quantize in plain torch, on any device: the definition, the fallback where there is no kernel, and what tests use.

A block's scale is its largest magnitude over the format's, a weight's nibble that of the codebook value nearest to
weight / scale. weight fp16, bf16 or fp32 [...] -> packed and scale as formats/spec.py describes them.
Nested scales: the same idea again, on absmax - offset in blocks of 256, with the 256 values of the dynamic code.

What "nearest" does on ties, zeros and NaN is bitsandbytes' choice, and its CPU and CUDA code choose differently. The
functions take `like`, "cpu" or "cuda"; where it is None, they follow the weight's own device. Source:
formats/ and the behaviour of bitsandbytes 0.50.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.formats.constants import kept
from halfbyte.formats.nested import NESTED_BLOCK_SIZE, dynamic_code
from halfbyte.formats.spec import Format, exponents_tensor, midpoints_tensor

Like = Literal["cpu", "cuda"]

# Below this, bitsandbytes' CPU code divides by this instead.
SMALLEST_DIVISOR = 1e-38
# bitsandbytes' CPU code finds an 8-bit code in a table of this many equal steps from -1 to 1.
DYNAMIC_STEPS = 65536
INFINITY = 0x7F800000  # the bits of fp32; above are those of NaN


def quantize(
    weight: Tensor, format: Format, block_size: int, packed: Tensor, scale: Tensor, *, like: Like | None = None
) -> None:
    """Quantize a contiguous fp16, bf16 or fp32 weight into `packed` and `scale`, of the format's shapes and dtypes."""
    if weight.numel() == 0:
        return
    flat = weight.reshape(-1).float()
    if format.integers:
        nibbles, scales = _quantize_integers(flat, format, block_size, scale.dtype)
    elif format.has_exponents:
        nibbles, scales = _quantize_exponents(flat, format, block_size)
    else:
        by_rule = _quantize_like_cuda if _rule(weight, like) == "cuda" else _quantize_like_cpu
        nibbles, scales = by_rule(flat, format, block_size, scale.dtype)
    scale.copy_(scales.view(scale.shape))
    first, second = nibbles[::2], nibbles[1::2]
    packed.view(torch.uint8).view(-1).copy_(second << 4 | first if format.low_first else first << 4 | second)


def _rule(tensor: Tensor, like: Like | None) -> Like:
    return like or ("cuda" if tensor.device.type == "cuda" else "cpu")


def _quantize_like_cpu(flat: Tensor, format: Format, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Nibbles (an even number of them) and scales, rounded to `dtype`.

    Full blocks are multiplied by a reciprocal; a partial last block is divided, and its absmax is never below 1e-38.
    NaN is above every midpoint, and a NaN makes its whole block NaN. The odd nibble at the end is that of zero.
    """
    full = flat.numel() // block_size * block_size
    blocks = flat[:full].view(-1, block_size)
    absmax = _rounded(blocks.abs().amax(1), format, dtype)
    scaled = (blocks * (1.0 / absmax.clamp(min=SMALLEST_DIVISOR)).unsqueeze(1)).view(-1)
    if full < flat.numel():
        last = _rounded(flat[full:].abs().amax().clamp(min=SMALLEST_DIVISOR), format, dtype)
        absmax = torch.cat((absmax, last.unsqueeze(0)))
        scaled = torch.cat((scaled, flat[full:] / last.clamp(min=SMALLEST_DIVISOR)))
    scaled = pad(scaled, (0, scaled.numel() % 2))
    rank = torch.zeros_like(scaled, dtype=torch.long)
    for midpoint in midpoints_tensor(format, flat.device):
        rank += ~(midpoint >= scaled)
    return torch.tensor(format.ascending, dtype=torch.uint8, device=flat.device)[rank], absmax


def _quantize_like_cuda(flat: Tensor, format: Format, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Nibbles (an even number of them) and scales, rounded to `dtype`.

    Every block is multiplied by its reciprocal, so a block of zeros becomes 0 * inf = NaN, which is above no threshold
    and has no sign. The last block is filled up with zeros.
    """
    blocks, absmax = _blocks_like_cuda(flat, block_size)
    absmax = _rounded(absmax, format, dtype)
    scaled = (blocks * (1.0 / absmax).unsqueeze(1)).view(-1)[: flat.numel() + flat.numel() % 2]
    compared = scaled.abs() if format.signed_magnitude else scaled
    rank = torch.zeros_like(scaled, dtype=torch.long)
    for threshold in torch.tensor(format.thresholds, dtype=torch.float32, device=flat.device):
        rank += compared > threshold
    nibbles = torch.tensor(format.compared, dtype=torch.uint8, device=flat.device)[rank]
    return nibbles | 8 * (scaled < 0).to(torch.uint8) if format.signed_magnitude else nibbles, absmax


def _rounded(largest: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """The scales of blocks with such largest magnitudes, fp32 numbers that `dtype` has."""
    # Divided by a tensor: torch turns a division by a Python number into a product on CUDA.
    return (largest / torch.full_like(largest, format.largest)).to(dtype).float()


def _quantize_integers(flat: Tensor, format: Format, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Nibbles and scales, rounded to `dtype`.

    NaN becomes integer 0: the scale of its block is NaN, so nothing is lost.
    """
    blocks = flat.view(-1, block_size)
    scale = _rounded(blocks.abs().amax(1), format, dtype)
    integers = torch.round(blocks / scale.unsqueeze(1)).nan_to_num(0.0).clamp(-format.largest, format.largest)
    return (integers.to(torch.int32) - int(format.codebook[0])).to(torch.uint8).view(-1), scale


def _quantize_exponents(flat: Tensor, format: Format, block_size: int) -> tuple[Tensor, Tensor]:
    """Nibbles and scales, uint8.

    The exponent of the largest magnitude is read from its bits, where infinity has 128 and subnormal numbers -127. NaN
    lies above them all, and becomes nibble 0: the scale of its block is NaN.
    """
    blocks = flat.view(-1, block_size)
    largest = blocks.abs().view(torch.int32).amax(1)
    exponent = torch.where(largest > INFINITY, 255, ((largest >> 23) - format.largest_exponent).clamp(min=0))
    scaled = (blocks / exponents_tensor(flat.device)[exponent.long()].unsqueeze(1)).view(-1)
    rank = torch.zeros_like(scaled, dtype=torch.uint8)
    for threshold in format.thresholds:
        rank += scaled.abs() > threshold
    compared = torch.tensor(format.compared, dtype=torch.uint8, device=flat.device)
    nibbles = compared[rank.long()] | 8 * (scaled.signbit() & ~scaled.isnan()).to(torch.uint8)
    return nibbles, exponent.to(torch.uint8)


def _blocks_like_cuda(flat: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Blocks [B, block_size], the last filled up with zeros, and their absmax [B], which takes no notice of NaN.

    A block of nothing but NaN has the absmax that the search for a maximum starts from, minus the largest float.
    """
    blocks = pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    start = torch.finfo(torch.float32).min
    return blocks, torch.where(blocks.isnan(), start, blocks.abs()).amax(1)


def quantize_scales(absmax: Tensor, offset: Tensor, *, like: Like | None = None) -> tuple[Tensor, Tensor]:
    """Codes uint8 [B] and absmax fp32 [ceil(B / 256)] of the fp32 scales `absmax` [B] less `offset` (one element)."""
    if absmax.numel() == 0:
        return absmax.new_empty(0, dtype=torch.uint8), absmax.new_empty(0)
    blocks, absmax2 = _blocks_like_cuda(absmax.reshape(-1) - offset, NESTED_BLOCK_SIZE)
    if _rule(absmax, like) == "cuda":
        codes = _search_like_cuda(blocks * (1.0 / absmax2).unsqueeze(1), dynamic_code(absmax.device))
    else:
        absmax2 = absmax2.clamp(min=0.0)
        steps = _steps_like_cpu(blocks * (1.0 / absmax2).unsqueeze(1))
        codes = torch.where((absmax2 == 0).unsqueeze(1), 0, dynamic_table(absmax.device)[steps])
    return codes.view(-1)[: absmax.numel()].to(torch.uint8), absmax2


@kept
def dynamic_table(device: torch.device) -> Tensor:
    """The dynamic code nearest to each of 65536 equal steps from -1 to 1, uint8, as in bitsandbytes' CPU code."""
    code = dynamic_code(device)
    midpoints = 0.5 * (code[:-1] + code[1:])
    steps = torch.arange(DYNAMIC_STEPS, dtype=torch.float32, device=device)
    return torch.bucketize(2.0 * steps / (DYNAMIC_STEPS - 1) - 1.0, midpoints).to(torch.uint8)


def _steps_like_cpu(scaled: Tensor) -> Tensor:
    """The step of each value in [-1, 1]; 0 for NaN.

    bitsandbytes' binary rounds once after both the multiplication and the addition; in fp64 the two are exact.
    """
    halves = ((scaled.clamp(-1, 1) + 1.0) * 0.5).double()
    return (halves * (DYNAMIC_STEPS - 1) + 0.5).float().nan_to_num(0.0).long()


def _search_like_cuda(scaled: Tensor, code: Tensor) -> Tensor:
    """The code of each value, by bitsandbytes' search: seven halvings of the 256 codes, then the nearer of two."""
    pivot = torch.full_like(scaled, 127, dtype=torch.long)
    below, above = torch.zeros_like(pivot), torch.full_like(pivot, 255)
    for step in (64, 32, 16, 8, 4, 2, 1):
        up = scaled > code[pivot]
        below, above = torch.where(up, pivot, below), torch.where(up, above, pivot)
        pivot = torch.where(up, pivot + step, pivot - step)
    value = code[pivot]
    to_above = (scaled > value) & (scaled > (code[above] + value) * 0.5)
    to_below = ~(scaled > value) & (scaled < (code[below] + value) * 0.5)
    return torch.where(to_above, above, torch.where(to_below, below, pivot))
