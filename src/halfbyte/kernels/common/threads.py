"""Run a numba kernel on several threads, as many as torch uses and, where torch has GNU OpenMP, the very same ones.

Threads of OpenMP keep turning for some milliseconds after a product or a copy of torch's, waiting for more to do.
Threads of our own would wait for those: measured on two cores, right after an F.linear, they take twice the time. After
a pause it is the other way round, for torch as for us: a thread of OpenMP that sleeps takes milliseconds to wake.
Numba's threads are no answer: where there is no OpenMP, they abort the process when two Python threads call at once.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import llvmlite.binding
import torch

from halfbyte.kernels.common.region import START

OUT_OF_MEMORY = "a thread of a CPU kernel ran out of memory"
# Where a kernel has a region, pieces of so many times less work are worth a thread.
LIGHTER = 4


def parallel(kernel: Any, size: int, grain: int, *arguments: Any, region: Any = None) -> None:
    """kernel(begin, end, *arguments) over range(size), in pieces of at least `grain`, at most one a torch thread.

    region: of the kernel (region.py), a function of (pieces, size, *arguments). Python then has no part in it: threads
    begin in 5 µs instead of 50."""
    openmp = _openmp()
    pieces = pieces_of(size, grain, region is not None)
    if pieces == 1:
        kernel(0, size, *arguments)
    elif openmp is None:
        _in_pool(kernel, _edges(size, pieces), arguments)
    elif region is None:
        _in_openmp(openmp, kernel, _edges(size, pieces), arguments)
    elif not region(pieces, size, *arguments):
        raise MemoryError(OUT_OF_MEMORY)


def pieces_of(size: int, grain: int, has_region: bool) -> int:
    """Into how many pieces `parallel` divides range(size)."""
    if has_region and has_regions():
        grain = max(1, grain // LIGHTER)
    return max(1, min(torch.get_num_threads(), size // grain))


def has_regions() -> bool:
    """Whether threads begin in machine code here, where a kernel has a region for that."""
    return _openmp() is not None


def _edges(size: int, pieces: int) -> list[tuple[int, int]]:
    return list(pairwise(size * piece // pieces for piece in range(pieces + 1)))


def _in_openmp(openmp: ctypes.CDLL, kernel: Any, pieces: list[tuple[int, int]], arguments: Sequence[Any]) -> None:
    """A parallel region as compilers make it. A team may be smaller than asked for, so whoever is done takes more."""
    errors: list[BaseException] = []
    left = iter(pieces)

    def work(_: object) -> None:
        try:
            while (piece := next(left, None)) is not None:
                kernel(*piece, *arguments)
        except BaseException as error:
            errors.append(error)

    openmp.GOMP_parallel(_CALLBACK(work), None, ctypes.c_uint(len(pieces)), ctypes.c_uint(0))
    if errors:
        raise errors[0]


def _in_pool(kernel: Any, pieces: list[tuple[int, int]], arguments: Sequence[Any]) -> None:
    others = [_pool().submit(kernel, *piece, *arguments) for piece in pieces[1:]]
    kernel(*pieces[0], *arguments)
    for other in others:
        other.result()


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forked = False


@cache
def _openmp() -> ctypes.CDLL | None:
    """The GNU OpenMP that torch brings, or None: on other systems, and in a forked child, where it hangs."""
    if _forked or sys.platform != "linux":
        return None
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        library = ctypes.CDLL(str(path))
        if hasattr(library, START):
            address = ctypes.cast(getattr(library, START), ctypes.c_void_p).value
            llvmlite.binding.add_symbol(START, address)
            return library
    return None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="halfbyte")


def _after_fork() -> None:
    global _forked
    _forked = True
    _pool.cache_clear()
    _openmp.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
