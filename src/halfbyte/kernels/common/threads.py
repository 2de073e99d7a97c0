"""Run a numba kernel on several threads, as many as torch uses."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch


def parallel(kernel: Any, size: int, grain: int, *arguments: Any) -> None:
    """kernel(begin, end, *arguments) over range(size), in pieces of at least `grain`, at most one a torch thread.

    Not on numba's own threads: where there is no OpenMP, those abort the process when two Python threads call at once.
    """
    pieces = max(1, min(torch.get_num_threads(), size // grain))
    edges = [size * piece // pieces for piece in range(pieces + 1)]
    others = [_pool().submit(kernel, begin, end, *arguments) for begin, end in pairwise(edges[1:])]
    kernel(0, edges[1], *arguments)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="halfbyte")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
