"""Functions of a host library replaced wherever they were imported, and put back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


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
