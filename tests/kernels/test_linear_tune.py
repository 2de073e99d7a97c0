"""What was measured has one place, kernels/linear/tune, and planners go by it."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfbyte.kernels.common.device import DeviceProperties, properties_for, properties_like
from halfbyte.kernels.common.gpus import GPUS, Gpu
from halfbyte.kernels.linear import dispatch
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm80 import launch as sm80
from halfbyte.kernels.linear.sm90_decode.plan import decode_plan
from halfbyte.kernels.linear.tune import h200

ROOT = Path(dispatch.__file__).parent
OTHERS = ("dispatch.py", "spread.py", "sm80/invariant.py", "sm90_decode/routed.py")
PLANNERS = [
    *(path for name in ("plan", "shape", "times") for path in sorted(ROOT.glob(f"*/{name}.py"))),
    *(ROOT / name for name in OTHERS),
]


@pytest.mark.parametrize("path", PLANNERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_planners_hold_no_measured_number(path: Path) -> None:
    """They hold what follows from kernels and hardware alone. µs have a fraction, all but a million; and sizes of W are
    shifted by 20 and more; a kernel's own limits are beyond these."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    fractions = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, float)}
    assert fractions <= {0.0, 1e6}
    shifts = [node.right for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift)]
    assert not {by.value for by in shifts if isinstance(by, ast.Constant)} & set(range(20, 26))


def test_every_constant_is_in_use() -> None:
    used = {
        node.attr
        for path in (*PLANNERS, ROOT / "grouped.py", ROOT / "laid_out.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "h200"
    }
    assert used == {name for name in vars(h200) if name.isupper()}


def test_the_choice_follows_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all kernels, and of the dense way, the one whose time is least."""
    properties = properties_for("sm_90")
    small = Problem(torch.bfloat16, 4096, 4096, "nf4", 64, torch.uint8, nested=256)
    decode, streamk = dispatch.sm90_decode, dispatch.sm90_streamk
    assert _chosen(8, small, properties) is decode
    slow = {m_tiles: times._replace(start=1000.0) for m_tiles, times in h200.DECODE_TIMES.items()}
    monkeypatch.setattr(h200, "DECODE_TIMES", slow)
    assert _chosen(8, small, properties) is streamk
    for start, chosen in ((1000.0, dispatch.sm90_gemm), (0.0, None)):
        monkeypatch.setattr(h200, "DENSE_START", start)
        monkeypatch.setattr(h200, "DENSE_TERAFLOPS", 1e9)
        assert _chosen(512, small, properties) is chosen


def _chosen(m: int, problem: Problem, properties: DeviceProperties) -> object:
    dispatch.choose.cache_clear()
    decode_plan.cache_clear()
    choice = dispatch.choose(m, problem, properties, False)
    dispatch.choose.cache_clear()
    decode_plan.cache_clear()
    return None if choice is None else choice.kernel


def test_the_dense_way_is_for_many_rows() -> None:
    """From some number of rows on, which depends on the weight; on Turing from a fixed one on."""
    large = Problem(torch.float16, 4096, 14336, "nf4", 64, torch.uint8, nested=256)
    for target, rows in (("sm_90", 128), ("sm_80", 64), ("sm_75", h200.SM75_ROWS)):
        assert dispatch.choose(rows, large, properties_for(target), False) is not None
        assert dispatch.choose(1 << 14, large, properties_for(target), False) is None
        assert dispatch.choose(256, large, properties_for(target), True) is not None
    assert dispatch.choose(h200.SM75_ROWS + 1, large, properties_for("sm_75"), False) is None


def test_what_is_superseded_is_not_asked() -> None:
    """sm80 takes sm75's place wherever it supports a problem, and Hopper's own kernels take sm80's."""
    known = Problem(torch.bfloat16, 4096, 4096, "nf4", 64, torch.uint8, nested=256)
    for problem, target, name in (
        (known, "sm_80", "sm80"),
        (replace(known, align_packed=8), "sm_80", "sm75"),
        (known, "sm_90", "sm90_streamk"),
        (Problem(torch.float16, 4096, 4096, "mxfp4", 32, torch.uint8), "sm_90", "sm80"),
    ):
        choice = dispatch.choose(40, problem, properties_for(target), False)
        assert choice is not None
        assert name == choice.kernel.NAME
    invariant = dispatch.choose(40, known, properties_for("sm_80"), True)
    assert invariant is not None
    assert invariant.kernel.NAME == "sm80"


LARGE = Problem(torch.float16, 14336, 4096, "nf4", 64, torch.uint8, nested=256)
gpus = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)


