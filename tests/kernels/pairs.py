"""Cases in which every two values of different parameters meet: as many as that takes, instead of the whole product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any

import pytest


def every_pair(values: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrizes a test. values: by the name of a parameter; by several, "n, k", tuples."""
    lists, several = [*values.values()], [", " in name for name in values]
    cases = [
        [*chain.from_iterable(one if many else [one] for many, one in zip(several, case, strict=True))]
        for case in ([every[i] for every, i in zip(lists, row, strict=True)] for row in covering([*map(len, lists)]))
    ]
    return pytest.mark.parametrize(", ".join(values), cases, ids=str)


def covering(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of indices below `counts`. Each is the first of those with most pairs that no row before it has."""
    places, every = [*combinations(range(len(counts)), 2)], [*product(*map(range, counts))]
    missing = {(a, row[a], b, row[b]) for row in every for a, b in places}
    rows = []
    while missing:
        row = max(every, key=lambda row: sum((a, row[a], b, row[b]) in missing for a, b in places))
        missing -= {(a, row[a], b, row[b]) for a, b in places}
        rows.append(row)
    return rows
