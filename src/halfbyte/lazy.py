"""Names of a package that are looked up when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def names_of(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, whose names lie in the modules that `homes` says.

    A name that is a module's own last part stands for the module. What was found is kept in the package, so that only
    the first access of a name comes through here. It registers the operators, for a function may need them.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    space = vars(sys.modules[package])

    def get(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import halfbyte.library  # noqa: F401

        module = import_module(home)
        space[name] = module if home == f"{package}.{name}" else getattr(module, name)
        return space[name]

    def names() -> list[str]:
        return sorted({*space, *home_of})

    return get, names
