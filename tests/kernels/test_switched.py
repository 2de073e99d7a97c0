"""What somebody needs off is off for all threads that do, and afterwards as it was."""

from __future__ import annotations

import threading

import pytest

from halfbyte.kernels.common.switched import SwitchedOff


class Lamp:
    def __init__(self) -> None:
        self.on = True
        self.off_inside = SwitchedOff(lambda: self.on, lambda on: setattr(self, "on", on))


def test_it_is_off_while_any_thread_is_inside() -> None:
    lamp, inside, may_end = Lamp(), threading.Event(), threading.Event()

    def other() -> None:
        with lamp.off_inside:
            inside.set()
            may_end.wait(10)

    thread = threading.Thread(target=other)
    with lamp.off_inside:
        thread.start()
        assert inside.wait(10)
        assert not lamp.on
    assert not lamp.on
    may_end.set()
    thread.join()
    assert lamp.on


def test_it_is_afterwards_as_it_was() -> None:
    lamp = Lamp()
    with pytest.raises(ValueError, match="failed"), lamp.off_inside:
        raise ValueError("failed")
    assert lamp.on
    lamp.on = False
    with lamp.off_inside:
        pass
    assert not lamp.on
