"""Fused projections: linear layers that are given the same x, such as query, key and value, in one launch.

With few rows of x a product costs little more than the start of its kernel, and one start can do for all. The first
member of a group that is called computes all of them and leaves the others' results on x itself, as an attribute, so
that they live no longer than x does. Another member takes its result from the x that it is called with, and only if
all is as it was: x, as far as autograd would notice, its own weight and bias, and the stream. Otherwise it computes.

So the names below are no more than a guess, and a wrong one costs time: results that nobody takes. A group that has
wasted a few is dissolved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.ops import linear_group

T = TypeVar("T")
NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
MOST_ROWS = 64  # of x; beyond, the start of a kernel is little of its time
MOST_WASTED = 4  # times that some result of a group was not taken
GROUP = "_halfbyte_group"  # attribute of a module
RESULTS = "_halfbyte_results"  # attribute of an x
ON_CPU = False  # where it gains nothing; tests set it


class Inputs(NamedTuple):
    """What a module would multiply an x with. bias: the module's own, before it is cast. dtype: of the product.
    result: what the product is cast to. version: another one after the weight or the bias was written to."""

    q: QuantizedWeight
    bias: Tensor | None
    dtype: torch.dtype
    result: torch.dtype
    version: int


class Host(Protocol):
    """One of the files of this folder whose modules can be fused."""

    def is_applied(self, module: nn.Module) -> bool: ...

    def weight_of(self, module: Any) -> QuantizedWeight | None: ...

    def operands(self, module: Any, x: Tensor) -> Inputs | None:
        """None where only the module's forward knows what to do."""


