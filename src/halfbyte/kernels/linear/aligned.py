"""Products that copy rows of x by 16 bytes: where a row is no multiple of eight numbers, a second kernel of the same
source, `align` (device/align_rows.cuh), copies x ahead to rows that are."""

from __future__ import annotations

from typing import Protocol

from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.common.driver import Launch, kernels
from halfbyte.kernels.common.nvrtc import Variant


class AlignedPlan(Protocol):
    @property
    def ctas(self) -> int: ...
    @property
    def threads(self) -> int: ...


def pitch_of(length: int) -> int:
    """Numbers from a row of so many to the next where rows are aligned."""
    return -(-length // 8) * 8


def make_launches(index: int, plan: AlignedPlan, compiled: Variant) -> tuple[Launch, Launch]:
    """The product, and what aligns the rows of x."""
    shared = int(dict(compiled.constants)["shared_bytes"])
    multiply, align = kernels(index, compiled, (("multiply", shared), ("align", 0)), carveout=100)
    everywhere = 4 * properties_of(index).sms
    return Launch(multiply, (plan.ctas, 1), plan.threads, shared), Launch(align, (everywhere, 1), plan.threads)
