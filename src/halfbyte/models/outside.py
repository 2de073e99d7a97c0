"""What a captured step computes outside of its decoder layers, in launches that overlap with their neighbours:
embeddings, angles, norms, and the head."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.eager_fused import has_many, rms_norm
from halfbyte.kernels.attention.plan import MOST_NEW
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.common.slow import has_triton
from halfbyte.kernels.head import launch as kernel
from halfbyte.models.layers import norm_of
from halfbyte.models.preparation import MOVING

ANGLES = "_halfbyte_angles"  # attribute of a rotary embedding: how many numbers it gives a token, or False


def forwards(model: nn.Module, inside: Collection[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    """Modules of `model` with what stands in the place of their forwards, but for those that are `inside` of layers."""
    head = dense_head(model)
    for module in model.modules():
        if module in inside:
            continue
        if (norm := norm_of(module)) is not None:
            yield module, NormOutside(module, norm)
        elif _has_angles(module):
            yield module, Angles(module)
        elif type(module) is nn.Embedding and has_triton() and "forward" not in vars(module):
            yield module, Embedding(module)
        elif module is head:
            yield module, Head(module)


def dense_head(model: nn.Module) -> nn.Linear | None:
    """The head of a language model, where it is dense and nobody else computes it."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if type(head) is nn.Linear and not {"forward", "_old_forward"} & vars(head).keys() else None


def may_fuse(x: Tensor, norm: Norm) -> bool:
    """Whether x, of a step, may be normed in the launch of a product."""
    return (
        not has_many(x)
        and x.dtype is norm.weight.dtype
        and x.device == norm.weight.device
        and not needs_gradients(x, norm.weight)
        and not torch.is_autocast_enabled(x.device.type)
    )


class Embedding:
    """In the place of the forward of an embedding."""

    def __init__(self, module: nn.Embedding) -> None:
        self.module, self.theirs = module, module.forward

    def __call__(self, ids: Tensor) -> Any:
        weight = self.module.weight
        new = ids.dim() == 2 and ids.shape[1] <= MOST_NEW and ids.is_cuda and ids.dtype in (torch.int64, torch.int32)
        alike = weight.device == ids.device and weight.is_contiguous() and ids.is_contiguous()
        if not (new and alike) or self.module.max_norm is not None or needs_gradients(weight, weight):
            return self.theirs(ids)
        from halfbyte.kernels.token.triton import embedding

        return embedding(ids, weight)


class NormOutside:
    """In the place of the forward of a norm that belongs to no layer."""

    def __init__(self, module: nn.Module, norm: Norm) -> None:
        self.theirs, self.norm = module.forward, norm

    def __call__(self, x: Tensor) -> Any:
        if not may_fuse(x, self.norm):
            return self.theirs(x)
        return rms_norm(x.contiguous(), self.norm)


def _has_angles(module: nn.Module) -> bool:
    """Whether a module may be a rotary embedding with frequencies that stay."""
    frequencies = getattr(module, "inv_freq", None)
    return (
        isinstance(frequencies, Tensor)
        and frequencies.is_cuda
        and frequencies.dim() == 1
        and frequencies.dtype is torch.float32
        and has_triton()
        and isinstance(getattr(module, "attention_scaling", None), float | int)
        and getattr(module, "rope_type", "default") not in MOVING
    )


class Angles:
    """In the place of the forward of a rotary embedding, which takes nine launches: in one, once it has been seen to
    have the same bits."""

    def __init__(self, module: Any) -> None:
        self.module, self.theirs = module, module.forward

    def __call__(self, x: Tensor, position_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        known = vars(self.module).get(ANGLES)
        new = isinstance(position_ids, Tensor) and position_ids.dim() == 2 and position_ids.shape[1] <= MOST_NEW
        if args or kwargs or not new or known is False:
            return self.theirs(x, position_ids, *args, **kwargs)
        frequencies = self.module.inv_freq
        if known is not None:
            return self._compute(x, position_ids, known)
        right = self.theirs(x, position_ids)
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            width = right[0].shape[-1]
            agrees = (
                width in (len(frequencies), 2 * len(frequencies))
                and right[0].shape == right[1].shape == (*position_ids.shape, width)
                and all(map(torch.equal, self._compute(x, position_ids, width), right))
            )
            setattr(self.module, ANGLES, width if agrees else False)
        return right

    def _compute(self, x: Tensor, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        from halfbyte.kernels.token.triton import angles

        factor = float(self.module.attention_scaling)
        return angles(positions.contiguous(), self.module.inv_freq, factor, width, x.dtype)


class Head:
    """In the place of the forward of a dense head: its weight is read while the norm ahead still runs."""

    def __init__(self, module: Any) -> None:
        self.module, self.theirs = module, module.forward

    def __call__(self, x: Tensor) -> Any:
        weight, bias = self.module.weight, self.module.bias
        if (
            needs_gradients(x, weight)
            or torch.is_autocast_enabled(x.device.type)
            or not kernel.supports(x, weight, bias)
        ):
            return self.theirs(x)
        return kernel.head(x, weight, bias)


def needs_gradients(x: Tensor, weight: Tensor) -> bool:
    """Whether somebody will ask for those of a product."""
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