class Results:
    """Results that a member of `group` has made for the others, by their `id`, and the moment at which it did."""

    __slots__ = ("group", "moment", "results")

    def __init__(self, group: Group, moment: Hashable, results: dict[int, tuple[Inputs, Tensor]]) -> None:
        self.group, self.moment, self.results = group, moment, results

    def pop(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """What was made for a module, if that is what it would compute."""
        found = self.results.get(id(module))
        if found is None or self.moment != _moment(x):
            return None
        operands, result = found
        if not _are_same(operands, self.group.operands(module, x)) or self.results.pop(id(module), None) is None:
            return None  # the latter if another thread has just taken it
        if not self.results:
            x.__dict__.pop(RESULTS, None)
        return result

    def __del__(self) -> None:
        if self.results:
            self.group.wasted += 1

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Nothing: a copy of x is another x."""
        return type(None), ()


class Group:
    """Modules of one host that are likely to be called with the same x [..., K]. It keeps none of them alive."""

    __slots__ = ("host", "members", "most", "wasted")

    def __init__(self, host: Host, modules: Sequence[nn.Module], k: int) -> None:
        self.host, self.members, self.most, self.wasted = host, tuple(map(ref, modules)), MOST_ROWS * k, 0

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Nothing: copies of modules are in no group until they are accelerated themselves."""
        return type(None), ()

    def dissolve(self) -> None:
        for member in self.members:
            module = member()
            if module is not None and vars(module).get(GROUP) is self:
                del vars(module)[GROUP]

    def operands(self, module: nn.Module, x: Tensor) -> Inputs | None:
        found = self.host.operands(module, x)
        if found is None or (found.bias is not None and found.bias.requires_grad and torch.is_grad_enabled()):
            return None
        return found

    def compute(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The module's product, after which the others' are on x; or None where they are not to be made together."""
        if not self._may_share(x):
            return None
        if self.wasted >= MOST_WASTED:
            self.dissolve()
            return None
        moment = _moment(x)
        everyone: dict[int, Inputs] = {}
        for member in self.members:
            other = member()
            operands = None if other is None else self.operands(other, x)
            if operands is None:
                return None
            everyone[id(other)] = operands
        mine = everyone.get(id(module))
        if mine is None:  # it is a shallow copy of a member
            return None
        weights, biases, dtype = [], [], mine.dtype
        for q, bias, others, _, _ in everyone.values():
            if others is not dtype:
                return None
            weights.append(q)
            biases.append(bias if bias is None or bias.dtype is dtype else bias.to(dtype))
        try:
            products = linear_group(x if x.dtype is dtype else x.to(dtype), weights, biases, one_launch=x.is_cuda)
        except (TypeError, ValueError):  # alone, a module says for itself what is the matter
            return None
        if products is None:  # no kernel is for so many rows, and none will be for more
            self.most = x.numel() - 1
            return None
        results = {}
        for (key, operands), product in zip(everyone.items(), products, strict=True):
            results[key] = operands, product if product.dtype is operands.result else product.to(operands.result)
        _, own = results.pop(id(module))
        x.__dict__[RESULTS] = Results(self, moment, results)
        return own

    def _may_share(self, x: Tensor) -> bool:
        return (
            type(x) is Tensor
            and (x.is_cuda or ON_CPU)
            and x.numel() <= self.most
            and x.layout is torch.strided
            and not (x.requires_grad and torch.is_grad_enabled())
            and not x.is_inference()  # it would not tell that it was written to
            and not torch.is_inference_mode_enabled()
            and torch._C._len_torch_dispatch_stack() == 0
        )


def shared(module: nn.Module, x: Tensor) -> Tensor | None:
    """What a module of a group gives for x, or None: then it has to be computed."""
    group: Group | None = module.__dict__.get(GROUP)
    if group is None or torch.compiler.is_compiling():
        return None
    kept: Results | None = getattr(x, RESULTS, None)
    found = None if kept is None else kept.pop(module, x)
    return group.compute(module, x) if found is None else found


def groups_of(child: Callable[[str], T | None], kind: Callable[[T], Hashable]) -> Iterator[list[T]]:
    """The groups among the children of one parent: those of one kind, two and more, of each set of NAMES.

    child: the child of a name, or None. `halfbyte warm` asks with what a checkpoint says of weights.
    """
    for names in NAMES:
        kinds: dict[Hashable, list[T]] = {}
        for name in names:
            if (one := child(name)) is not None:
                kinds.setdefault(kind(one), []).append(one)
        yield from (group for group in kinds.values() if len(group) > 1)


def link(model: nn.Module, hosts: Sequence[Host]) -> None:
    """Make groups of the projections in `model` that halfbyte computes, where their weights are of one kind."""
    unlink(model)
    for parent in model.modules():

        def child(name: str, parent: nn.Module = parent) -> tuple[nn.Module, Host, QuantizedWeight] | None:
            for module in _children(parent, (name,)):
                host = next((host for host in hosts if host.is_applied(module)), None)
                q = None if host is None else host.weight_of(module)
                return None if host is None or q is None else (module, host, q)
            return None

        for found in groups_of(child, _kind):
            _, host, q = found[0]
            group = Group(host, [module for module, _, _ in found], q.shape[1])
            for module, _, _ in found:
                setattr(module, GROUP, group)


def _kind(one: tuple[nn.Module, Host, QuantizedWeight]) -> Hashable:
    """What projections that are computed in one launch have in common."""
    module, host, q = one
    return host, q.shape[1], q.kind, q.device, getattr(module, "compute_dtype", None)


def unlink(model: nn.Module) -> None:
    for module in model.modules():
        group: Group | None = vars(module).pop(GROUP, None)
        if group is not None:
            group.dissolve()


def of(module: nn.Module) -> list[nn.Module]:
    """The members of a module's group, itself included; none where it is in no group."""
    group: Group | None = vars(module).get(GROUP)
    return [] if group is None else [other for member in group.members if (other := member()) is not None]


def version_of(packed: Tensor, scale: Tensor, bias: Tensor | None) -> int | None:
    """A number that grows when one of them is written to, or None where one cannot tell."""
    try:
        return packed._version + scale._version + (0 if bias is None else bias._version)
    except RuntimeError:  # made in inference mode
        return None


def parameter(module: nn.Module, name: str) -> Any:
    """What getattr gives, for a parameter in a tenth of the time."""
    try:
        return module.__dict__["_parameters"][name]
    except KeyError:
        return getattr(module, name, None)


def _children(parent: nn.Module, names: Iterable[str]) -> Iterator[nn.Module]:
    """Those of the names, under whatever adapter, that are in no group yet."""
    for name in names:
        module = parent._modules.get(name)
        while module is not None and module._modules.get("base_layer") is not None:
            module = module._modules["base_layer"]
        if module is not None and GROUP not in vars(module):
            yield module


def _moment(x: Tensor) -> Hashable:
    """What has to be the same when a result is made and when it is taken."""
    state = (
        id(x),  # a shallow copy has its attributes too
        x._version,
        x.data_ptr(),
        x.requires_grad and torch.is_grad_enabled(),
        torch._C._len_torch_dispatch_stack(),
    )
    if not x.is_cuda:
        return state
    # What is captured in a graph is not computed yet.
    return state, torch._C._cuda_getCurrentRawStream(x.get_device()), torch._C._cuda_isCurrentStreamCapturing()


def _are_same(a: Inputs, b: Inputs | None) -> bool:
    """The same objects in the same state. (== would compare the elements of biases.)"""
    return b is not None and a.q is b.q and a.bias is b.bias and a.dtype is b.dtype and a.version == b.version
