"""transformers' fused experts: which modules are such, what they compute, and `Experts4bit` in their place.

Models keep all experts of a layer in two 3-D parameters, gate_up_proj and down_proj. What a module does with them is
told by what its decorator `use_experts_implementation` notes on it, and by trying its `_apply_gate` on numbers. Modules
that do something else, such as Llama 4's or experts without a gate, are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from halfbyte.formats.spec import FORMATS
from halfbyte.formats.stacks import StackWriter, shapes
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.experts.reference import ACTIVATIONS, activate
from halfbyte.models.patch import has_forward_of_class
from halfbyte.nn.experts import BIAS, PROJECTIONS, Experts4bit
from halfbyte.ops import dequantize, quantize

NOTED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # by transformers' decorator
SOURCE = "_halfbyte_source"  # of an Experts4bit: the dense module whose place it has, without memory
READY = "_is_hf_initialized"  # what transformers marks that needs no random numbers any more


@dataclass(frozen=True)
class Facts:
    """Of a module of dense experts. count: E. shapes: [N, K] of each projection. transposed: whether the parameters
    are [E, K, N]. activation: as `halfbyte.moe` names it."""

    count: int
    shapes: Mapping[str, tuple[int, int]]
    transposed: bool
    activation: str


def is_experts(module: nn.Module) -> bool:
    """Whether a module keeps dense experts in 3-D parameters, whatever it computes with them."""
    stacks = (module._parameters.get(name) for name in ("gate_up_proj", "up_proj", "down_proj"))
    return any(stack is not None and stack.dim() == 3 and stack.is_floating_point() for stack in stacks)


def facts_of(module: Any) -> Facts | str:
    """What is needed to compute a module of dense experts with `halfbyte.moe`, or why it cannot be."""
    kind = type(module).__name__
    if any(not hasattr(module, name) for name in NOTED):
        return f"{kind} does not say how its experts are computed (transformers' use_experts_implementation)"
    if not module.has_gate:
        return f"{kind} has experts without a gate"
    names = {name for name, parameter in module.named_parameters() if parameter is not None}
    expected = {name + suffix for name in PROJECTIONS for suffix in (("", BIAS) if module.has_bias else ("",))}
    if names != expected or getattr(module, "has_post_expert_norm", False):
        return f"{kind} has other parameters than gate, up and down projections ({', '.join(sorted(names - expected))})"
    found = {}
    for name in PROJECTIONS:
        stack = module._parameters[name]
        if stack.dim() != 3:
            return f"{kind}.{name} has {stack.dim()} dimensions, not 3"
        n, k = stack.shape[1:]
        found[name] = (k, n) if module.is_transposed else (n, k)
    (twice, hidden), down = found["gate_up_proj"], found["down_proj"]
    if twice % 2 or down != (hidden, twice // 2):
        return f"{kind} has projections [{twice}, {hidden}] and {list(down)}, which do not follow each other"
    activation = _activation(module)
    if activation is None:
        return f"{kind} has an activation that is none of {', '.join(ACTIVATIONS)}"
    return Facts(module.gate_up_proj.shape[0], found, module.is_transposed, activation)


def _activation(module: Any) -> str | None:
    """The one of ACTIVATIONS that the module's `_apply_gate` computes, found by trying it on numbers."""
    numbers = torch.linspace(-12, 12, 256, dtype=torch.float32, device="cpu")
    rows = torch.stack((numbers, numbers.flip(0), numbers.roll(64), numbers * 0.1))
    try:
        with torch.no_grad(), torch.device("cpu"):
            given: Tensor = module._apply_gate(rows)
    except Exception:  # it is anybody's code
        return None
    for name in ACTIVATIONS:
        expected = activate(rows, name)
        if given.shape == expected.shape and torch.allclose(given, expected, rtol=1e-5, atol=1e-6):
            return name
    return None


def misfit(facts: Facts, format: str, block_size: int) -> str | None:
    """Why experts cannot be cut into blocks, or None."""
    for n, k in facts.shapes.values():
        try:
            shapes(FORMATS[format], (facts.count, n, k), block_size)
        except ValueError as error:
            return str(error)
    return None


