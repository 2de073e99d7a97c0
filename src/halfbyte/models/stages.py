"""Models on several devices of one host, as accelerate leaves them (`device_map`), in a captured step.

accelerate wraps the forward of every module, to move what it is given to the module's device. A graph cannot hold that,
and layers in such a wrapper are not fused. Within a step the wrappers are off. Each largest module that lies on one
device, usually a decoder layer, says instead where the step goes on (carrying.py).

Where each module lies is read off its tensors. Results go back to the device of the model's inputs, as with accelerate,
so tokens are chosen where transformers chooses them, from the same random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfbyte.models.carrying import carried_at_once, carrier
from halfbyte.models.patch import OurHook, is_method_of

HOME = "accelerate.hooks"
CUTS = "_halfbyte_cuts"  # attribute of a model: modules ahead of which a graph ends on one device too; tests set it
STAYS = ("past_key_values",)  # arguments and results whose tensors lie where their layers do


class Stop(NamedTuple):
    """A module that lies on one device. cuts: it is told from what is ahead of it even on one device."""

    module: nn.Module
    device: torch.device
    cuts: bool


def devices_of(model: nn.Module) -> set[torch.device]:
    """Where a model's parameters are. It needs stages if that is on several."""
    return {parameter.device for parameter in model.parameters()}


def is_offloaded(model: nn.Module) -> bool:
    """True for a model some of whose weights accelerate fetches when they are needed."""
    return any(getattr(hook, "offload", False) for module in model.modules() for hook in _hooks(module))


def why_not(model: nn.Module) -> str | None:
    """Why the steps of a model on several devices, or with accelerate's hooks, cannot be captured, and how to mend
    that; None where they can."""
    if is_offloaded(model):
        return "part of it is offloaded, so weights move in every step; give it a device_map of GPUs alone"
    for path, module in model.named_modules():
        if _is_wrapped(module) and not _moves_only(module):
            return f"{path or 'it'} has a hook that is not accelerate's own for device_map; remove that hook"
    if len(devices_of(model)) > 1 and not any(map(_is_wrapped, model.modules())):
        return "its parts are on several devices without accelerate's hooks; load it with device_map"
    try:
        list(_stops(model))
    except _CannotCut as error:
        return str(error)
    return None


@contextmanager
def staged(model: Any) -> Iterator[None]:
    """Within, a model's parts have what they are given carried to their devices, by our hooks and not by
    accelerate's. A model on one device is as it was, but for accelerate's hooks. One that cannot be cut, since it has
    changed, is as it was altogether."""
    wrapped = [module for module in model.modules() if _is_wrapped(module)]
    stops = _stops_if_any(model) if wrapped or CUTS in vars(model) else None
    if stops is None or not all(map(_moves_only, wrapped)):
        yield
        return
    stays = frozenset((*STAYS, *(getattr(model, "_skip_keys_device_placement", None) or ())))
    with carried_at_once(), ExitStack() as stack:
        if stops:
            begins = model.register_forward_pre_hook(_Begins(stops))
            stack.callback(begins.remove)
            ends = model.register_forward_hook(partial(_end, model.device, stays))
            stack.callback(ends.remove)
        for stop in stops:  # before the wrappers go: another thread may be computing a prompt
            arrives = stop.module.register_forward_pre_hook(_Arrives(stop, stays), with_kwargs=True)
            stack.callback(arrives.remove)
        for module in wrapped:
            stack.callback(setattr, module, "forward", vars(module)["forward"])
            old = vars(module)["_old_forward"]
            if is_method_of(type(module).forward, old):
                del module.forward
            else:
                module.forward = old
        yield


class _Begins(OurHook):
    """Ahead of a model."""

    def __init__(self, stops: Iterable[Stop]) -> None:
        self.devices = tuple(dict.fromkeys(stop.device for stop in stops))

    def __call__(self, module: nn.Module, args: Any) -> None:
        carrier().watch(self.devices)


class _Arrives(OurHook):
    """Ahead of a module that may lie on another device than what was computed before."""

    def __init__(self, stop: Stop, stays: frozenset[str]) -> None:
        self.stop, self.stays = stop, stays

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name not in self.stays}
        args, given = carrier().carry((args, given), self.stop.device, self.stop.cuts)
        return args, kwargs | given


def _end(device: torch.device, stays: frozenset[str], module: nn.Module, args: Any, outputs: Any) -> Any:
    """Behind a model: its results to the device of its inputs."""
    if not isinstance(outputs, dict):
        return carrier().carry(outputs, device)
    fields = {name: value for name, value in outputs.items() if name not in stays}
    return type(outputs)(**(dict(outputs) | carrier().carry(fields, device)))


class _CannotCut(Exception):
    """Says which part of a model is no part of a stage."""


def _stops_if_any(model: Any) -> list[Stop] | None:
    try:
        return list(_stops(model))
    except _CannotCut:
        return None


def _stops(model: Any) -> Iterator[Stop]:
    """The largest callable modules of one device each, if the model lies on several; or those that tests cut at."""
    cuts: tuple[nn.Module, ...] = vars(model).get(CUTS, ())
    whole = getattr(model, "_no_split_modules", None) or ()
    if len(devices_of(model)) > 1 or cuts:
        yield from _stops_in(model, "", frozenset(cuts), frozenset(whole))


def _stops_in(module: nn.Module, path: str, cuts: frozenset[nn.Module], whole: frozenset[str]) -> Iterator[Stop]:
    devices = {tensor.device for tensor in _tensors(module)}
    if not devices:
        return
    inside = any(part in cuts for part in module.modules() if part is not module)
    if len(devices) == 1 and path and not inside and type(module).forward is not nn.Module.forward:
        yield Stop(module, devices.pop(), module in cuts)
        return
    if len(devices) > 1 and (type(module).__name__ in whole or any(True for _ in _tensors(module, recurse=False))):
        raise _CannotCut(
            f"the parts of {path or type(module).__name__} are on several devices; name whole layers in device_map"
        )
    for name, child in module.named_children():
        yield from _stops_in(child, f"{path}.{name}" if path else name, cuts, whole)


def _tensors(module: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _is_wrapped(module: nn.Module) -> bool:
    """True for a module whose forward accelerate has wrapped."""
    return {"_hf_hook", "_old_forward", "forward"} <= vars(module).keys()


def _moves_only(module: nn.Module) -> bool:
    """True where the wrapper does no more than moving what the module is given, and nobody has wrapped it again."""
    forward = vars(module)["forward"]
    wrapper = forward.func if isinstance(forward, partial) else None
    return getattr(wrapper, "__module__", "") == HOME and all(
        (type(hook).__module__, type(hook).__name__) == (HOME, "AlignDevicesHook") and not hook.offload
        for hook in _hooks(module)
    )


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """Of accelerate's kind: the one of a module, or those of which it consists."""
    hook = vars(module).get("_hf_hook")
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))
