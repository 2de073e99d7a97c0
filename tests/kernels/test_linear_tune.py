"""What was measured has one place, kernels/linear/tune, and planners go by it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from halfbyte.kernels.common.device import DeviceProperties, properties_for
from halfbyte.kernels.linear import dispatch
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_decode.plan import decode_plan
from halfbyte.kernels.linear.tune import h200

ROOT = Path(dispatch.__file__).parent
PLANNERS = [ROOT / "dispatch.py", *sorted(ROOT.glob("*/plan.py"))]


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
        for path in PLANNERS
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
    """On Hopper from some number of rows on, which depends on the weight; elsewhere from a fixed one on."""
    large = Problem(torch.bfloat16, 4096, 14336, "nf4", 64, torch.uint8, nested=256)
    for target, rows in (("sm_90", 128), ("sm_80", h200.SM75_ROWS)):
        assert dispatch.choose(rows, large, properties_for(target), False) is not None
        assert dispatch.choose(1 << 14, large, properties_for(target), False) is None
        assert dispatch.choose(256, large, properties_for(target), True) is not None
    assert dispatch.choose(h200.SM75_ROWS + 1, large, properties_for("sm_80"), False) is None


def test_a_group_is_no_way_around_the_dense_one() -> None:
    """Several weights of one x are fused for few rows, and left to torch where each of them is."""
    group = tuple(Problem(torch.bfloat16, n, 4096, "nf4", 64, torch.uint8, nested=256) for n in (14336, 14336))
    for target in ("sm_80", "sm_90"):
        assert dispatch.choose_group(1 << 13, group, properties_for(target)) is None
    choice = dispatch.choose_group(1, group, properties_for("sm_90"))
    assert choice is not None
    assert choice.kernel is dispatch.sm90_decode
