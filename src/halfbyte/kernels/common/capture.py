"""The one place that captures a CUDA graph: whatever happens inside, the thread is afterwards as it was.

Where a capture fails, `torch.cuda.graph` raises while it ends the capture and gets no further. The capture's stream
stays the thread's current one, so the next kernels race with all that others launch on the default stream. The
allocator goes on asking whether memory belongs to the capture. The default generator believes that it is being
captured, and refuses the next random number.

Python's garbage collector rests meanwhile. It may find an old CUDA graph in a circle of references, and to destroy a
graph in the thread that captures another one ends that capture with an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from halfbyte.kernels.common import workspace
from halfbyte.kernels.common.switched import no_collection

_streams: dict[int, torch.cuda.Stream] = {}  # that capture, by device; torch's own is on the device that captured first


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what runs inside into `graph`, on the current device and a stream of its own.

    pool: a handle of `torch.cuda.graph_pool_handle`; by default a new one.

    Raises what the inside raises, or the RuntimeError with which CUDA refused to capture it.
    """
    stream, pool = torch.cuda.current_stream(), pool or torch.cuda.graph_pool_handle()
    captures = _streams.get(stream.device_index) or _streams.setdefault(stream.device_index, torch.cuda.Stream())
    try:
        with no_collection, torch.cuda.graph(graph, pool=pool, stream=captures, capture_error_mode="thread_local"):
            yield
    except BaseException:
        if torch.cuda.current_stream() != stream:
            torch.cuda.set_stream(stream)
            _end(pool)
        raise
    finally:
        workspace.forget_capture()


def _end(pool: tuple[int, int]) -> None:
    """Let the allocator and the default generator of the current device forget a capture that failed.

    The generator does when a capture ends in which it took part, so an empty one that succeeds follows the one that did
    not. Its seed and its offset stay what they were.
    """
    device = torch.cuda.current_device()
    for forget in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with suppress(RuntimeError):  # the capture failed before it began with this, or ended it
            forget(device, pool)
    with suppress(RuntimeError):  # nothing more can be done, and the reason is on its way already
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
            nothing = torch.empty(1, dtype=torch.uint8, device="cuda")
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                nothing.zero_()
            finally:
                graph.capture_end()
