"""vLLM's dense heads: few rows of x are multiplied by halfbyte's kernel, where that is for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from halfbyte.kernels.head import launch
from halfbyte.serving.vllm.scheme import Scheme


class HalfbyteHeadMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Weights are vLLM's, as they are. vLLM multiplies outside of its compiled model."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if self.scheme.ahead is not None:
            self.scheme.ahead.head(layer.weight, getattr(layer, "bias", None) is not None)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_compiling() and launch.supports(x, layer.weight, bias):
            return launch.head(x, layer.weight, bias)
        return super().apply(layer, x, bias)  # type: ignore[no-any-return]
