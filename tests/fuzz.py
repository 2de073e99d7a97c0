"""Random problems for `quantize`, `dequantize` and `linear`, until the time is up: `make fuzz SECONDS=600 SEED=7`.

A problem is drawn from the seed and its number alone, so each one can be had again: `--only NUMBER`. What is checked:

- dequantize and quantize give bitsandbytes' bits on a GPU, and those of the definition in plain torch elsewhere;
- linear's error against float64 is not above that of dequantize and F.linear, and no single output is far off;
- the same call gives the same bits again, and writes nothing around its result;
- with batch_invariant a row has the bits that it has alone, and among any other rows.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import halfbyte as hb
from halfbyte.formats.bitsandbytes import FORMATS as OF_BITSANDBYTES
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.dequantize import reference
from halfbyte.measure.error import relative_error

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUTS = ("contiguous", "columns of a wider x", "every second row", "transpose", "odd address", "three dimensions")
POISON = 777.0
MOST_FAILURES = 20


@dataclass(frozen=True)
class Problem:
    """W [n, k] in 4 bits and x [m, k]. odd_weight: packed and scales begin at odd multiples of their element's size."""

    n: int
    k: int
    m: int
    format: str
    block_size: int
    nested: bool
    weight_dtype: torch.dtype
    dtype: torch.dtype
    layout: str
    odd_weight: bool
    bias: bool
    invariant: bool


