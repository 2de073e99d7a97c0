"""Bytes and flops of a step, class by class, from shapes.

`bytes` is what the kernels of a class must read and write the way they go about it; `least` what any way must. They
differ where a 4-bit weight is made dense before it is multiplied: that product reads the dense weight, and the bytes of
dequantizing are on nobody's list of what must be. Activations between kernels mostly stay in a cache, so for the small
classes both are upper bounds of what reaches memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.roofline.names import ATTENTION, COPIES, DEQUANTIZE, ELEMENTWISE, NORMS, SAMPLING, Label
from halfbyte.roofline.roles import EXPERTS, SHARED, Call


@dataclass(frozen=True)
class Amount:
    """bytes: moved the way it is done. flops: of the arithmetic, a multiply-add being two. least: bytes of any way."""

    bytes: int = 0
    flops: int = 0
    least: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.bytes + other.bytes, self.flops + other.flops, self.least + other.least)


@dataclass(frozen=True)
class Shape:
    """What attention works on. batch, tokens: of the step. cached: tokens that a query sees in each layer, its own
    included. heads, kv_heads, head: numbers of heads and the size of one. itemsize: bytes of an element."""

    batch: int
    tokens: int
    cached: tuple[int, ...]
    heads: int
    kv_heads: int
    head: int
    itemsize: int = 2

    @classmethod
    def of(cls, model: Any, cache: Any, batch: int, tokens: int, total: int) -> Shape:
        """total: tokens of a text in the cache after the step."""
        heads = model.config.get_text_config().num_attention_heads
        keys = [layer.keys for layer in cache.layers]
        cached = tuple(min(total, key.shape[-2]) for key in keys)
        return cls(batch, tokens, cached, heads, keys[0].shape[1], keys[0].shape[-1], keys[0].element_size())


def work_of(calls: Iterable[Call], shape: Shape, dense: Mapping[str, bool]) -> dict[Label, Amount]:
    """Of one step. dense: role to whether its product multiplies a weight that was made dense before."""
    work: dict[Label, Amount] = {}

    def add(label: Label, moved: int, flops: int, least: int | None = None) -> None:
        work[label] = work.get(label, Amount()) + Amount(moved, flops, moved if least is None else least)

    for call in calls:
        if call.label.group == "products":
            stored = call.weight + call.moved
            made = shape.itemsize * call.k * call.n * call.weights if dense.get(call.label.role) else 0
            add(call.label, made + call.moved if made else stored, 2 * call.rows * call.k * call.n, stored)
            if made:
                add(DEQUANTIZE, call.weight + made, 0, 0)
            _around(add, call, shape.itemsize)
        elif call.label == NORMS:
            add(NORMS, call.moved + call.weight, 4 * call.numel)
        elif call.label == COPIES:  # a row of an embedding, read and written
            add(COPIES, 2 * shape.itemsize * call.numel, 0)
    _attention(add, shape)
    return work


def _around(add: Any, call: Call, size: int) -> None:
    """What the class of a product implies: the gate before `down`, the residual sums, and a sample of the logits."""
    inside, role = call.rows * call.k, call.label.role.removeprefix(SHARED)
    if role == "down":  # silu(gate) * up
        add(ELEMENTWISE, 3 * size * inside, 5 * inside)
    if role in ("o", "down", EXPERTS):  # x + branch
        add(ELEMENTWISE, 3 * size * call.numel, call.numel)
    if call.label.role == "lm_head":
        add(SAMPLING, size * call.numel, call.numel)


def _attention(add: Any, shape: Shape) -> None:
    rows, size = shape.batch * shape.tokens, shape.itemsize
    for cached in shape.cached:
        keys = shape.batch * shape.kv_heads * shape.head * cached
        # Queries of a prefill see half of it on average.
        seen = cached - (shape.tokens - 1) / 2 if cached >= shape.tokens else cached
        queries = rows * shape.heads * shape.head
        add(ATTENTION, size * (2 * keys + 2 * queries), round(4 * queries * seen))
        new = rows * shape.kv_heads * shape.head
        add(ELEMENTWISE, 2 * size * (queries + new), 3 * (queries + new))  # rotary embedding
        add(COPIES, 4 * size * new, 0)  # new keys and values into the cache
