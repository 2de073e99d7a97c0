"""vLLM's linear layers with 4-bit weights: loaded, cut for this process, merged, multiplied with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.norm import Norm
from halfbyte.ops import dequantize
from halfbyte.serving.ahead import Ahead
from halfbyte.serving.arrivals import Arrivals, Span, Weight, cut, keys_of, parameter_of
from halfbyte.serving.products import merged, normed_product, product
from halfbyte.serving.vllm.dummy import dummy_weight, wants_dummies
from halfbyte.serving.vllm.parameters import Held, count, expect, forget
from halfbyte.serving.vllm.scheme import Scheme

QKV = {"q": 0, "k": 1, "v": 2}


class Whole(Protocol):
    """A decoder layer that computes what stands beside its products (layers.py)."""

    def has_loaded(self, prefix: str, ahead: Ahead | None) -> None:
        """The layer of this name has its weights."""

    def norm(self, number: int) -> Norm:
        """The first one or the second."""


class HalfbyteLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """The weights of one layer. prefix: its name in the model, for errors."""

    def __init__(self, scheme: Scheme, prefix: str) -> None:
        super().__init__()
        self.scheme, self.prefix = scheme, prefix
        self.whole: Whole | None = None
        self.norms = self.passes = False  # whether `apply` norms x first, or leaves it to that one

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        self.k, self.k_on_disk, self.sizes = input_size_per_partition, input_size, list(output_partition_sizes)
        self.rank, self.processes = int(layer.tp_rank), int(layer.tp_size)
        # k and v heads: so many processes keep the same ones.
        self.replicas = int(getattr(layer, "num_kv_head_replicas", 1))
        self.held: tuple[Held, ...] = ()
        self.dtype, self.dummies = params_dtype, wants_dummies()
        self.arrivals = Arrivals(torch.get_default_device(), params_dtype, self.scheme.settings, self.scheme.layouts)
        for key, dtype in self.scheme.expected(params_dtype).items():
            self._expect(layer, key, dtype)

    def _expect(self, layer: nn.Module, key: str, dtype: torch.dtype) -> None:
        def load(param: Tensor, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
            slots = self._slots(loaded_shard_id)
            if count(param):
                self.arrivals.add(slots, key, loaded_weight, self.k_on_disk, lambda whole: self._cut(slots, whole))

        expect(layer, parameter_of(key), len(self.sizes), dtype, load)

    def _slots(self, shard: Any) -> tuple[int, ...]:
        """Which of the layer's weights a tensor is of: one, or those that a checkpoint keeps in one."""
        if shard is None:
            return tuple(range(len(self.sizes)))
        return tuple(shard) if isinstance(shard, tuple) else (QKV.get(shard, shard),)

    def _cut(self, slots: Sequence[int], whole: Weight) -> dict[Hashable, Weight]:
        """What this process keeps of a weight from the checkpoint, by slot."""
        n, start = whole.shape[0], 0
        found: dict[Hashable, Weight] = {}
        totals = [self._rows_on_disk(slot, n if len(slots) == 1 else None) for slot in slots]
        if sum(totals) != n:
            raise ValueError(f"{self.prefix}: the checkpoint's weight has {n} rows; {totals} are expected")
        try:
            columns = Span(self.k_on_disk, self.k, self.rank, self.processes).range
            for slot, total in zip(slots, totals, strict=True):
                first, last = Span(total, self.sizes[slot], self.rank, self.processes).range
                found[slot] = cut(whole, (start + first, start + last), columns)
                start += total
        except ValueError as error:
            raise ValueError(
                f"{self.prefix} cannot be cut for {self.processes} processes: {error}; take fewer of them "
                "(tensor_parallel_size), or pipeline_parallel_size, which cuts no weight"
            ) from error
        return found

    def _rows_on_disk(self, slot: int, given: int | None) -> int:
        """Of a weight in a slot; that of a tensor of its own says so itself."""
        if given is not None:
            return given
        whole = self.sizes[slot] * self.processes
        return whole // self.replicas if slot else whole

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        slots = list(range(len(self.sizes)))
        if self.dummies:
            weights: list[Weight] = [dummy_weight((n, self.k), self.scheme, self.arrivals) for n in self.sizes]
        else:
            weights = self.arrivals.take(slots, self.prefix)
        forget(layer, [parameter_of(key) for key in keys_of(self.scheme.layouts)])
        is_reload, whole = bool(self.held), merged(weights)
        self.held = tuple(
            Held.put(layer, "weight" if place == 0 else f"weight_{place}", weight) for place, weight in enumerate(whole)
        )
        if not is_reload:
            self.scheme.will_be_traced(self.prefix, self.held)
        if self.scheme.ahead is not None:
            self.scheme.ahead.linear(self.dtype, whole, getattr(layer, "bias", None) is not None)
        if self.whole is not None:
            self.whole.has_loaded(self.prefix, self.scheme.ahead)

    def weights(self, layer: nn.Module) -> list[Any]:
        """As they are now, one or several neighbours (products.py)."""
        return [held.get(layer) for held in self.held]

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.passes:
            return x
        if self.norms and self.whole is not None:
            return normed_product(x, self.weights(layer), bias, self.whole.norm(0))
        return product(x, self.weights(layer), bias, self.scheme.batch_invariant)

    def dequantize_weight(self, layer: nn.Module) -> Tensor:
        """The dense weight [N, K], for those in vLLM who ask for it."""
        return torch.cat([dequantize(w) if isinstance(w, QuantizedWeight) else w for w in self.weights(layer)])
