"""Rotary embeddings of transformers' models, of 16 bits on a GPU, in one launch forward and one back.

In training Python and the launches are what a step of few tokens waits for, and every seventh launch of a Llama is of
its rotations. The results have transformers' own bits (kernels/attention/rotary.py), so this changes no model, whether
it is accelerated or not. Taken are functions that are, instruction for instruction, those of transformers' Llama.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from halfbyte import transforms
from halfbyte.eager import on
from halfbyte.kernels.common.slow import has_triton

MODELS, NAME, HALF = "transformers.models.", "apply_rotary_pos_emb", "rotate_half"
ON_CPU = False  # where Triton does not compile; tests set it

Pair = tuple[Tensor, Tensor]

_replaced: dict[str, Callable[..., Pair]] = {}  # by the name of a module: the function that it had


def apply_to_library() -> None:
    """Replace the function in every model's file that has been imported since."""
    for name, namespace in _files():
        if name not in _replaced and _is_llamas(namespace):
            _replaced[name] = namespace[NAME]
            namespace[NAME] = _in_one_launch(namespace[NAME])


def undo_in_library() -> None:
    for name, namespace in _files():
        if name in _replaced:
            namespace[NAME] = _replaced.pop(name)


def _files() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        if name.startswith(MODELS) and ".modeling_" in name and NAME in vars(module):
            yield name, vars(module)


def _is_llamas(namespace: dict[str, Any]) -> bool:
    from transformers.models.llama import modeling_llama as llama

    right = (_replaced.get(llama.__name__, llama.apply_rotary_pos_emb), llama.rotate_half)
    return all(
        _instructions(namespace.get(name)) == _instructions(function)
        for name, function in zip((NAME, HALF), right, strict=True)
    )


def _instructions(function: Any) -> Any:
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_code, code.co_consts[1:], code.co_names, code.co_varnames)


def _in_one_launch(original: Callable[..., Pair]) -> Callable[..., Pair]:
    @wraps(original)
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Pair:
        if torch.compiler.is_compiling() or args or kwargs or not _is_ours(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **kwargs)
        return _rotate(q, k, cos, sin, False)

    return rotated


def _is_ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if not ((q.is_cuda and has_triton()) or ON_CPU) or not all(type(one) is Tensor for one in (q, k, cos, sin)):
        return False
    if cos.requires_grad or sin.requires_grad:
        return False
    if transforms.is_tracing() or transforms.is_active() or transforms.is_scripting():
        return False
    from halfbyte.kernels.attention.rotary import supports

    return supports(q, k, cos, sin)


class _Rotary(torch.autograd.Function):
    """The rotation or, `back`, its transpose; the gradient of each is the other."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Pair:
        from halfbyte.kernels.attention.rotary import rotate

        ctx.save_for_backward(cos, sin)
        ctx.back = back
        with on(q.device):
            return rotate(q, k, cos, sin, back)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        of_q, of_k = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        return *_rotate(of_q, of_k, cos, sin, not ctx.back), None, None, None


_rotate: Callable[..., Pair] = _Rotary.apply
