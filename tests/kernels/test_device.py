"""What planners know of a device: from itself, from the table of known GPUs, or from the one that is most like it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.kernels.common import gpus
from halfbyte.kernels.common.device import HOST, DeviceProperties, Rates, properties_for, properties_like, told
from halfbyte.kernels.common.targets import CUDA_TARGETS

ONES = Rates()


def facts_of(name: str, capability: int, sms: int, shared: int = 101376, **more: int) -> Any:
    """As torch tells them."""
    return SimpleNamespace(
        name=name, major=capability // 10, minor=capability % 10, multi_processor_count=sms,
        shared_memory_per_block_optin=shared, **more,
    )  # fmt: skip


def test_the_table_agrees_with_itself() -> None:
    """Flops are those of multiprocessors at the boost clock, or a little lower: a power of two in each cycle."""
    for gpu in gpus.GPUS:
        cycle = 512 if gpus.GEFORCE in gpu.name else {75: 1024, 80: 2048, 90: 4096, 100: 8192}.get(gpu.capability, 1024)
        assert 0.9 < gpu.teraflops * 1e6 / (cycle * gpu.sms * gpu.clock) < 1.01, gpu.name
        assert gpu.block_shared <= gpu.sm_shared
    assert len({gpu.name for gpu in gpus.GPUS}) == len(gpus.GPUS)
    assert set(gpus.COMMON) == set(CUDA_TARGETS)


def test_the_gpu_that_is_most_like_one() -> None:
    assert gpus.nearest(89, "NVIDIA L4").name == "NVIDIA L4"
    assert gpus.nearest(89, "NVIDIA GeForce RTX 4060").name == "NVIDIA GeForce RTX 4090"
    assert gpus.nearest(86, "NVIDIA GeForce RTX 3060").name == "NVIDIA GeForce RTX 3090"
    assert gpus.nearest(86, "NVIDIA RTX A4000").name == "NVIDIA A40"
    assert gpus.nearest(86, sms=72).name == "NVIDIA A10"
    assert gpus.nearest(103, "NVIDIA B300").capability == 100
    assert gpus.nearest(70, "Tesla V100").capability == 75


def test_what_the_device_says_goes_first() -> None:
    said = facts_of(
        "NVIDIA GeForce RTX 4090", 89, 128, clock_rate=2_610_000, memory_clock_rate=10_501_000, memory_bus_width=384,
        L2_cache_size=75_497_472,
    )  # fmt: skip
    found = told(said)
    assert found.bandwidth == pytest.approx(1008, rel=1e-3)
    assert found.clock == 2610
    assert found.l2_bytes == 72 << 20
    assert found.teraflops == pytest.approx(165.2 * 2610 / 2520)
    assert (found.ptx, found.sms, found.shared_memory) == (89, 128, 101376)


def test_older_torch_leaves_the_table() -> None:
    assert told(facts_of("NVIDIA L4", 89, 58)) == properties_like(gpus.nearest(89, "NVIDIA L4"))
    half = told(facts_of("NVIDIA GeForce RTX 3050", 86, 41))
    assert half.teraflops == pytest.approx(71.0 / 2)
    assert half.bandwidth == 936


def test_defaults_are_a_common_gpus() -> None:
    """Properties that name no rates are those of the table, so that what is compiled ahead is what is chosen later."""
    for target in CUDA_TARGETS:
        known = properties_for(f"sm_{target}")
        assert known == DeviceProperties("cuda", target, known.sms, known.shared_memory)
        assert min(known.bandwidth, known.clock, known.l2_bytes, known.teraflops) > 0
    assert properties_for("sm_89", 58).bandwidth == 300
    assert properties_for("sm_89", 40).bandwidth == 1008
    assert properties_for("sm_80", 54).teraflops == pytest.approx(156)
    for properties in (HOST, DeviceProperties("hip", 0, 304)):
        assert properties.rates == ONES
        assert properties.as_fitted == properties


def test_rates_are_over_those_of_an_h200() -> None:
    h200, h100 = properties_for("sm_90"), properties_like(gpus.nearest(90, "NVIDIA H100 80GB HBM3"))
    assert h200.rates == h200.as_fitted.rates == h100.as_fitted.rates == ONES
    assert h100.rates == ONES._replace(bandwidth=3350 / 4800, l2=50 / 60)
    assert h100.as_fitted == replace(h100, fitted=True)
    t4 = properties_for("sm_75")
    assert t4.as_fitted == t4
    assert t4.rates.cores == pytest.approx(40 * 1590 / (132 * 1980))
    limited = h200.limited(33)
    assert (limited.sms, limited.teraflops, limited.bandwidth) == (33, h200.teraflops / 4, h200.bandwidth)
