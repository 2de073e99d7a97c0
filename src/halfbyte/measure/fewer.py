"""A GPU with fewer multiprocessors, for measurements: all others are held.

A grid with fewer CTAs is no smaller GPU. Two CTAs for each of 58 multiprocessors are dealt out to 116 of 132, so that
none shares one. Here CTAs that ask for all of a multiprocessor's shared memory take one each and only wait. What is
launched meanwhile has the rest, with all of the GPU's memory and L2 cache.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.common.driver import Launch, kernels
from halfbyte.kernels.common.nvrtc import Variant, read_source

LONGEST = 30.0  # seconds, after which multiprocessors are let go, so that a mistake does not stop the GPU for ever
START = 5.0  # seconds that may pass until all are held


@contextmanager
def only(sms: int, device: torch.device) -> Iterator[None]:
    """Leave to kernels of other streams so many multiprocessors of a GPU with 64 KiB of shared memory or more.

    Whoever waits for the whole device inside waits until LONGEST is over. So does what the driver does for such alone:
    loading kernels, freeing memory. Have run everything once before.

    Raises ValueError for a number that the GPU does not have, RuntimeError if multiprocessors cannot be held, as where
    other kernels still run, or were let go before the end.
    """
    properties = properties_of(device.index)
    if not 1 <= sms <= properties.sms:
        raise ValueError(f"the GPU has {properties.sms} multiprocessors: it cannot be kept to {sms}")
    if sms == properties.sms:
        yield
        return
    held = properties.sms - sms
    told = torch.zeros(2 + held, dtype=torch.int32, device="cpu", pin_memory=True)
    stream = torch.cuda.Stream(device)
    pointer, nanoseconds = ctypes.c_uint64(told.data_ptr()), ctypes.c_uint64(int(1e9 * LONGEST))
    parameters = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(nanoseconds))
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        launch = _launch(device.index)
        launch.set_grid(held, 1)
        launch(stream.cuda_stream, parameters)
    try:
        _wait_until_held(told[2:])
        yield
        if told[1]:
            raise RuntimeError(f"multiprocessors were let go after {LONGEST:g} s, while they were to be held")
    finally:
        told[0] = 1
        stream.synchronize()


def _wait_until_held(running: torch.Tensor) -> None:
    start = time.monotonic()
    while not running.all():
        if time.monotonic() - start > START:
            raise RuntimeError(f"{int(running.sum())} of {len(running)} multiprocessors could be held")


def variant(capability: int) -> Variant:
    """What is compiled."""
    path = Path(__file__).with_name("hold.cu")
    return Variant.of(read_source(path, root=path.parent), capability, {})


@cache
def _launch(index: int) -> Launch:
    properties = properties_of(index)
    (hold,) = kernels(index, variant(properties.capability), (("hold", properties.shared_memory),), carveout=100)
    return Launch(hold, (1, 1), 1, properties.shared_memory)
