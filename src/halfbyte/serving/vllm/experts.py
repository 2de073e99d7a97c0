"""vLLM's mixture-of-experts blocks with 4-bit experts: two stacks, and `halfbyte.moe` in place of vLLM's kernels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from halfbyte.experts import moe
from halfbyte.formats.shards import concatenated, stacked
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.serving.arrivals import Arrivals, Span, Weight, cut, keys_of, parameter_of
from halfbyte.serving.invariant import invariant_moe
from halfbyte.serving.vllm.dummy import dummy_weight, wants_dummies
from halfbyte.serving.vllm.parameters import Held, count, expect, forget
from halfbyte.serving.vllm.scheme import Scheme

GATE, DOWN, UP = "w1", "w2", "w3"  # vLLM's names of an expert's weights
STEMS = {"w13": (GATE, UP), "w2": (DOWN,)}  # its parameters, and what they hold
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}  # vLLM's name to that of `moe`


def is_experts(layer: nn.Module) -> bool:
    return isinstance(layer, RoutedExperts)


def activation_of(layer: Any) -> str:
    """vLLM's name of it; an enum in some releases."""
    return str(getattr(layer.activation, "value", layer.activation))


class StackedExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """What all methods for experts have in common: what is refused, and how two stacks are multiplied with.

    prefix: the block's name in the model, for errors. activations: vLLM's names that are served, and those of `moe`.
    """

    activations: ClassVar[Mapping[str, str]]
    takes_biases: ClassVar[bool] = False

    def __init__(self, scheme: Scheme, layer: Any, prefix: str) -> None:
        super().__init__(layer.moe_config)
        self.scheme, self.prefix = scheme, prefix
        self.held: dict[str, Held] = {}
        activation = activation_of(layer)
        if activation not in self.activations:
            raise self._refusal(f"activation {activation!r}; {', '.join(self.activations)} are served")
        if self.moe.has_bias and not self.takes_biases:
            raise self._refusal("experts with biases")
        if layer.apply_router_weight_on_input:
            raise self._refusal("router weights that are applied to the input")
        if any(getattr(layer, name, None) is not None for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")):
            raise self._refusal("a clamped activation")
        self._check_lora(get_current_vllm_config().lora_config)
        if scheme.batch_invariant and not get_current_vllm_config().model_config.enforce_eager:
            raise ValueError(
                f"{prefix} has experts, which halfbyte computes one after the other with VLLM_BATCH_INVARIANT, and no "
                "CUDA graph can capture that: pass enforce_eager=True (--enforce-eager)"
            )
        self.activation = self.activations[activation]

    def _refusal(self, what: str) -> ValueError:
        return ValueError(
            f"{self.prefix} asks for {what}; halfbyte's experts do not do that: leave it to vLLM's own kernels, with "
            "dense experts (modules_to_not_convert) or another checkpoint"
        )

    def _check_lora(self, lora: Any) -> None:
        """vLLM puts its layers for adapters around all that it may, and around these experts it fails to."""
        if lora is not None and getattr(lora, "target_modules", None) is None:
            raise ValueError(
                f"{self.prefix} has experts in 4 bits, which take no LoRA adapters: name the layers that adapters are "
                "for, such as lora_target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj'] (--lora-target-modules)"
            )

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of vLLM's multiplies."""

    def are_loaded(self, layer: Any, dtype: torch.dtype) -> None:
        """Both stacks are there."""
        gate_up, down = (self.held[stem].get(layer) for stem in STEMS)
        if self.scheme.ahead is not None and isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight):
            k, biases = int(self.moe.experts_per_token), self.biases(layer)[0] is not None
            self.scheme.ahead.experts(dtype, gate_up, down, self.activation, k, biases)

    def biases(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """Of gate and up [E, 2I], and of down [E, H]."""
        return None, None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """Experts of other processes get no local number, and `moe` skips them."""
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        gate_up, down = (self.held[stem].get(layer) for stem in STEMS)
        assert isinstance(gate_up, QuantizedWeight)  # `put` got such
        assert isinstance(down, QuantizedWeight)
        multiply = invariant_moe if self.scheme.batch_invariant else moe
        return multiply(x, ids, topk_weights, gate_up, down, self.activation, *self.biases(layer))


class HalfbyteExpertsMethod(StackedExpertsMethod):
    """The experts of one block, which come one by one: dense or in 4 bits."""

    activations = ACTIVATIONS

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        self.experts, self.hidden, self.inner = num_experts, hidden_size, intermediate_size_per_partition
        self.inner_on_disk = int(self.moe.intermediate_size)
        parallel = self.moe.moe_parallel_config
        self.rank, self.processes = int(parallel.tp_rank), int(parallel.tp_size)
        self.local = layer.expert_map_manager.map_global_to_local
        self.dtype, self.dummies = params_dtype, wants_dummies()
        settings = self.scheme.settings
        if settings is not None:  # nested, each projection would have an offset of its own, and a stack has one
            settings = {**settings, "nested": False}
        self.arrivals = Arrivals(torch.get_default_device(), params_dtype, settings, self.scheme.layouts)
        for stem, shards in STEMS.items():
            for key, dtype in self.scheme.expected(params_dtype).items():
                self._expect(layer, stem, key, num_experts * len(shards), dtype)

    def _expect(self, layer: nn.Module, stem: str, key: str, number: int, dtype: torch.dtype) -> None:
        def load(
            param: Tensor,
            loaded_weight: Tensor,
            weight_name: str = "",
            shard_id: str = "",
            expert_id: int = 0,
            return_success: bool = False,
        ) -> bool | None:
            expert = self.local(expert_id)
            if expert < 0:  # another process has it
                return False if return_success else None
            if count(param):
                slot = (expert, shard_id)
                k = self.inner_on_disk if shard_id == DOWN else self.hidden
                self.arrivals.add((slot,), key, loaded_weight, k, lambda whole: {slot: self._cut(shard_id, whole)})
            return True if return_success else None

        expect(layer, f"{stem}_{parameter_of(key)}", number, dtype, load)

    def _cut(self, shard: str, whole: Weight) -> Weight:
        inner = Span(self.inner_on_disk, self.inner, self.rank, self.processes).range
        hidden = (0, self.hidden)
        try:
            return cut(whole, *((hidden, inner) if shard == DOWN else (inner, hidden)))
        except ValueError as error:
            raise ValueError(
                f"{self.prefix} cannot be cut for {self.processes} processes: {error}; take fewer of them, or "
                "enable_expert_parallel, which cuts no expert"
            ) from error

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        gate_up = [concatenated(self._take(expert, (GATE, UP))) for expert in range(self.experts)]
        down = [self._take(expert, (DOWN,))[0] for expert in range(self.experts)]
        for stem in STEMS:
            forget(layer, [f"{stem}_{parameter_of(key)}" for key in keys_of(self.scheme.layouts)])
        self.held = {
            stem: Held.put(layer, f"{stem}_weight", stacked(weights))
            for stem, weights in (("w13", gate_up), ("w2", down))
        }
        self.are_loaded(layer, self.dtype)

    def _take(self, expert: int, shards: tuple[str, ...]) -> list[QuantizedWeight]:
        slots: list[Hashable] = [(expert, shard) for shard in shards]
        if self.dummies:
            shape = (self.hidden, self.inner) if shards == (DOWN,) else (self.inner, self.hidden)
            return [dummy_weight(shape, self.scheme, self.arrivals) for _ in shards]
        weights = self.arrivals.take(slots, self.prefix)
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        if len(quantized) != len(weights):
            raise ValueError(
                f"{self.prefix}: expert {expert} is dense and others are in 4 bits; a stack has one format"
            )
        return quantized
