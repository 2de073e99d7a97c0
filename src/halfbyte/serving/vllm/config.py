"""vLLM's quantization method "halfbyte": what it takes, and which layer gets which method.

    LLM("org/model-bnb-4bit")                      a bitsandbytes checkpoint is taken without a flag
    LLM("openai/gpt-oss-20b")                      MXFP4: without a flag where vLLM has no kernels for the device
    LLM("org/model", quantization="halfbyte")      dense weights are rounded to NF4 while they load, or as options say:
        hf_overrides={"quantization_config_dict_json": '{"format": "int4", "group_size": 64}'}

Of a quantized checkpoint every weight stays as it is: packed ones are multiplied with as they are, dense ones stay
dense. Only of a dense checkpoint are weights rounded, those of experts with plain scales.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from halfbyte.checkpoints.select import is_linear
from halfbyte.kernels.common.device import HOPPER
from halfbyte.serving.ahead import Ahead
from halfbyte.serving.arrivals import LAYOUTS, WEIGHT, keys_of, parameter_of
from halfbyte.serving.claims import (
    GPT_OSS,
    METHOD,
    claims,
    holds_experts,
    layouts_of,
    settings_of,
    stays_dense,
)
from halfbyte.serving.vllm.experts import HalfbyteExpertsMethod, is_experts
from halfbyte.serving.vllm.gpt_oss import GptOssExpertsMethod, is_gpt_oss
from halfbyte.serving.vllm.head import HalfbyteHeadMethod
from halfbyte.serving.vllm.layers import watch
from halfbyte.serving.vllm.linear import HalfbyteLinearMethod
from halfbyte.serving.vllm.scheme import Scheme


@register_quantization_config(METHOD)
class HalfbyteQuantization(QuantizationConfig):  # type: ignore[misc]
    """layouts: in which a checkpoint keeps its 4-bit weights; none of a dense one, whose weights are rounded as
    `options` say (claims.py). nested: whether the checkpoint says that its scales are."""

    def __init__(
        self, layouts: tuple[str, ...] = (), options: dict[str, Any] | None = None, nested: bool = False
    ) -> None:
        super().__init__()
        settings, dense_names = settings_of(options or {})
        invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.scheme = Scheme(layouts, None if layouts else settings, dense_names, invariant, nested)
        self.experts = not layouts

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HalfbyteQuantization:
        """Of a quantized checkpoint."""
        nested = config.get("bnb_4bit_use_double_quant", config.get("nested"))
        return cls(layouts_of(config), nested=bool(nested))

    @classmethod
    def from_config_dict_json(cls, text: str) -> HalfbyteQuantization:
        """Of a dense checkpoint, with options. vLLM takes them from `hf_overrides`."""
        return cls(options=json.loads(text))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        model_type = getattr(hf_config, "model_type", None)
        return METHOD if claims(hf_quant_cfg, user_quant, model_type, vllm_runs_mxfp4()) else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Find out whether the experts of a quantized checkpoint are in 4 bits, or dense."""
        if self.scheme.layouts:
            self.experts = holds_experts(_names_of(model_name, revision))

    @staticmethod
    def get_cache_scale_mapper() -> WeightsMapper:
        """From a checkpoint's keys to the names of parameters, which have no dots."""
        suffixes = {f".{key}": f".{parameter_of(key)}" for key in keys_of(tuple(LAYOUTS)) if key != WEIGHT}
        return QuantizationConfig.get_cache_scale_mapper() | WeightsMapper(orig_to_new_suffix=suffixes)

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """vLLM's own, from 0.30 on, drops activation orders, which would then be served wrongly, in silence."""
        return WeightsMapper()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        vllm = get_current_vllm_config()
        self.scheme.traced = vllm.additional_config
        if self.scheme.ahead is None:
            self.scheme.ahead = Ahead(vllm.scheduler_config.max_num_batched_tokens, self.scheme.batch_invariant)
            if not self.scheme.batch_invariant:
                _use_own_attention()
            if not self.scheme.batch_invariant and vllm.lora_config is None and vllm.speculative_config is None:
                _, self.scheme.layers = vllm.model_config.get_layers_start_end_indices(vllm.parallel_config)
                watch()
        if isinstance(layer, LinearBase):
            if self.scheme.layouts == (GPT_OSS,):
                return UnquantizedLinearMethod()  # all that is no expert is dense
            return UnquantizedLinearMethod() if self._stays_dense(prefix) else HalfbyteLinearMethod(self.scheme, prefix)
        if is_experts(layer) and self.experts and not stays_dense(prefix, self.scheme.dense_names):
            stacks = GPT_OSS in self.scheme.layouts and is_gpt_oss(layer)
            return (GptOssExpertsMethod if stacks else HalfbyteExpertsMethod)(self.scheme, layer, prefix)
        if isinstance(layer, ParallelLMHead) and not self.scheme.batch_invariant:
            return HalfbyteHeadMethod(self.scheme)
        return None  # embeddings, attention, dense experts: vLLM's own

    def _stays_dense(self, prefix: str) -> bool:
        """Whether a layer of a dense checkpoint is named to stay so, or `halfbyte quantize` would leave it alone."""
        if self.scheme.layouts:
            return False  # the checkpoint says so itself
        last = prefix.rpartition(".")[2]
        members = [prefix.removesuffix(last) + name for name in self.packed_modules_mapping.get(last, [last])]
        dense = [
            stays_dense(name, self.scheme.dense_names) or not is_linear(f"{name}.weight") for name in (prefix, *members)
        ]
        if dense[0] or all(dense[1:]):
            return True
        if any(dense[1:]):
            raise ValueError(
                f"modules_to_not_convert names some of {', '.join(members)}, which vLLM computes as one layer; name "
                "all of them or none"
            )
        return False


def _use_own_attention() -> None:
    """Where it is for the device. Elsewhere what it builds upon need not be there."""
    if current_platform.is_cuda() and current_platform.has_device_capability(HOPPER):
        from halfbyte.serving.vllm import attention

        attention.use()


def vllm_runs_mxfp4() -> bool:
    """Whether vLLM's own method for gpt-oss takes this device: GPUs from its minimum on, CPUs with AMX, and others."""
    if current_platform.is_cpu():
        return bool(torch.cpu._is_amx_tile_supported())
    if current_platform.is_cuda():
        return bool(current_platform.has_device_capability(80))
    return True


def _names_of(model_name: str, revision: str | None) -> Path:
    """A folder with what names a checkpoint's tensors: of one on the hub the index, or the only file where it has none.

    vLLM fetches the weights later, and which of a repository's files those are is its business.
    """
    path = Path(model_name)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        for pattern in ("*.safetensors.index.json", "*.safetensors"):
            path = Path(snapshot_download(model_name, revision=revision, allow_patterns=[pattern]))
            if any(path.glob(pattern)):
                break
    return path
