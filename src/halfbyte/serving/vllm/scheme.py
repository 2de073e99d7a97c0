"""What all layers of a served model have in common: how its weights come, and how they are multiplied with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.serving.ahead import Ahead
from halfbyte.serving.arrivals import dtype_of, keys_of
from halfbyte.serving.claims import METHOD


@dataclass
class Scheme:
    """layouts: in which a checkpoint keeps 4-bit weights; none of a dense one. settings: how weights of a dense
    checkpoint are rounded, as `quantize` takes it; None of a quantized one. dense_names: of layers that stay dense.
    batch_invariant: whether a row's bits must not depend on other rows. nested: whether scales in the checkpoint are.
    traced: vLLM's `additional_config`, ahead: what compiles kernels ahead, and layers: of the model up to the last one
    in this process, where decoder layers may compute several modules at once; once they are known.
    """

    layouts: tuple[str, ...]
    settings: dict[str, Any] | None
    dense_names: tuple[str, ...]
    batch_invariant: bool
    nested: bool = False
    traced: Any = None
    ahead: Ahead | None = None
    layers: int | None = None

    def expected(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The keys that a checkpoint may have for a weight of a layer of `dtype`, each with its usual dtype."""
        return {key: dtype_of(key, self.layouts, self.nested, dtype) for key in keys_of(self.layouts)}

    def will_be_traced(self, prefix: str, held: object) -> None:
        """Have vLLM's cache of compiled models tell apart what its own key leaves out: of what kind weights are.

        The key has the configuration of the model, and neither the options of a quantization nor what a checkpoint
        holds; a graph has both, as constants.
        """
        if isinstance(self.traced, dict):
            told = f"{self.traced.get(METHOD, '')}{prefix}{held}"
            self.traced[METHOD] = hashlib.sha256(told.encode()).hexdigest()
