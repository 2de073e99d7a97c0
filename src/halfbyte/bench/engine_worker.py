"""What a worker of vLLM tells about its model. vLLM adds this class to that of its workers (`worker_extension_cls`).

A method that is called by its name, and gives numbers and strings, works whether the worker is in the process that asks
or in another one. A function would have to be pickled, which vLLM refuses unless it is told to trust everybody.
"""

from __future__ import annotations

from typing import Any

import torch


class EngineFacts:
    """A part of a worker."""

    def engine_facts(self) -> dict[str, Any]:
        """methods: the class that multiplies, with its kernel's where it has one, and the last names of its layers.
        attention: vLLM's backends. weight_gb: of parameters, without what hangs on them, as bitsandbytes' scales do.
        allocated_gb: of all tensors on the GPU, the cache of keys and values among them."""
        model: Any = self.get_model()  # type: ignore[attr-defined]  # the worker's
        methods: dict[str, set[str]] = {}
        attention: set[str] = set()
        for name, module in model.named_modules():
            if (method := getattr(module, "quant_method", None)) is not None:
                methods.setdefault(_name_of(method, module), set()).add(name.rpartition(".")[2])
            if (backend := getattr(module, "attn_backend", None)) is not None:
                attention.add(getattr(backend, "__name__", str(backend)))
        sizes = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
        facts = {
            "methods": {method: sorted(names) for method, names in methods.items()}, "attention": sorted(attention),
            "weight_gb": round(sum(sizes.values()) / 1e9, 3),
        }  # fmt: skip
        if torch.cuda.is_available():
            facts["allocated_gb"] = round(torch.cuda.memory_allocated() / 1e9, 3)
        return facts


def _name_of(method: Any, module: Any) -> str:
    """compressed-tensors keeps the kernel in the layer's scheme."""
    kernel = getattr(method, "kernel", None) or getattr(getattr(module, "scheme", None), "kernel", None)
    return type(method).__name__ + ("" if kernel is None else f" ({type(kernel).__name__})")
