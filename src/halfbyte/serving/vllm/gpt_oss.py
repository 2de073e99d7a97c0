"""gpt-oss' experts in vLLM: the MXFP4 stacks of its checkpoints, multiplied with as they are.

vLLM's model cuts the stacks itself and hands each of them over as one tensor: rows of gate_up, columns of down, or
whole experts. It cuts between blocks of 32 weights, so the last processes may get less than the others, or nothing.
Their stacks end in zeros, which add nothing: gate and up that are 0 give 0.

Source of what comes, and under which names: `GptOssModel` of vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config

from halfbyte.formats import gpt_oss
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.serving.claims import MXFP4_METHODS
from halfbyte.serving.vllm.dummy import wants_dummies
from halfbyte.serving.vllm.experts import STEMS, StackedExpertsMethod, activation_of
from halfbyte.serving.vllm.parameters import Held
from halfbyte.serving.vllm.scheme import Scheme

ACTIVATIONS = {"swigluoai": "swiglu_oai"}
(SPEC,) = gpt_oss.FORMATS.values()
BLOCK = SPEC.block_size
DUMMY_SCALE = 127 - 6  # of random weights: they are at most 6 / 64


def is_gpt_oss(layer: nn.Module) -> bool:
    """Whether experts compute what gpt-oss' do."""
    return activation_of(layer) in ACTIVATIONS


class GptOssExpertsMethod(StackedExpertsMethod):
    """The experts of one block, whose gate and up rows take turns, and which have biases."""

    activations = ACTIVATIONS
    takes_biases = True

    def __init__(self, scheme: Scheme, layer: Any, prefix: str) -> None:
        super().__init__(scheme, layer, prefix)
        config = get_current_vllm_config().model_config.hf_config
        if config.quantization_config["quant_method"] not in MXFP4_METHODS:
            # vLLM's model looks here which layout its stacks come in, and halfbyte's own checkpoints have another name.
            config.quantization_config = {**config.quantization_config, "quant_method": MXFP4_METHODS[0]}

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """The sides of what a process keeps: whole blocks, as vLLM's model cuts them."""
        inner = int(self.moe.intermediate_size)
        if hidden_size % BLOCK or inner % BLOCK:
            raise self._refusal(f"sides of {hidden_size} and {inner}, which are no multiples of {BLOCK}")
        return hidden_size, -(-inner // BLOCK // int(moe_parallel_config.tp_size)) * BLOCK

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        hidden, inner = hidden_size, intermediate_size_per_partition
        self.dtype, self.dummies = params_dtype, wants_dummies()
        self.shapes = {"w13": (num_experts, 2 * inner, hidden), "w2": (num_experts, hidden, inner)}
        for stem, shape in self.shapes.items():
            _expect(layer, f"{stem}_weight", SPEC.packed_shape(shape), torch.uint8)
            _expect(layer, f"{stem}_weight_scale", SPEC.scale_shape(shape, BLOCK), torch.uint8)
            _expect(layer, f"{stem}_bias", shape[:2], params_dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.dummies:
            _randomize(layer)
        for stem, shape in self.shapes.items():
            packed, scale = (getattr(layer, f"{stem}_weight{part}").data for part in ("", "_scale"))
            stack = QuantizedWeight(SPEC.name, packed, scale, shape, self.dtype, BLOCK)
            self.held[stem] = Held.put(layer, f"{stem}_weight", stack)
        self.are_loaded(layer, self.dtype)

    def biases(self, layer: Any) -> tuple[Tensor, Tensor]:
        return layer.w13_bias, layer.w2_bias


def _expect(layer: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Give the layer a parameter of a whole stack."""

    def load(
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        if expert_id is not None:
            raise ValueError(
                f"{weight_name} comes expert by expert; stacks are read, as gpt-oss' checkpoints have them"
            )
        if loaded_weight.shape != param.shape:
            param.data.zero_()  # what a reload makes is not zero
        param.data[tuple(slice(side) for side in loaded_weight.shape)].copy_(loaded_weight)
        return True if return_success else None

    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=torch.get_default_device()), requires_grad=False)
    parameter.weight_loader = load  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)


def _randomize(layer: Any) -> None:
    """Make weights for `--load-format dummy`, the same ones every time. vLLM has filled the biases."""
    for seed, stem in enumerate(STEMS):
        packed, scale = (getattr(layer, f"{stem}_weight{part}").data for part in ("", "_scale"))
        generator = torch.Generator(packed.device).manual_seed(seed)
        packed.random_(0, 256, generator=generator)
        scale.fill_(DUMMY_SCALE)
