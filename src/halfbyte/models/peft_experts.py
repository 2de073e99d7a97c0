"""PEFT: LoRA on experts in 4 bits, as products of the rows that each expert has, never with a dense stack.

PEFT puts a `ParamWrapper` around a module for each of its parameters that has adapters, and in every forward pass adds
B @ A of all experts to the whole dense parameter. There is no such parameter here. Instead, of rows sorted by expert:

    pairs = x @ W.T + scaling * (x @ A.T) @ B.T        of gate_up_proj, and the same of down_proj

in PEFT's own layout, so adapters fit those of a dense model: lora_A [E * r, in] with the expert slowest, lora_B
[out, r * E] with the expert fastest. All adapters that are active add up, as in PEFT. Merging is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from halfbyte.autocast import autocast_dtype
from halfbyte.experts import grouped_linear
from halfbyte.kernels.experts.plan import Group, groups_of
from halfbyte.kernels.experts.reference import activate
from halfbyte.models.experts import SOURCE
from halfbyte.nn.experts import PROJECTIONS, Experts4bit


class Adapter(NamedTuple):
    """a: [E, in, r]. b: [E, r, out]."""

    a: Tensor
    b: Tensor
    scaling: float


class Rows:
    """Pairs of a token and an expert sorted by expert, then by token; those whose expert is out of range come last.

    order: the pair of each row. expert: its expert. valid: whether it has one, [S, 1]. ends: int32 [E], where each
    expert's rows end.
    """

    def __init__(self, expert: Tensor, count: int) -> None:
        key = torch.where((expert >= 0) & (expert < count), expert, count)
        self.expert, self.order = key.sort(stable=True)
        self.valid = (self.expert < count).unsqueeze(1)
        each = torch.arange(count, dtype=self.expert.dtype, device=expert.device)
        self.ends = torch.searchsorted(self.expert, each, right=True, out_int32=True)  # bincount would wait for a GPU

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The same on the host, which waits for a GPU."""
        ends = self.ends.tolist()
        return groups_of([end - begin for begin, end in zip([0, *ends], ends, strict=False)])


def supports(module: nn.Module) -> bool:
    """True for PEFT's wrapper of a parameter of 4-bit experts."""
    return is_wrapper(module) and isinstance(module.get_base_layer(), Experts4bit)  # type: ignore[operator]


def apply(module: nn.Module) -> None:
    if "forward" not in module.__dict__:
        for function in (forward, merge):
            setattr(module, function.__name__, MethodType(function, module))


def undo(module: nn.Module) -> None:
    for function in (forward, merge):
        if getattr(module.__dict__.get(function.__name__), "__func__", None) is function:
            del module.__dict__[function.__name__]


def merge(module: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"adapters of {module.parameter_name} cannot be merged into 4-bit experts: keep them apart, or merge them into "
        "the dense model and quantize that"
    )


def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **kwargs: Any) -> Tensor:
    """What PEFT's ParamWrapper.forward computes of dense experts: hidden_states [T, H] -> [T, H]."""
    if kwargs.pop("adapter_names", None) is not None or kwargs:
        raise ValueError(f"adapters of experts take no {', '.join(kwargs) or 'adapter_names'}: one adapter a batch")
    dtype = autocast_dtype(hidden_states) or hidden_states.dtype
    experts: Experts4bit = module.get_base_layer()
    sides = {name: tuple(experts.stack(name).shape[1:]) for name in PROJECTIONS}
    adapters = adapters_of(module, sides, dtype)
    if not any(adapters.values()):
        result: Tensor = experts(hidden_states, top_k_index, top_k_weights)
        return result

    def multiply(x: Tensor, name: str, rows: Rows) -> Tensor:
        bias = experts._parameters[f"{name}_bias"]
        return grouped_linear(x, experts.stack(name), rows.expert, None if bias is None else bias.to(dtype))

    rows = Rows(top_k_index.reshape(-1), experts.num_experts)
    return adapted(hidden_states.to(dtype), top_k_weights, rows, experts.activation, multiply, adapters)


