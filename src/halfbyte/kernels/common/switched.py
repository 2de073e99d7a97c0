"""What the whole process has one of, and somebody needs off for a while: other threads may need the same meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable


class SwitchedOff:
    """While any thread is inside, it is off; afterwards it is as it was before. is_on, switch: say and change that."""

    def __init__(self, is_on: Callable[[], bool], switch: Callable[[bool], None]) -> None:
        self.is_on, self.switch = is_on, switch
        self.lock = threading.Lock()
        self.inside = 0
        self.was_on = False

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.was_on = self.is_on()
                self.switch(False)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.switch(self.was_on)


# Python's garbage collector.
no_collection = SwitchedOff(gc.isenabled, lambda on: gc.enable() if on else gc.disable())
