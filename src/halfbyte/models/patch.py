"""What host libraries compute replaced and put back: a function wherever it was imported, a module's forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

FORWARDS = ("forward", "_old_forward")  # the second is where accelerate's hooks keep the forward that they wrap


def forward_name(module: nn.Module) -> str:
    """The attribute whose forward does a module's own work."""
    hooked = "_hf_hook" in vars(module) and "_old_forward" in vars(module)
    return "_old_forward" if hooked else "forward"


def replaced_by(forward: Callable[..., Any], module: nn.Module) -> list[str]:
    """The attributes in which a module has `forward` for its own."""
    return [name for name in FORWARDS if is_method_of(forward, vars(module).get(name))]


def has_forward_of_class(module: nn.Module) -> bool:
    """False where other code has replaced the forward that does a module's own work."""
    name = forward_name(module)
    return name not in vars(module) or is_method_of(type(module).forward, vars(module)[name])


def patch(forward: Callable[..., Any], module: nn.Module) -> None:
    """Let `forward` do a module's own work."""
    setattr(module, forward_name(module), MethodType(forward, module))


def unpatch(forward: Callable[..., Any], module: nn.Module, before: Callable[..., Any] | None = None) -> None:
    """Let a module that has `forward` for its own have `before` again, or that of its class."""
    for name in replaced_by(forward, module):
        if before is None and name == "forward":
            del module.__dict__[name]
        else:
            setattr(module, name, MethodType(before or type(module).forward, module))


def is_method_of(function: Callable[..., Any], method: object) -> bool:
    return isinstance(method, MethodType) and method.__func__ is function


class OurHook:
    """A pre-hook of ours, which changes nothing of what a module computes."""


def is_hooked(module: nn.Module) -> bool:
    """True for a module with hooks of others."""
    ahead = module._forward_pre_hooks  # mostly none, and then no generator is made: prompts ask this of every layer
    return bool(module._forward_hooks) or (bool(ahead) and not all(isinstance(x, OurHook) for x in ahead.values()))


def replace_everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> int:
    """Make every imported module that holds the function `old` hold `new`; returns how many names were changed."""
    count = 0
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or names.get("__name__", "").startswith("halfbyte."):
            continue
        for name, value in list(names.items()):
            if value is old:
                names[name] = new
                count += 1
    return count
