"""Every plan that the distance planners make is one that the kernels compute the right thing under."""

from dataclasses import replace

import pytest

from halfbyte.kernels.common.device import HOST, properties_for
from halfbyte.kernels.common.targets import CUDA_TARGETS
from halfbyte.kernels.distance import plan as plans

FACTS = [HOST, *(properties_for(f"sm_{target}") for target in CUDA_TARGETS)]


@pytest.mark.parametrize("dims", [0, 1, 17, 768, 4096, 16384])
def test_one_query(dims: int) -> None:
    for itemsize in (2, 4):
        assert plans.is_valid(plans.direct(dims, itemsize))


@pytest.mark.parametrize("queries", [2, 5, 64, 1000])
def test_several_queries(queries: int) -> None:
    for properties in FACTS:
        for itemsize in (2, 4):
            assert plans.is_valid(plans.products(queries, itemsize, properties))


def test_what_is_not_valid() -> None:
    assert not plans.is_valid(replace(plans.direct(4096, 2), rows=3))
    assert not plans.is_valid(replace(plans.direct(4096, 2), rows=64))
    assert not plans.is_valid(replace(plans.products(64, 2, HOST), rows=8))
    assert not plans.is_valid(replace(plans.products(64, 2, HOST), stages=0))
