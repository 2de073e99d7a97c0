"""Measurements on a GPU with fewer multiprocessors: the others are held, and let go in the end."""

from __future__ import annotations

import time

import pytest
import torch

from halfbyte.kernels.common.device import properties_of
from halfbyte.measure import fewer

from .conftest import DEVICE

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _say_where(out, rounds):  # type: ignore[no-untyped-def]
    number = tl.program_id(0)
    value = number
    for _ in range(rounds):
        value = (value * 5 + 1) % 65537
    tl.store(out + number, tl.where(value < 0, -1, tl.extra.cuda.smid()))


def used() -> int:
    """Multiprocessors that a large grid runs on."""
    out = torch.zeros(20000, dtype=torch.int32, device=DEVICE)
    _say_where[(len(out),)](out, 1000)
    torch.cuda.current_stream().synchronize()
    return len(set(out.tolist()))


def test_others_are_held_and_let_go() -> None:
    every = properties_of(0).sms
    assert used() == every
    for sms in (every // 4, every - 1, 1, every):
        with fewer.only(sms, DEVICE):
            assert used() == sms
        assert used() == every


def test_nobody_holds_them_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fewer, "LONGEST", 0.05)
    with pytest.raises(RuntimeError, match=r"let go after 0\.05 s"), fewer.only(8, DEVICE):
        time.sleep(0.5)
    assert used() == properties_of(0).sms


def test_an_error_inside_lets_them_go() -> None:
    with pytest.raises(KeyError), fewer.only(8, DEVICE):
        raise KeyError
    assert used() == properties_of(0).sms
