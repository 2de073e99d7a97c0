"""RMS norms: torch's one kernel forward and two backward while a model is trained, in the place of eight and a dozen,
and on a CPU one of ours for a few rows.

At the sizes of fine-tuning Python and the launches, not the GPU, are what a step waits for, and a fifth of the launches
are of norms. Taken are the modules whose forward is, instruction for instruction, that of transformers' LlamaRMSNorm,
which most models share. torch's kernel multiplies by the weight before it rounds, once instead of twice; where nothing
is trained a norm rounds as it did. So does ours on a CPU, where a token of a small model waits for six operations of
each norm. On GPUs captured steps have kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte import transforms
from halfbyte.kernels.common.slow import has_numba
from halfbyte.models.patch import has_forward_of_class, patch, unpatch

ON_CPU = False  # where torch has no such kernel; tests set it


def _fused() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """torch's kernel, which F.rms_norm calls; but that is computed in fp32 under autocast. Before torch 2.9 there was
    another one of the name, for Apple's GPUs."""
    found = getattr(torch.ops.aten, "_fused_rms_norm", None)
    if found is None or len(found.default._schema.returns) != 2:
        return None
    return torch._fused_rms_norm


_rms_norm = _fused()


def supports(module: nn.Module) -> bool:
    forward = type(module).forward
    return (
        _rms_norm is not None
        and type(module).__name__.endswith("RMSNorm")
        and type(module).__module__.startswith("transformers.models.")
        and isinstance(getattr(module, "variance_epsilon", None), float)
        and _instructions(forward) == _of_llama()
    )


def apply(module: nn.Module) -> None:
    if has_forward_of_class(module):
        patch(forward, module)


def undo(module: nn.Module) -> None:
    unpatch(forward, module)


def forward(module: Any, x: Tensor) -> Tensor:
    """weight * x / sqrt(mean(x²) + epsilon) over the last dimension of x."""
    weight = module.weight
    result: Tensor
    if (
        _rms_norm is not None
        and module.training
        and torch.is_grad_enabled()
        and (x.is_cuda or ON_CPU)
        and x.dtype is weight.dtype
        and not torch.compiler.is_compiling()
    ):
        result = _rms_norm(x, weight.shape, weight, module.variance_epsilon)[0]
    elif kernel := _cpu_kernel(x, weight):
        result = kernel(x, weight, module.variance_epsilon)
    else:
        result = type(module).forward(module, x)
    return result


def _cpu_kernel(x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor, float], Tensor] | None:
    """Ours on a CPU, of a few rows, where nothing but numbers is asked for."""
    if not x.is_cpu or type(x) is not Tensor or transforms.is_active() or transforms.is_tracing():
        return None
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return None
    if not has_numba():
        return None
    from halfbyte.kernels.pointwise import cpu

    return cpu.rms_norm if cpu.supports(x, weight) else None


@cache
def _of_llama() -> Any:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return _instructions(LlamaRMSNorm.forward)


def _instructions(forward: Any) -> Any:
    code = getattr(forward, "__code__", None)
    return None if code is None else (code.co_code, code.co_consts, code.co_names, code.co_varnames)
