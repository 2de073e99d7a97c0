"""`parallel` covers a range exactly once, in pieces of a grain at least, with torch's OpenMP threads and with its own.

It survives errors, forks and several callers.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.kernels.common import threads
from halfbyte.kernels.common.threads import parallel


@pytest.fixture(autouse=True, params=["openmp", "pool"], scope="module")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    if request.param == "openmp" and threads._openmp() is None:
        pytest.skip("torch brings no GNU OpenMP here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pool":
            patch.setattr(threads, "_openmp", lambda: None)
        torch.set_num_threads(4)
        yield
    torch.set_num_threads(before)


@given(size=st.integers(0, 1000), grain=st.integers(1, 300))
def test_covers_the_range_once(size: int, grain: int) -> None:
    counts, pieces = np.zeros(size, int), []

    def kernel(begin: int, end: int, counts: np.ndarray) -> None:
        counts[begin:end] += 1
        pieces.append(end - begin)

    parallel(kernel, size, grain, counts)
    assert (counts == 1).all()
    assert len(pieces) == max(1, min(4, size // grain))
    assert len(pieces) == 1 or min(pieces) >= grain


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_an_error_in_any_piece_is_raised(bad: int) -> None:
    def kernel(begin: int, end: int) -> None:
        if begin <= 10 * bad < end:
            raise ArithmeticError("no")

    with pytest.raises(ArithmeticError, match="no"):
        parallel(kernel, 40, 10)


def test_called_from_several_threads() -> None:
    done: list[int] = []
    arguments = (lambda begin, end: done.extend(range(begin, end)), 40, 10)
    callers = [threading.Thread(target=parallel, args=arguments) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(done) == sorted(8 * list(range(40)))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_works_after_a_fork() -> None:
    """The pool's threads are not in the child, which makes its own."""
    done: list[int] = []
    parallel(lambda begin, end: done.append(begin), 40, 10)
    child = os.fork()
    if child == 0:
        parallel(lambda begin, end: done.append(begin), 40, 10)
        os._exit(0 if sorted(done) == [0, 0, 10, 10, 20, 20, 30, 30] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
