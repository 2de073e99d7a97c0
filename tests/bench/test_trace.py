"""benchmarks/trace.py: marks of kernels become code that compiles, and times are told in their order."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from halfbyte.bench.predictions import problem, properties_named
from halfbyte.kernels.attention.sm90 import launch as attention
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_streamk import launch as streamk

from .conftest import BENCHMARKS, CPU, load_script

KERNELS = (decode, streamk, gemm, attention)
H200 = properties_named("NVIDIA H200")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return load_script("trace", monkeypatch)


@pytest.mark.parametrize("kernel", KERNELS)
def test_marks(kernel: ModuleType, script: ModuleType) -> None:
    source = kernel.source()
    marks = script.marks_of(source)
    assert {"begins", "ends"} <= set(marks)
    marked = script.with_marks(source, 1 << 40)
    assert "//:" not in marked
    assert "1099511627776ull" in marked
    assert [int(number) for number in re.findall(r"passed\((\d+), (?:true|false)\);", marked)] == [*range(len(marks))]
    assert set(source.splitlines()) - set(marked.splitlines()) == {
        m[0].strip("\n") for m in script.MARK.finditer(source)
    }


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 40, 600])
def test_marked_kernels_compile(m: int, script: ModuleType) -> None:
    """To another machine code than without marks."""
    one = problem("nf4", 64, True, 4096, 4096)
    norm = Fusion(norm=(1e-5, 0.0), activation="silu", static=True)
    fusion = replace(norm, norm=None) if m > 64 else norm
    kernel = {1: decode, 40: streamk, 600: gemm}[m]
    plan = kernel.plan_fused(m, (one, one), fusion, H200)
    found: list[object] = []
    with script.traced(found, CPU):
        marked = kernel.group_variant((one, one), plan, H200)
    plain = kernel.group_variant((one, one), plan, H200)
    assert marked.constants == plain.constants
    assert nvrtc.cubin(marked) != nvrtc.cubin(plain)
    (trace,) = found
    assert trace.marks == script.marks_of(plain.source)
    assert trace.name.startswith("decode, warps " if m == 1 else "lay_out and multiply, tile_m ")
    assert trace.times.shape == (len(trace.marks), script.CTAS, script.WARPS)


def test_only_what_is_bound_within_is_marked(script: ModuleType) -> None:
    found: list[object] = []
    one = problem("nf4", 64, True, 4096, 4096)
    plan = decode.plan(1, one, H200, False)
    with script.traced(found, CPU):
        assert "passed(" in decode.variant(one, plan, H200).source
        assert "passed(" in decode.variant(one, plan, H200).source
        assert Variant.of("nothing", 90, {}).source == "nothing"
    assert "passed(" not in decode.variant(one, plan, H200).source
    assert len(found) == 1


def test_order(script: ModuleType) -> None:
    def trace(name: str, **times: list[int]) -> object:
        every = torch.full((len(times), 2, 3), script.LATER)
        for row, some in zip(every, times.values(), strict=True):
            row.flatten()[: len(some)] = torch.tensor(some)
        return script.Trace(name, [*times], every)

    late = trace("late", ends=[9000, 9500], begins=[5000], nobody=[])
    early = trace("early", begins=[1000, 1500, 3000], ends=[7000])
    assert list(script.in_order([late, early])) == [
        ("early", "begins", [0.0, 0.5, 2.0]),
        ("early", "ends", [6.0]),
        ("late", "begins", [4.0]),
        ("late", "ends", [8.0, 8.5]),
    ]