def test_every_hopper_gpu_chooses_as_an_h200() -> None:
    """Whatever its memory and clock, to the estimate: an H100 has the machine code that it always had."""
    h200 = properties_for("sm_90")
    other = replace(h200, bandwidth=2000.0, clock=1755.0, l2_bytes=1 << 20, teraflops=700.0)
    pair = (LARGE, LARGE)
    for n, k in ((1024, 4096), (14336, 4096), (14335, 4096), (4096, 1000)):
        problem = replace(LARGE, n=n, k=k)
        for m in (1, 8, 24, 64, 200, 600, 5000):
            chosen = [dispatch.choose(m, problem, properties, False) for properties in (h200, other)]
            back = [dispatch.choose_back(m, problem, properties) for properties in (h200, other)]
            for one, same in (chosen, back):
                assert one == same
                assert one is None or one.plan.microseconds == same.plan.microseconds
    for m in (1, 16, 64):
        assert dispatch.choose_group(m, pair, h200) == dispatch.choose_group(m, pair, other)


@gpus
def test_estimates_follow_the_gpu(gpu: Gpu) -> None:
    """One that is half as fast takes twice as long, all but starts and fix-ups; and none reads W faster than memory."""
    whole = properties_like(gpu)
    half = replace(whole, bandwidth=whole.bandwidth / 2, clock=whole.clock / 2, teraflops=whole.teraflops / 2)
    starts = {dispatch.sm75: h200.SM75_START, dispatch.simt: h200.SIMT_START, sm80: h200.SM80_START}
    for m in (1, 16, 64, 300):
        dense = [dispatch.dense_microseconds(m, LARGE, properties) - h200.DENSE_START for properties in (whole, half)]
        assert dense[1] == pytest.approx(2 * dense[0])
        for kernel in (*dispatch.KERNELS, sm80):
            fast, slow = (kernel.plan(m, LARGE, properties, False) for properties in (whole, half))
            if fast is None or slow is None:
                assert fast is slow is None
                continue
            assert fast.microseconds > LARGE.numel / 2e3 / whole.bandwidth
            start = starts.get(kernel, 0.0)
            ratio = (slow.microseconds - start) / (fast.microseconds - start)
            assert 1.3 < ratio < 2.0001
            if kernel in (dispatch.sm75, dispatch.simt):
                assert ratio == pytest.approx(2)


@gpus
def test_a_kernel_with_a_trusted_estimate_meets_the_dense_way(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number of rows is drawn in advance: the kernel serves as many as it is estimated to be fast enough for."""
    properties = properties_like(gpu)
    fitted = properties.as_fitted
    if properties.ptx < 80:
        pytest.skip("sm80 is not for it")
    monkeypatch.setattr(dispatch, "KERNELS", (sm80,))
    dispatch.choose.cache_clear()
    for m in (1, 64, 128, 256, 512, 1024, 2048, 8192):
        choice = dispatch.choose(m, LARGE, properties, False)
        plan = sm80.plan(m, LARGE, fitted, False)
        assert plan is not None
        most = h200.DENSE_GAIN * dispatch.dense_microseconds(m, LARGE, fitted)
        assert (choice is not None) == (plan.microseconds <= most)
        assert choice is not None or m > 64
    dispatch.choose.cache_clear()


def test_a_group_is_no_way_around_the_dense_one() -> None:
    """Several weights of one x are fused for few rows, and left to torch where each of them is."""
    group = tuple(Problem(torch.bfloat16, n, 4096, "nf4", 64, torch.uint8, nested=256) for n in (14336, 14336))
    for target in ("sm_80", "sm_90"):
        assert dispatch.choose_group(1 << 13, group, properties_for(target)) is None
    choice = dispatch.choose_group(1, group, properties_for("sm_90"))
    assert choice is not None
    assert choice.kernel is dispatch.sm90_decode
