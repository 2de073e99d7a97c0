"""A case that needs no peer and no time, and the record of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfbyte.bench.case import Case, make_record, run, same_bits

CPU = torch.device("cpu")
FACTS = {"shape": [2, 3], "dtype": "bfloat16", "format": "nf4", "block_size": 64, "nested": True, "inputs": 2}


@pytest.fixture
def case() -> Callable[..., Case]:
    """Makes a case of the providers it is given, and of "bitsandbytes", which is right."""

    def make(name: str = "2×3", **providers: Callable[[int], Any]) -> Case:
        providers.setdefault("bitsandbytes", lambda index: torch.full((6,), float(index)))
        return Case(name, 6000, 2, providers, "bitsandbytes", same_bits, CPU, FACTS)

    return make


@pytest.fixture
def record(case: Callable[..., Case]) -> dict[str, Any]:
    """Two cases: one where all are right, one where "peft" is wrong."""

    def right(index: int) -> torch.Tensor:
        return torch.full((6,), float(index))

    first = case("2×3", halfbyte=right, peft=right)
    second = case("4×6", halfbyte=right, peft=lambda _: torch.full((6,), -1.0))
    return make_record("dequantize", CPU, [*run(first, 3), *run(second, 3)], copy=10.0)
