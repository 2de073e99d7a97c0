"""Who waits for a compiler is told so, once, and only when it takes long."""

import time

import pytest

from halfbyte.kernels.common import patience


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_clock", patience._Clock())
    monkeypatch.setattr(patience, "SECONDS", 0.2)


def test_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with patience.compiling():
            time.sleep(0.4)
    assert capfd.readouterr() == ("", patience.LINE + "\n")


def test_short_waits_add_up(capfd: pytest.CaptureFixture[str]) -> None:
    with patience.compiling():
        time.sleep(0.05)
    assert capfd.readouterr().err == ""
    for _ in range(4):
        with patience.compiling():
            time.sleep(0.07)
    assert capfd.readouterr().err == patience.LINE + "\n"


def test_an_error_ends_the_waiting(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), patience.compiling():
        raise RuntimeError
    time.sleep(0.4)
    assert capfd.readouterr().err == ""
