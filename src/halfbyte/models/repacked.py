"""Whether bitsandbytes computes a layer faster than halfbyte on this very CPU: then `accelerate` leaves it alone.

In eval mode, on a CPU with AVX512-BF16, Linear4bit packs its weight anew at the first call whose x needs no gradient:
32 rows side by side, scales rounded to bf16. From then on it multiplies in bf16, whatever the dtype of x. Ours keeps
the scales, and multiplies x in fp16 and fp32 as it is. Facts say where bitsandbytes does no such thing; elsewhere both
products are measured on one row of x, once a process for each kind of weight, which comes from memory as in a model.
The threads of either wait for the other's, so all weights of a model that both can multiply are left to one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats.nested import NESTED_BLOCK_SIZE, dynamic_code
from halfbyte.formats.spec import codebook_tensor
from halfbyte.formats.weight import NestedScale, QuantizedWeight
from halfbyte.ops import linear

FASTER = (
    "bitsandbytes is faster on this CPU: in eval mode it packs weights anew for AVX512-BF16. To train, call accelerate "
    "again after model.train()"
)
ROWS = 32  # that lie side by side in its format
ROUNDS, LONG = 7, 0.1  # samples of each, and the seconds after which no further round begins
# Bytes of weights that are measured in turn: more than a core finds in its caches. Of small ones fewer, so that nobody
# waits for the measurement.
CACHE, MOST = 1 << 26, 32


@dataclass(frozen=True)
class Facts:
    """What decides for one layer. device: the kind that its weight is on. avx512bf16: whether the CPU has these
    instructions, as bitsandbytes itself asks. training: the module's flag. n, k, format, block_size, nested: of its
    weight. dtype: in which it computes."""

    device: str
    avx512bf16: bool
    training: bool
    n: int
    k: int
    format: str
    block_size: int
    nested: bool
    dtype: torch.dtype

    @property
    def may_be_faster(self) -> bool:
        """False where bitsandbytes does not repack, or fails to: N must be a multiple of 32 and K of the block."""
        repacks = self.device == "cpu" and self.avx512bf16 and not self.training
        return repacks and self.n % ROWS == 0 and self.k % self.block_size == 0


def is_faster(facts: Facts) -> bool:
    """True where bitsandbytes multiplies one row of x faster than halfbyte, with as many threads as torch has now."""
    if not facts.may_be_faster:
        return False
    theirs, ours = _measured(facts, torch.get_num_threads())
    return theirs < ours


def is_faster_in_all(every: Iterable[Facts]) -> bool:
    """The same of one row of x for each of several weights together."""
    times = [_measured(facts, torch.get_num_threads()) for facts in every]
    return sum(theirs for theirs, _ in times) < sum(ours for _, ours in times)


@cache
def _measured(facts: Facts, threads: int) -> tuple[float, float]:
    """Seconds for one row of x, of bitsandbytes and of halfbyte; the time depends on no number in the weight."""
    copies = max(1, min(MOST, CACHE // (facts.n * facts.k // 2)))
    weights = [_weight(facts) for _ in range(copies)]
    x = torch.ones((1, facts.k), dtype=facts.dtype, device="cpu")
    with torch.no_grad():
        try:
            products = [_product_of_bitsandbytes(q, x) for q in weights]
            products[0]()
        except (AttributeError, RuntimeError, TypeError):  # another version, without this product
            return float("inf"), 0.0
        theirs, ours = least(
            lambda: [product() for product in products], lambda: [linear(x, weight) for weight in weights]
        )
    return theirs / copies, ours / copies


def least(*functions: Callable[[], Any]) -> list[float]:
    """The least seconds of a call of each, in turns so that the machine's load is the same for all."""
    least = [float("inf")] * len(functions)
    for function in functions:
        function()  # compiles, or reads what was compiled before
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            least[i] = min(least[i], time.perf_counter() - start)
        if time.perf_counter() - begin > LONG:
            break
    return least


def _weight(facts: Facts) -> QuantizedWeight:
    """Any weight of this kind, in memory of its own that was written to."""
    n, k, cpu = facts.n, facts.k, torch.device("cpu")
    packed = torch.full((n * k // 2,), 0x77, dtype=torch.uint8, device=cpu)
    blocks, nested = n * k // facts.block_size, None
    scale = torch.ones(blocks, dtype=torch.float32, device=cpu)
    if facts.nested:
        absmax = torch.ones(-(-blocks // NESTED_BLOCK_SIZE), dtype=torch.float32, device=cpu)
        offset = torch.zeros((), dtype=torch.float32, device=cpu)
        nested = NestedScale(dynamic_code(cpu), absmax, offset)
        scale = torch.full((blocks,), 200, dtype=torch.uint8, device=cpu)
    return QuantizedWeight(facts.format, packed, scale, (n, k), torch.bfloat16, facts.block_size, nested)


def _product_of_bitsandbytes(q: QuantizedWeight, x: Tensor) -> Callable[[], Any]:
    """What its module calls once its weight is repacked. The bytes mean other numbers to it, which costs no time."""
    n, k = q.shape
    packed, code = q.packed.view(n, k // 2), codebook_tensor(q.spec, q.device) + 0.0
    absmax = torch.ones((k // q.block_size, n), dtype=torch.bfloat16, device=q.device)
    product = torch.ops.bitsandbytes.gemv_4bit.default
    return lambda: product(x, packed, (n, k), absmax, code, q.block_size)
