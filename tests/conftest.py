"""What every test must leave as it found it: the state of the thread and of the device that the next test runs on."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# Property tests take the same examples in every run, so that one that fails is the fault of a change since the last.
# `make examples` looks for others. Some compile first, so none has a deadline.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("others", max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("same")

# Workers share the cores. Threads that outnumber them wait for each other, and small models take many times as long.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    threads = max(1, (os.cpu_count() or 1) // int(workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # for the processes that tests start
    torch.set_num_threads(threads)

# A shell that starts a suite in the background has it ignore Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker is left alone with it in the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


MODULES = 300  # so many new ones are left out of collections from then on
_modules = 0  # when that was done last


def pytest_runtest_logfinish() -> None:
    """What libraries define is not looked at again in every collection. Benches collect often, half a second each."""
    global _modules
    if len(sys.modules) >= _modules + MODULES:
        _modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_the_thread_as_it_was() -> Iterator[None]:
    before = _state()
    yield
    assert _state() == before
    if torch.cuda.is_initialized():  # a generator that believes it is being captured refuses
        torch.empty(1, device="cuda").normal_()


@pytest.fixture(autouse=True)
def _halfbyte_is_the_faster_one(
    _leaves_the_thread_as_it_was: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU with AVX512-BF16 `accelerate` would leave bitsandbytes' layers alone, and there were nothing to test."""
    if {"models", "bench", "roofline"} & set(request.path.parts):
        monkeypatch.setattr("halfbyte.models.bitsandbytes.is_faster", lambda facts: False)


def _state() -> dict[str, Any]:
    found: dict[str, Any] = {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "threads": torch.get_num_threads(),
        "modes": torch._C._len_torch_dispatch_stack(),
    }
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.current_device()
        found["streams"] = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]
        found["capturing"] = torch.cuda.is_current_stream_capturing()
    return found