def draw(seed: int, number: int) -> Problem:
    """Sides around multiples of what tiles, blocks and units are, and any others."""
    r = random.Random(f"{seed} {number}")

    def side(most: int) -> int:
        unit = r.choice((1, 1, 8, 16, 32, 64, 64, 256, 256))
        return min(most, max(1, unit * r.randint(1, max(1, most // unit)) + r.choice((0, 0, 0, 0, 1, -1))))

    format = FORMATS[r.choice(("nf4", *FORMATS))]  # most weights are NF4, in blocks of 64
    block_size = r.choice((*format.block_sizes, *[format.block_size] * 3))
    n, k = side(r.choice((40, 600, 4200))), side(r.choice((300, 3000, 9000)))
    if format.along_k:
        k = -(-k // block_size) * block_size
    dtype = r.choice((*DTYPES[:2], *DTYPES))
    return Problem(
        n, k, r.choice((1, 1, 2, 3, 5, 8, 9, 13, 16, 17, 24, 32, 33, 48, 64, 65, 100, 200, 257, 400)),
        format.name, block_size, format.nests and r.random() < 0.5, r.choice((dtype, *DTYPES)), dtype,
        r.choice((LAYOUTS[0], *LAYOUTS)), r.random() < 0.1, r.random() < 0.5, r.random() < 0.4,
    )  # fmt: skip


def check(problem: Problem, device: str, seed: int) -> Iterator[str]:
    """What is wrong, in a sentence each."""
    p = problem
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    dense = (randn(p.n, p.k) * p.k**-0.5).to(p.weight_dtype)
    spec = FORMATS[p.format]
    nested = {"nested": p.nested} if spec.nests else {}
    q = hb.quantize(dense, p.format, **{spec.size_name: p.block_size}, **nested)
    yield from _check_bits(dense, q, p)
    if p.odd_weight:
        q = _moved(q)
    x = _laid_out(randn(p.m, p.k).to(p.dtype), p.layout)
    bias = randn(p.n).to(p.dtype) if p.bias else None
    yield from _check_product(x, q, bias, p.invariant)


def _check_bits(dense: Tensor, q: QuantizedWeight, p: Problem) -> Iterator[str]:
    buffer = torch.full((q.numel + 128,), POISON, dtype=p.dtype, device=dense.device)
    out = hb.dequantize(q, out=buffer[64:-64].view(p.n, p.k))
    if not ((buffer[:64] == POISON).all() and (buffer[-64:] == POISON).all()):
        yield "dequantize wrote beyond its result"
    right = torch.empty_like(out)
    if dense.is_cuda and p.format in OF_BITSANDBYTES:
        from bitsandbytes import functional as theirs

        packed, state = hb.to_bitsandbytes(q)
        state.dtype = p.dtype
        right = theirs.dequantize_4bit(packed, state)
        wanted, wanted_state = theirs.quantize_4bit(dense, None, None, p.block_size, p.nested, p.format)
        if not torch.equal(wanted.view(-1), q.packed.view(-1)):
            yield "quantize gives other nibbles than bitsandbytes"
        if not torch.equal(wanted_state.absmax, q.scale):
            yield "quantize gives other scales than bitsandbytes"
    else:
        reference.dequantize(q.packed, q.scale, q.nested, q.spec, q.block_size, right)
    if not torch.equal(out, right):
        yield f"dequantize differs in {int((out != right).sum())} of {q.numel} numbers"


def _check_product(x: Tensor, q: QuantizedWeight, bias: Tensor | None, invariant: bool) -> Iterator[str]:
    lines = x.reshape(-1, x.shape[-1])
    y = hb.linear(x, q, bias, batch_invariant=invariant)
    if not torch.equal(y, hb.linear(x, q, bias, batch_invariant=invariant)):
        yield "the same call gives other bits"
    exact, weight = hb.dequantize(q, torch.float32).double(), hb.dequantize(q, x.dtype)
    wide = lines.double()
    right, sizes = wide @ exact.T, wide.abs() @ exact.abs().T
    if bias is not None:
        right, sizes = right + bias.double(), sizes + bias.double().abs()
    found = y.reshape(right.shape).double()
    # Two roundings of 16 bits, or fp32 sums whose error grows with their length.
    eps = torch.finfo(x.dtype).eps * (1.01 if x.dtype != torch.float32 else 8 + q.shape[1] ** 0.5)
    if not ((found - right).abs() <= eps * sizes).all():
        yield f"an output is off by {float(((found - right).abs() / sizes).max()):.2e} of its terms"
    theirs = functional.linear(x, weight, bias).reshape(right.shape).double()
    if torch.isfinite(theirs).all():
        ours, most = (relative_error(a, right) for a in (found, theirs))
        # Few outputs make a noisy norm; two sums of the same numbers in two orders differ in some of many roundings.
        if ours > most * (1.002 if right.numel() >= 1 << 14 else 1.5 if right.numel() >= 1000 else 4.0) + 1e-9:
            yield f"the error is {ours:.3e}, that of dequantize and F.linear {most:.3e}"
    if invariant:
        whole = y.reshape(right.shape)
        for count in (1, 2, 5, 9, 40):
            first = (7 * count) % max(1, len(lines) - count + 1)
            some = hb.linear(lines[first : first + count], q, bias, batch_invariant=True)
            if not torch.equal(some, whole[first : first + count]):
                yield f"a row among {min(count, len(lines))} has other bits than among {len(lines)}"


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers elsewhere in memory."""
    m, k = x.shape
    if layout == "columns of a wider x":
        return x.new_full((m, k + 13), POISON).index_copy_(1, torch.arange(5, 5 + k, device=x.device), x)[:, 5 : 5 + k]
    if layout == "every second row":
        return x.repeat_interleave(2, 0)[::2]
    if layout == "transpose":
        return x.T.contiguous().T
    if layout == "odd address":
        return _at_odd_address(x)
    if layout == "three dimensions" and m % 2 == 0:
        return x.view(2, m // 2, k)
    return x


def _at_odd_address(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)


def _moved(q: QuantizedWeight) -> QuantizedWeight:
    packed, scale = _at_odd_address(q.packed), _at_odd_address(q.scale)
    return QuantizedWeight(q.format, packed, scale, q.shape, q.dtype, q.block_size, q.nested)


def run(seed: int, numbers: Iterator[int], device: str, tell: Callable[[str], None], until: float) -> int:
    """Check problems until the time comes; returns how many had something wrong."""
    failures = count = 0
    told = time.monotonic()
    for number in numbers:
        if time.monotonic() > until or failures >= MOST_FAILURES:
            break
        problem = draw(seed, number)
        try:
            wrong = list(check(problem, device, number))
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        count += 1
        if wrong:
            failures += 1
            tell(f"{problem}\n  " + "\n  ".join(wrong) + f"\n  again: --device {device} --seed {seed} --only {number}")
        if time.monotonic() - told > 10:
            told = time.monotonic()
            tell(f"{count} problems, {failures} failures")
    tell(f"{count} problems on {device}, seed {seed}: {failures} failures")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, action="append", help="the number of a problem; can be given again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    numbers = iter(given.only) if given.only else iter(range(sys.maxsize))
    until = time.monotonic() + (86400 if given.only else given.seconds)
    sys.exit(bool(run(given.seed, numbers, given.device, lambda text: print(text, flush=True), until)))


if __name__ == "__main__":
    main()