def adapted(
    x: Tensor,
    top_k_weights: Tensor,
    rows: Rows,
    activation: str,
    multiply: Callable[[Tensor, str, Rows], Tensor],
    adapters: Mapping[str, Sequence[Adapter]],
) -> Tensor:
    """A block of experts with adapters: x [T, H] and top_k_weights [T, k] -> [T, H], in x's dtype. `multiply` gives the
    products of sorted rows with the frozen projection of a name, and its bias."""
    (tokens, hidden), k = x.shape, top_k_weights.shape[1]

    def project(rows_of_x: Tensor, name: str) -> Tensor:
        y = multiply(rows_of_x, name, rows)
        for adapter in adapters.get(name, ()):
            low = product(rows_of_x, adapter.a, rows) * adapter.scaling
            y = y + product(low, adapter.b, rows)
        return y

    pairs = project(x[rows.order // k], "gate_up_proj")
    inner = activate(pairs.float(), activation).to(x.dtype)
    y = project(inner, "down_proj").float()
    weights = torch.where(rows.valid, top_k_weights.reshape(-1, 1)[rows.order].float(), 0)
    pairs = y.new_zeros((tokens * k, hidden)).index_copy(0, rows.order, y * weights)
    return pairs.view(tokens, k, hidden).sum(1).to(x.dtype)


def adapters_of(module: Any, sides: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, list[Adapter]]:
    """The active adapters of experts in `dtype`, by the names of their parameters. module: the outermost wrapper.
    sides: [N, K] of each parameter."""
    found: dict[str, list[Adapter]] = {}
    while is_wrapper(module):
        name = module.parameter_name
        found.setdefault(name, []).extend(_adapters(module, sides[name], dtype))
        module = module.base_layer
    return found


def is_wrapper(module: nn.Module) -> bool:
    """True for PEFT's wrapper of a parameter, known by name: nothing is imported to find out."""
    kind = type(module)
    return kind.__name__ == "ParamWrapper" and kind.__module__.startswith("peft.tuners.lora.")


def _adapters(wrapper: Any, sides: tuple[int, ...], dtype: torch.dtype) -> list[Adapter]:
    """The active adapters of one parameter, in `dtype`."""
    found: list[Adapter] = []
    if wrapper.disable_adapters:
        return found
    n, k = sides
    for name in wrapper.active_adapters:
        if name not in wrapper.lora_A:
            continue
        count = wrapper.num_experts
        a, b = wrapper.lora_A[name].weight.to(dtype), wrapper.lora_B[name].weight.to(dtype)
        given = b.shape[0], a.shape[1]
        if given not in ((n, k), (k, n)):
            raise ValueError(
                f"the adapter {name!r} of {wrapper.parameter_name} maps {a.shape[1]} to {b.shape[0]} features, and the "
                f"experts {k} to {n}: this PEFT takes the packed bytes for the weight. Update it: pip install -U peft"
            )
        first, second = a.view(count, -1, a.shape[1]), b.view(b.shape[0], -1, count)
        if given == (n, k) and not (n == k and _is_turned(wrapper, wrapper.get_base_layer())):
            pair = first.transpose(1, 2), second.permute(2, 1, 0)
        else:
            pair = second.permute(2, 0, 1), first
        found.append(Adapter(pair[0], pair[1].contiguous(), wrapper.scaling[name]))
    return found


def _is_turned(wrapper: Any, experts: nn.Module) -> bool:
    """Whether A is at the output of the experts. So it is with PEFT 0.18, which takes dense parameters [E, N, K]
    for [E, K, N], where it has made the adapters before the experts were quantized."""
    source = vars(experts).get(SOURCE)
    return not (getattr(wrapper, "_did_swap_in_out_features", False) or getattr(source, "is_transposed", True))


class _Product(torch.autograd.Function):
    """x [S, K] times w [E, K, N] of each row's expert -> [S, N]; zeros for rows without one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rows: Rows) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rows = rows
        return _multiply(x, w, rows)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        of_x, of_w, _ = ctx.needs_input_grad
        grad_x = _multiply(grad, w.transpose(1, 2), ctx.rows) if of_x else None
        return grad_x, _outer(x, grad, ctx.rows) if of_w else None, None


def _multiply(x: Tensor, w: Tensor, rows: Rows) -> Tensor:
    if _has_grouped(x, w):
        y = torch._grouped_mm(x.contiguous(), w, offs=rows.ends)
        return torch.where(rows.valid, y, 0)
    out = x.new_zeros((len(x), w.shape[2]))
    for expert, first, last in rows.groups:
        out[first:last] = x[first:last] @ w[expert]
    return out


def _outer(x: Tensor, grad: Tensor, rows: Rows) -> Tensor:
    """The gradient of w: of each expert x.T @ grad of its rows, [E, K, N]."""
    if _has_grouped(x, grad):
        result: Tensor = torch._grouped_mm(x.contiguous().t(), grad.contiguous(), offs=rows.ends)
        return result
    out = x.new_zeros((len(rows.ends), x.shape[1], grad.shape[1]))
    for expert, first, last in rows.groups:
        torch.mm(x[first:last].t(), grad[first:last], out=out[expert])
    return out


def _has_grouped(x: Tensor, y: Tensor) -> bool:
    """Whether torch multiplies groups of rows in one launch: bf16 from sm_90 on, in whole 16 bytes."""
    is_aligned = all(side % 8 == 0 for side in (*x.shape[1:], *y.shape[1:]))
    return (
        x.is_cuda
        and x.dtype is torch.bfloat16
        and is_aligned
        and hasattr(torch, "_grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


product: Callable[..., Tensor] = _Product.apply  # of x [S, K], w [E, K, N] and Rows
