"""`halfbyte serve` over transformers: its own server with continuous batching, over an accelerated model.

On a GPU the model brings attention over pages to the server's manager, and with it captured steps (models/paged.py).
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import torch

from halfbyte.models.accelerate import accelerate
from halfbyte.models.serving_ahead import begin_serving
from halfbyte.serving.choice import PATIENCE, Model
from halfbyte.serving.claims import MXFP4_METHODS
from halfbyte.serving.requests import PATHS, problem

# The most rows of a step whose kernels are compiled while the server starts. Larger steps take the same kernels.
MOST_ROWS = 8192
# Of a CPU's memory, which other programs need too, transformers would take nine tenths for its cache.
CPU_MEMORY = 0.2


def run(model: Model, name: str, host: str, port: int, device: str, dtype: str, format: str | None) -> None:
    """Serve until a signal comes; SIGTERM ends it as Ctrl-C does, once open requests are answered.

    Raises ImportError where transformers has no such server.
    """
    try:
        import uvicorn
        from transformers.cli.serve import Serve
        from transformers.cli.serving import model_manager, server
    except ImportError as error:
        raise ImportError(
            f"this transformers has no server that halfbyte knows ({error}): pip install -U 'transformers[serving]'"
        ) from error
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    memory = {"cb_max_memory_percent": CPU_MEMORY} if on_cpu else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn puts its own in place and raises the signal again
    manager = _manager(model_manager.ModelManager, model, name, format)
    bounded = partial(uvicorn.Config, timeout_graceful_shutdown=PATIENCE)
    with (
        _in_place(model_manager, "ModelManager", manager),
        _in_place(server, "build_server", partial(_build_server, server.build_server)),
        _in_place(uvicorn, "Config", bounded),
    ):
        Serve(
            force_model=name, continuous_batching=True, host=host, port=port, device=device, dtype=dtype,
            log_level="warning", **memory,
        )  # fmt: skip


@contextmanager
def _in_place(module: Any, name: str, ours: Any) -> Iterator[None]:
    """transformers' command has no hooks; it looks these names up when it starts."""
    theirs = getattr(module, name)
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, theirs)


def _build_server(theirs: Callable[..., Any], *arguments: Any, generation_state: Any, **options: Any) -> Any:
    """transformers' application, which answers wrong requests by itself, and whose end ends the thread that generates:
    left alone, that thread outlives the server and keeps the process."""
    from fastapi.responses import JSONResponse

    app = theirs(*arguments, generation_state=generation_state, **options)
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def ended(of: Any) -> AsyncIterator[Any]:
        async with lifespan(of) as state:
            yield state
        generation_state.shutdown()

    app.router.lifespan_context = ended

    @app.middleware("http")  # type: ignore[untyped-decorator]
    async def check(request: Any, call_next: Any) -> Any:
        if request.method == "POST" and request.url.path in PATHS:
            message = problem(request.url.path, await request.body())
            if message is not None:
                error = {"message": message, "type": "invalid_request_error", "code": 400}
                return JSONResponse({"error": error}, status_code=400)
        return await call_next(request)

    return app


def _manager(theirs: type[Any], served: Model, name: str, format: str | None) -> type[Any]:
    """transformers' ModelManager with a single model, halfbyte's, whatever a request's `model` looks like on disk."""
    place = f"{served.path}@main"
    method = (served.quantization or {}).get("quant_method")

    class AcceleratedModel(theirs):  # type: ignore[misc]
        @staticmethod
        def get_gen_models(cache_dir: str | None = None) -> list[dict[str, Any]]:
            return [{"id": name, "object": "model", "owned_by": "halfbyte", "created": int(time.time())}]

        def _load_processor(self, model_id_and_revision: str, *arguments: Any, **options: Any) -> Any:
            return super()._load_processor(place, *arguments, **options)

        def _load_model(self, model_id_and_revision: str, *arguments: Any, **options: Any) -> Any:
            if format is not None or method in ("bitsandbytes", *MXFP4_METHODS):
                model = self._load_in_4bit()
            else:
                model = super()._load_model(place, *arguments, **options)
            print(accelerate(model), file=sys.stderr, flush=True)
            begin_serving(model, MOST_ROWS)
            return model

        def _load_in_4bit(self) -> Any:
            """With halfbyte's layers: bitsandbytes' or gpt-oss' weights, or dense ones, which are rounded."""
            from transformers import AutoModelForCausalLM

            from halfbyte.models.quantizer import HalfbyteConfig, config_from_bitsandbytes, config_from_gpt_oss

            options: dict[str, Any] = {"dtype": self.dtype, "device_map": self.device}
            if self.attn_implementation is not None:
                options["attn_implementation"] = self.attn_implementation
            if format is None:
                read = config_from_gpt_oss if method in MXFP4_METHODS else config_from_bitsandbytes
                options["config"] = read(served.path)
            else:
                options["quantization_config"] = HalfbyteConfig(format)
            return AutoModelForCausalLM.from_pretrained(served.path, **options)

    return AcceleratedModel
