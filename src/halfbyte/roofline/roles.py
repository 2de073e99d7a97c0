"""Which part of a model is at work: ranges around its modules, and what each product was called with.

A layer is known by the last name in its path that means something, so that adapters and wrappers around a projection
count as the projection. Layers of no known name keep the one they have. Siblings whose products halfbyte may make in
one launch are one class, "q+k+v". Of a mixture of experts the router, the experts, all of a layer in one call, and the
layers of shared experts are classes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats.bitsandbytes import from_bitsandbytes
from halfbyte.models import bitsandbytes, projections
from halfbyte.models.experts import is_experts
from halfbyte.nn import Experts4bit, Linear4bit
from halfbyte.nn.experts import PROJECTIONS
from halfbyte.roofline.names import ATTENTION, COPIES, ELEMENTWISE, NORMS, Label

PREFIX = "halfbyte|"
ROLES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "qkv_proj": "qkv", "query_key_value": "qkv", "c_attn": "qkv",
    "o_proj": "o", "out_proj": "o", "gate_proj": "gate", "up_proj": "up", "gate_up_proj": "gate_up",
    "down_proj": "down", "fc1": "up", "fc2": "down", "lm_head": "lm_head", "embed_out": "lm_head",
}  # fmt: skip
SHARED, EXPERTS, ROUTER = "shared_", "experts", "router"
ROUTERS = ("router", "gate")  # the last name in their paths; the projection is called gate_proj


@dataclass(frozen=True)
class Call:
    """A module's call. rows: of x, for products. moved: bytes of inputs and outputs. weight: bytes as it is stored.
    k, n: sides of a product's weight; numel: elements of the output. weights: how many such weights were multiplied
    with; of experts those that had rows, each with all of its projections side by side in n."""

    label: Label
    moved: int
    weight: int
    numel: int
    rows: int = 0
    k: int = 0
    n: int = 0
    weights: int = 1


def label_of(path: str, module: nn.Module, head: nn.Module | None) -> Label | None:
    """The class of what a module launches itself, or None where only kernels' names can tell."""
    kind, parts = type(module).__name__, path.split(".")
    if isinstance(module, Experts4bit) or is_experts(module):
        return Label("products", EXPERTS)
    if parts[-1] in ROUTERS and getattr(getattr(module, "weight", None), "shape", ())[1:]:
        return Label("products", ROUTER)
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        if module is head:
            return Label("products", "lm_head")
        role = next((ROLES[part] for part in reversed(parts) if part in ROLES), parts[-1])
        is_shared = any(part.startswith("shared_expert") for part in parts[:-1])
        return Label("products", SHARED + role if is_shared else role)
    if isinstance(module, nn.Embedding):
        return COPIES
    if kind.endswith(("Norm", "Norm2d")) or "LayerNorm" in kind:
        return NORMS
    if "Rotary" in kind:
        return ELEMENTWISE
    if kind.endswith(("Attention", "SelfAttention")):
        return ATTENTION
    return None


@contextmanager
def marked(model: Any) -> Iterator[list[Call]]:
    """Within, modules run in ranges named after their class, and their calls are written down in the list."""
    calls: list[Call] = []
    head = getattr(model, "get_output_embeddings", lambda: None)()
    labels = {module: label for path, module in model.named_modules() if (label := label_of(path, module, head))}
    with ExitStack() as stack:
        for module, label in labels.items():
            tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            group = projections.of(module) if any(tensor.is_cuda for tensor in tensors) else []
            roles = "+".join(labels[member].role for member in group if member in labels)
            _mark(module, Label(label.group, roles) if roles else label, calls, stack)
        yield calls


def range_of(label: Label) -> Any:
    """A range that kernels launched within it are known by."""
    return torch.profiler.record_function(f"{PREFIX}{label.group}|{label.role}")


def label_in(name: str) -> Label | None:
    """The label in the name of a range, without its prefix; None for ranges that are no class."""
    group, bar, role = name.partition("|")
    return Label(group, role) if bar else None


def _mark(module: nn.Module, label: Label, calls: list[Call], stack: ExitStack) -> None:
    entered: list[Any] = []

    def before(*_: Any) -> None:
        entered.append(range_of(label))
        entered[-1].__enter__()

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        entered.pop().__exit__(None, None, None)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        first = output[0] if isinstance(output, tuple) and output else output
        if tensors and isinstance(first, Tensor) and not hasattr(module, "base_layer"):
            if label.role == EXPERTS:
                calls.append(_experts_call(module, label, tensors[0], tensors[1], first))
            else:
                calls.append(_call(module, label, tensors[0], first))

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)


def _call(module: Any, label: Label, x: Tensor, output: Tensor) -> Call:
    if label.group != "products":
        weight = 0 if label == COPIES else sum(parameter.nbytes for parameter in module.parameters(recurse=False))
        return Call(label, x.nbytes + output.nbytes, weight, output.numel())
    n, k = (module.out_features, module.in_features) if hasattr(module, "in_features") else module.weight.shape
    return Call(label, x.nbytes + output.nbytes, stored_bytes(module), output.numel(), output.numel() // n, k, n)


def _experts_call(module: Any, label: Label, x: Tensor, index: Tensor, output: Tensor) -> Call:
    """A call of experts [T, H], of which `index` [T, k] says which each token has; the others' bytes stay where they
    are."""
    count = module.num_experts
    hit = torch.unique(index)
    hit = hit[(hit >= 0) & (hit < count)]
    if isinstance(module, Experts4bit):
        stored = module.gate_up.nbytes + module.down.nbytes
        numel = module.gate_up.numel + module.down.numel
    else:
        stacks = [module.get_parameter(name) for name in PROJECTIONS]
        stored, numel = sum(stack.nbytes for stack in stacks), sum(stack.numel() for stack in stacks)
    weight, k = stored * len(hit) // count, x.shape[-1]
    rows = int(((index >= 0) & (index < count)).sum())
    return Call(label, x.nbytes + output.nbytes, weight, output.numel(), rows, k, numel // count // k, len(hit))


def stored_bytes(module: Any) -> int:
    """Bytes of a layer's weight and bias as they are stored, scales included."""
    bias = getattr(module, "bias", None)
    extra = int(bias.nbytes) if isinstance(bias, Tensor) else 0
    weight = module.weight
    if isinstance(module, Linear4bit):
        return int(weight.nbytes) + extra
    if bitsandbytes.supports(module):
        try:
            return int(from_bitsandbytes(weight).nbytes + extra)
        except (TypeError, ValueError):  # repacked for a CPU's own instructions
            state = getattr(weight, "quant_state", None) or module.quant_state
            nested = state.state2.absmax.nbytes if getattr(state, "state2", None) is not None else 0
            return int(weight.nbytes + state.absmax.nbytes + nested + extra)
    return int(weight.nbytes) + extra
