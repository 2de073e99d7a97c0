"""What halfbyte does inside torch.func's transforms (vmap, grad, vjp, jvp, jacrev, ...), forward-mode AD and torch.jit.

`linear` takes part in all transforms and in forward-mode AD, through autograd.py; `dequantize` gives a constant there.
Nothing else has a derivative or a batching rule, and torch.jit.trace cannot record any of it: both are said at once,
where a kernel would find a tensor without memory.

Inside torch.compile, vmap works; torch itself refuses torch.func's gradients of custom operators there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Every call of `linear` asks these, and finding them takes longer than asking.
_len_dispatch_stack = torch._C._len_torch_dispatch_stack
_peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
_get_tracing_state = torch._C._get_tracing_state


def is_tracing() -> bool:
    """True where a call is to become an operator: under torch.compile, torch.export and any dispatch mode.

    Hot paths of models ask torch.compiler.is_compiling() alone, which is false under a mode.
    """
    return torch.compiler.is_compiling() or _len_dispatch_stack() > 0


def is_active() -> bool:
    """True inside a transform of torch.func or a level of forward-mode AD."""
    return _peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def outside() -> AbstractContextManager[object]:
    """Within, no transform is active: for work on plain tensors, whose results are constants to all of them."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def is_scripting() -> bool:
    """True under torch.jit.trace."""
    return _get_tracing_state() is not None


def refuse_script(function: str) -> None:
    """Raise RuntimeError under torch.jit.trace."""
    if is_scripting():
        raise RuntimeError(
            f"halfbyte.{function} cannot be recorded by torch.jit.trace; use torch.compile or torch.export instead"
        )


def refuse(function: str, what: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError where one of the tensors is one that a transform of torch.func is at work on."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if any(isinstance(tensor, Tensor) and wrapped(tensor) for tensor in tensors):
        raise RuntimeError(
            f"{what} of halfbyte.{function} cannot be transformed by torch.func (vmap, grad, jvp, ...): it has neither "
            "derivatives nor a batching rule. Call it outside of the transform; inside, x and bias of halfbyte.linear "
            "can be transformed"
        )
