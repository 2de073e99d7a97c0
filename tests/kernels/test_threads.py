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
from numba import njit

from halfbyte.kernels.common import threads
from halfbyte.kernels.common.region import region
from halfbyte.kernels.common.threads import LIGHTER, parallel


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


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _count(begin: int, end: int, counts: np.ndarray, starts: np.ndarray, bad: int) -> None:
    starts[begin] = end
    for place in range(begin, end):
        if place == bad:
            raise ArithmeticError("no")
        counts[place] += 1


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _count_together(pieces, size, *arguments):  # type: ignore[no-untyped-def]
    return region(_count, pieces, size, arguments)


@given(size=st.integers(1, 1000), grain=st.integers(1, 300))
def test_a_region_covers_the_range_once(size: int, grain: int) -> None:
    """In pieces that are as small as a region makes worth it, and of the usual size where there is none."""
    counts, ends = np.zeros(size, int), np.zeros(size, int)
    parallel(_count, size, grain, counts, ends, -1, region=_count_together)
    assert (counts == 1).all()
    least = grain if threads._openmp() is None else max(1, grain // LIGHTER)
    assert np.count_nonzero(ends) == max(1, min(4, size // least))


@pytest.mark.parametrize("bad", [0, 17, 39])
def test_an_error_in_a_region_is_raised(bad: int) -> None:
    counts = np.zeros(40, int)
    with pytest.raises((MemoryError, ArithmeticError)):
        parallel(_count, 40, 10, counts, counts.copy(), bad, region=_count_together)
    assert counts[bad] == 0
    parallel(_count, 40, 10, counts, counts.copy(), -1, region=_count_together)


def test_regions_of_several_threads() -> None:
    counts = [np.zeros(1000, int) for _ in range(8)]
    callers = [
        threading.Thread(
            target=parallel, args=(_count, 1000, 10, one, one.copy(), -1), kwargs={"region": _count_together}
        )
        for one in counts
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((one == 1).all() for one in counts)


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
    counts, ends = np.zeros(40, int), np.zeros(40, int)
    parallel(lambda begin, end: done.append(begin), 40, 10)
    parallel(_count, 40, 10, counts, ends, -1, region=_count_together)
    child = os.fork()
    if child == 0:
        parallel(lambda begin, end: done.append(begin), 40, 10)
        parallel(_count, 40, 10, counts, ends, -1, region=_count_together)
        os._exit(0 if sorted(done) == [0, 0, 10, 10, 20, 20, 30, 30] and (counts == 2).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
