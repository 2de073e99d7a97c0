"""The parts of a model that torch.compile fuses while a decoding step is captured.

Between two weight products lie a dozen elementwise kernels of a microsecond each: norms, rotary embeddings, the gate
of an MLP. Each region is small and the same in every layer, so it compiles once, in seconds; a whole model takes a
minute or more, and anew for every shape. Outside a capture nothing is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from halfbyte.kernels.common.patience import compiling
from halfbyte.models import norms
from halfbyte.models.patch import is_hooked, is_method_of

ROTARY = "apply_rotary_pos_emb"  # the name that transformers' modeling files share
_as_they_are: ContextVar[bool] = ContextVar("_as_they_are", default=False)
MOST_SHAPES = 64  # of one region: batch sizes, head and hidden sizes


@contextmanager
def compiled_regions(model: nn.Module) -> Iterator[None]:
    """Within, the regions of `model` run compiled. A region that does not compile runs as it is."""
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=MOST_SHAPES, suppress_errors=True))
        for module in model.modules():
            if is_region(module):
                stack.callback(put_back, module, vars(module).get("forward"))
                module.forward = MethodType(_when_called(type(module).forward), module)
        for home in {sys.modules[type(module).__module__] for module in model.modules()}:
            if function := home.__dict__.get(ROTARY):
                home.__dict__[ROTARY] = _when_called(function)
                stack.callback(home.__dict__.__setitem__, ROTARY, function)
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within, regions run as they are."""
    token = _as_they_are.set(True)
    try:
        yield
    finally:
        _as_they_are.reset(token)


def _when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which compiles when it is first called: many a region of a model is not, in a step."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if _as_they_are.get():
            return function(*args, **kwargs)
        with compiling():
            return _compiled(function)(*args, **kwargs)

    return run


def put_back(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    del module.forward
    if forward is not None:
        module.forward = forward


def is_region(module: nn.Module) -> bool:
    """True for transformers' norms and MLPs: they know neither their layer nor the cache, so one stands for all."""
    kind = type(module)
    return (
        kind.__module__.startswith("transformers.models.")
        and kind.__name__.endswith(("Norm", "MLP"))
        and ("forward" not in vars(module) or is_method_of(norms.forward, vars(module)["forward"]))
        and not is_hooked(module)
    )


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from halfbyte.models.merge import Merge  # it imports inductor, which supports a second or two

    # Rounds where eager mode rounds, so that a fused step gives what an unfused one gives.
    options: dict[str, Any] = {"emulate_precision_casts": True, "post_grad_custom_post_pass": Merge()}
    if hasattr(torch._inductor.config.triton, "enable_pdl"):
        # Kernels begin under the one ahead. That relies on every kernel of a region, ours too, having waited for the
        # one ahead of it before it lets the next begin.
        options["triton.enable_pdl"] = True
    return torch.compile(function, dynamic=False, options=options)
