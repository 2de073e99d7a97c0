"""One line on stderr when compilers have taken two seconds of a process, so that nobody takes a first call for slow."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 2.0
LINE = "halfbyte compiles kernels for this machine, once. `halfbyte warm MODEL` does it ahead."


class _Clock:
    """The time that this process has compiled for, and whether it has said so."""

    def __init__(self) -> None:
        self.lock, self.seconds, self.has_spoken = threading.Lock(), 0.0, False

    def speak(self) -> None:
        with self.lock:
            if self.has_spoken:
                return
            self.has_spoken = True
        print(LINE, file=sys.stderr, flush=True)


_clock = _Clock()


@contextmanager
def compiling() -> Iterator[None]:
    """Within, something is compiled, or what was compiled is loaded."""
    if _clock.has_spoken:
        yield
        return
    timer = threading.Timer(max(0.0, SECONDS - _clock.seconds), _clock.speak)
    timer.daemon = True
    timer.start()
    start = time.monotonic()
    try:
        yield
    finally:
        timer.cancel()
        with _clock.lock:
            _clock.seconds += time.monotonic() - start
