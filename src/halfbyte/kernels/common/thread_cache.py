"""A dictionary of each thread's own, for what must not be shared: a launch's arguments are written right before it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST = 1 << 14  # entries of a few hundred bytes, for weights that came and went


class ThreadCache(threading.local, Generic[K, V]):
    """What this thread has made, by key. All of it goes when there are too many entries."""

    def __init__(self) -> None:
        self.entries: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """What `make` returned, never None, when this thread first asked for this key."""
        found = self.entries.get(key)
        return self.keep(key, make()) if found is None else found

    def keep(self, key: K, value: V) -> V:
        if len(self.entries) >= MOST:
            self.entries.clear()
        self.entries[key] = value
        return value
