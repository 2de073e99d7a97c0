"""Two sequences of kernels, of the same step, set against each other.

A step that runs as it is tells for each kernel which module launched it. A replayed CUDA graph does not, and a step
that is timed should carry no marks. Both launch the same products in the same order, so labels are carried over along
the best common subsequence: equal names count most, and of unequal ones two products may still stand for each other
(a library may choose another kernel under capture). What has no counterpart, as fused kernels do, goes by its name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfbyte.roofline.names import UNNAMED, Label, by_name

SAME_PRODUCT, SAME, BOTH_PRODUCTS = 9, 2, 4


def align(known: Sequence[tuple[str, Label]], names: Sequence[str]) -> list[Label]:
    """The label of each of `names`, from a sequence of names with labels. Time and memory grow with both lengths."""
    if [name for name, _ in known] == list(names):
        return [label for _, label in known]
    pairs = dict(_matches(known, names))
    return [known[pairs[place]][1] if place in pairs else by_name(name) for place, name in enumerate(names)]


def _matches(known: Sequence[tuple[str, Label]], names: Sequence[str]) -> list[tuple[int, int]]:
    """(place in `names`, place in `known`) of what corresponds, by the weighted longest common subsequence."""
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(name, len(numbers)) for name, _ in known], np.int64)
    products = np.array([label.group == "products" for _, label in known], bool)
    same = np.where(products, SAME_PRODUCT, SAME).astype(np.int32)
    best = np.zeros((len(names) + 1, len(known) + 1), np.int32)
    rows = []
    for name in names:
        code = numbers.get(name, -1)
        score = np.where(codes == code, same, 0)
        if by_name(name) == UNNAMED:
            score = np.maximum(score, np.where(products, BOTH_PRODUCTS, 0))
        rows.append(score)
    for row, score in enumerate(rows):
        paired = best[row, :-1] + score
        best[row + 1, 1:] = np.maximum.accumulate(np.maximum(best[row, 1:], np.where(score > 0, paired, 0)))
    pairs = []
    i, j = len(names), len(known)
    while i and j:
        if best[i, j] == best[i, j - 1]:
            j -= 1
        elif best[i, j] == best[i - 1, j]:
            i -= 1
        else:
            pairs.append((i - 1, j - 1))
            i, j = i - 1, j - 1
    return pairs