def quantize_stack(
    dense: Tensor, facts: Facts, name: str, settings: Mapping[str, Any], device: torch.device | None = None
) -> QuantizedWeight:
    """The 4-bit stack of a dense parameter, on `device`, expert by expert: never more than one is in memory twice.

    settings: as `halfbyte.quantize` takes them. Scales must not be nested: there is one `quantize` an expert.
    """
    n, k = facts.shapes[name]
    writer = StackWriter((facts.count, n, k))
    for expert in range(facts.count):
        weight = dense[expert].detach().to(device or dense.device)
        writer.write(expert, 0, quantize(weight.T if facts.transposed else weight, **settings))
    return writer.weight()


def replacement(module: Any, facts: Facts, stacks: Mapping[str, QuantizedWeight]) -> Experts4bit:
    """The module that computes what `module` does, with 4-bit stacks and the same biases. `module` loses its memory."""
    biases = {f"{name}_bias": module._parameters.get(name + BIAS) for name in PROJECTIONS}
    experts = Experts4bit.from_quantized(stacks["gate_up_proj"], stacks["down_proj"], facts.activation, **biases)
    experts.train(module.training)
    if hasattr(module, "config"):
        experts.config = module.config
    # There are no weights to draw at random, neither here nor for a block that reaches in.
    own = [parameter for name, parameter in experts.named_parameters() if not name.endswith(BIAS)]
    for ready in (experts, *own):
        ready.__dict__[READY] = True
    for name, parameter in module.named_parameters():
        module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    vars(experts)[SOURCE] = module
    return experts


def dense_module(experts: Experts4bit, dtype: torch.dtype | None) -> Any:
    """The module that `experts` took the place of, with the weights of now in `dtype`; itself if there is none."""
    module: Any = vars(experts).get(SOURCE)
    if module is None:
        return experts
    for name, q in zip(PROJECTIONS, (experts.gate_up, experts.down), strict=True):
        stack = dequantize(q, dtype)
        stack = stack.transpose(1, 2).contiguous() if module.is_transposed else stack
        module._parameters[name] = nn.Parameter(stack, requires_grad=False)
        if name + BIAS in module._parameters:
            module._parameters[name + BIAS] = experts._parameters[name + BIAS]
    return module.train(experts.training)


def quantize_module(module: Any, facts: Facts, settings: Mapping[str, Any]) -> Experts4bit:
    """`replacement` with the module's own weights, rounded."""
    stacks = {name: quantize_stack(module._parameters[name], facts, name, settings) for name in PROJECTIONS}
    return replacement(module, facts, stacks)


def round_in_place(model: nn.Module, settings: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, str]]:
    """Put `Experts4bit` in the place of every module of dense experts in `model`.

    Returns by their paths what was rounded, and the bytes that it had, and why others were left alone.
    """
    rounded: dict[str, int] = {}
    left: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        if not is_experts(module):
            continue
        facts = _roundable(model, path, module, settings)
        if isinstance(facts, str):
            left[path] = facts
            continue
        rounded[path] = sum(module.get_parameter(name).nbytes for name in PROJECTIONS)
        hook = vars(module).get("_hf_hook")
        experts = quantize_module(module, facts, settings)
        model.set_submodule(path, experts)
        if hook is not None:  # accelerate's, which moves what the module is given to its device
            import_module("accelerate.hooks").add_hook_to_module(experts, hook)
        _rounded.add(experts)
    return rounded, left


def rounded_in(model: nn.Module) -> list[Experts4bit]:
    """The modules that `round_in_place` has put there."""
    return [module for module in model.modules() if isinstance(module, Experts4bit) and module in _rounded]


def _roundable(model: nn.Module, path: str, module: Any, settings: Mapping[str, Any]) -> Facts | str:
    """What is needed to round a module where it is, or why that cannot be."""
    parent = model.get_submodule(path.rpartition(".")[0])
    if not path:
        return "it is the model itself; a model that holds it is accepted"
    if getattr(parent, "merged", False):
        return "an adapter is merged into it: unmerge it first"
    if getattr(vars(module).get("_hf_hook"), "offload", False):
        return "its weights are offloaded"
    if not has_forward_of_class(module):
        return "its forward is not that of its class: other code has replaced it"
    facts = facts_of(module)
    if isinstance(facts, str):
        return facts
    if module.gate_up_proj.is_meta:
        return "its weights are on the meta device, without memory"
    format = settings["format"]
    return misfit(facts, format, settings[FORMATS[format].size_name]) or facts


_rounded: WeakSet[Experts4bit] = WeakSet()
