"""`halfbyte serve` over transformers: its own server with continuous batching, over an accelerated model."""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch

from halfbyte.models.accelerate import accelerate
from halfbyte.serving.choice import Model

CPU_MEMORY = 0.2


def run(model: Model, host: str, port: int, device: str, dtype: str, format: str | None) -> None:
    """Serve until a signal comes; SIGTERM ends it as Ctrl-C does, once open requests are answered.

    Raises ImportError where transformers has no such server.
    """
    try:
        from transformers.cli.serve import Serve
        from transformers.cli.serving import model_manager
    except ImportError as error:
        raise ImportError(
            f"this transformers has no server that halfbyte knows ({error}): pip install -U 'transformers[serving]'"
        ) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn puts its own in place and raises the signal again
    theirs = model_manager.ModelManager
    # Of a CPU's memory, which other programs need too, transformers would take nine tenths for its cache.
    memory = {} if torch.cuda.is_available() and device != "cpu" else {"cb_max_memory_percent": CPU_MEMORY}
    model_manager.ModelManager = _manager(theirs, model, format)
    try:
        Serve(
            force_model=str(model.path), continuous_batching=True, host=host, port=port, device=device, dtype=dtype,
            log_level="warning", **memory,
        )  # fmt: skip
    finally:
        model_manager.ModelManager = theirs


def _manager(theirs: Any, served: Model, format: str | None) -> Any:
    """transformers' ModelManager, whose models are halfbyte's."""

    class AcceleratedModels(theirs):  # type: ignore[misc]
        def _load_model(self, model_id_and_revision: str, *arguments: Any, **options: Any) -> Any:
            is_bitsandbytes = (served.quantization or {}).get("quant_method") == "bitsandbytes"
            if format is None and not is_bitsandbytes:
                model = super()._load_model(model_id_and_revision, *arguments, **options)
            else:
                model = self._load_quantized(is_bitsandbytes)
            report = accelerate(model)
            print(report, file=sys.stderr, flush=True)
            return model

        def _load_quantized(self, is_bitsandbytes: bool) -> Any:
            """Of bitsandbytes' weights, which need not be installed, or of dense ones that are rounded."""
            from transformers import AutoModelForCausalLM

            from halfbyte.models.quantizer import HalfbyteConfig, config_from_bitsandbytes

            options: dict[str, Any] = {"dtype": self.dtype, "device_map": self.device}
            if self.attn_implementation is not None:
                options["attn_implementation"] = self.attn_implementation
            if is_bitsandbytes:
                options["config"] = config_from_bitsandbytes(served.path)
            else:
                options["quantization_config"] = HalfbyteConfig(format)
            return AutoModelForCausalLM.from_pretrained(served.path, **options)

    return AcceleratedModels
