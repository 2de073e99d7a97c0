"""Products with stacks of experts, and the block of a mixture-of-experts model that is made of them.

Like all public functions (ops.py) these check their arguments, go straight to the kernel when called eagerly, and are
one operator each under tracing (library.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from halfbyte import autograd_experts, transforms
from halfbyte.checks import check_bias, check_floats, not_a_weight
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.experts.reference import ACTIVATIONS


def grouped_linear(x: Tensor, q: QuantizedWeight, expert: Tensor, bias: Tensor | None = None) -> Tensor:
    """y[s] = x[s] @ W[expert[s]].T + bias[expert[s]], of the dense stack W that `q` stands for.

    x: fp16, bf16 or fp32, [S, K], with any strides. q: a stack [E, N, K]. expert: int32 or int64 [S]; a row whose id is
        negative, or E and above, gives zeros, without bias. bias: [E, N], of x's dtype.

    Returns [S, N], contiguous, in x's dtype. Sums are fp32 or better and rounded once; the same input gives the same
    bits every time. Gradients flow to x and bias. Raises TypeError or ValueError for arguments that do not fit, and
    RuntimeError inside torch.func and where an argument has a forward-mode tangent.
    """
    _refuse_script("grouped_linear")
    _check_stack(q, "q", "grouped_linear")
    check_floats(x, "x", "grouped_linear")
    _check_device(x, q, "the weight")
    count, n, k = q.shape
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x has shape {list(x.shape)}; a weight of shape {list(q.shape)} takes [S, {k}]")
    _check_ids(expert, "expert", x, (x.shape[0],), "grouped_linear")
    check_bias(bias, x, (count, n), q.shape, "bias")
    _check_transforms("grouped_linear", x, bias, *q.tensors)
    return autograd_experts.grouped_linear(x, q, expert, bias)


def moe(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The experts of a mixture-of-experts block: of each token, those that its router chose, weighted and added up.

    y[t] = sum over j of top_k_weights[t, j] * (act(gate) * up @ down[e].T + down_bias[e]), of e = top_k_index[t, j] and
    gate and up from x[t] @ gate_up[e].T + gate_up_bias[e].

    x: fp16, bf16 or fp32, [T, H], with any strides. top_k_index: int32 or int64 [T, k]; an id that is negative, or E
        and above, is skipped, as ids of experts on other devices are. top_k_weights: fp16, bf16 or fp32 [T, k].
    gate_up: a stack [E, 2I, H], an expert's gate rows before its up rows. down: a stack [E, H, I], of any format.
    activation: "silu" (Qwen3-MoE, Mixtral, DeepSeek), "gelu", or its approximation "gelu_tanh" (Gemma; in transformers
        "gelu_pytorch_tanh"): act(gate) * up. "swiglu_oai" (gpt-oss): gate is clamped to 7 from above and up to -7 to 7,
        and the rows are (up + 1) * gate * sigmoid(1.702 gate); gate_up and its bias have gate and up rows interleaved,
        gate first, as gpt-oss stores them.
    gate_up_bias: [E, 2I]; down_bias: [E, H]; of x's dtype.

    Returns [T, H], contiguous, in x's dtype. Products, activation and the sum over j, in its order, are fp32 or better;
    the activation's result and the sum are rounded once. Experts with so many rows that their dense weight is the
    faster way have products rounded to x's dtype, as transformers does. The same input gives the same bits every time.
    Gradients flow to x, top_k_weights and the biases. Raises TypeError or ValueError for arguments that do not fit, and
    RuntimeError inside torch.func and where an argument has a forward-mode tangent.
    Sources: `MixtralExperts` and `GptOssExperts` of transformers 5.
    """
    _refuse_script("moe")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; moe knows {', '.join(map(repr, ACTIVATIONS))}")
    for stack, name in ((gate_up, "gate_up"), (down, "down")):
        _check_stack(stack, name, "moe")
    check_floats(x, "x", "moe")
    for stack, name in ((gate_up, "gate_up"), (down, "down")):
        _check_device(x, stack, name)
    count, twice, hidden = gate_up.shape
    if twice % 2 or tuple(down.shape) != (count, hidden, twice // 2):
        raise ValueError(
            f"gate_up has shape {list(gate_up.shape)} and down {list(down.shape)}; "
            "they must be [E, 2I, H] and [E, H, I]"
        )
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"x has shape {list(x.shape)}; gate_up of shape {list(gate_up.shape)} takes [T, {hidden}]")
    if isinstance(top_k_index, Tensor) and top_k_index.dim() != 2:
        raise ValueError(f"top_k_index has shape {list(top_k_index.shape)}; x of shape {list(x.shape)} takes [T, k]")
    _check_ids(top_k_index, "top_k_index", x, (x.shape[0], *getattr(top_k_index, "shape", ())[1:]), "moe")
    check_floats(top_k_weights, "top_k_weights", "moe")
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights has shape {list(top_k_weights.shape)} and top_k_index {list(top_k_index.shape)}; "
            "there is one weight for each id"
        )
    if top_k_weights.device != x.device:
        raise ValueError(f"top_k_weights is on {top_k_weights.device} and x on {x.device}; they must be on one device")
    check_bias(gate_up_bias, x, (count, twice), gate_up.shape, "gate_up_bias")
    check_bias(down_bias, x, (count, hidden), down.shape, "down_bias")
    _check_transforms("moe", x, top_k_weights, gate_up_bias, down_bias, *gate_up.tensors, *down.tensors)
    block = Block(gate_up, down, activation, gate_up_bias, down_bias)
    return autograd_experts.moe(x, top_k_index, top_k_weights, block)


def _refuse_script(function: str) -> None:
    """Raise RuntimeError under torch.jit.trace."""
    if not transforms.is_tracing():
        transforms.refuse_script(function)


def _check_stack(q: QuantizedWeight, name: str, function: str) -> None:
    if type(q) is not QuantizedWeight:
        raise not_a_weight(q, function, name)
    if len(q.shape) != 3:
        raise ValueError(f"{name} has shape {list(q.shape)}; {function} takes a stack of experts [E, N, K]")


def _check_device(x: Tensor, q: QuantizedWeight, name: str) -> None:
    if x.device != q.packed.device:
        raise ValueError(f"x is on {x.device} and {name} on {q.packed.device}; they must be on one device")


def _check_ids(ids: Tensor, name: str, x: Tensor, shape: tuple[int, ...], function: str) -> None:
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} is a {type(ids).__name__}; {function} takes a torch.Tensor")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {ids.dtype}; {function} takes torch.int32 or torch.int64")
    if tuple(ids.shape) != shape:
        raise ValueError(f"{name} has shape {list(ids.shape)}; x of shape {list(x.shape)} takes {list(shape)}")
    if ids.device != x.device:
        raise ValueError(f"{name} is on {ids.device} and x on {x.device}; they must be on one device")


def _check_transforms(function: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError inside torch.func or forward-mode AD where a tensor takes part."""
    if transforms.is_tracing() or not transforms.is_active():
        return
    transforms.refuse(function, "an argument", *tensors)
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors if tensor is not None
    ):
        raise RuntimeError(f"halfbyte.{function} has no forward-mode derivative; gradients of backward passes it has")
