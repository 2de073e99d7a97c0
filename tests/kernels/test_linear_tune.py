"""What was measured has one place, kernels/linear/tune, and planners go by it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from halfbyte.kernels.common.device import facts_for
from halfbyte.kernels.linear import cuda
from halfbyte.kernels.linear.operands import Operands
from halfbyte.kernels.linear.tune import h200

ROOT = Path(cuda.__file__).parent
PLANNERS = [ROOT / "cuda.py", *sorted(ROOT.glob("*/plan.py"))]


@pytest.mark.parametrize("path", PLANNERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_planners_hold_no_measured_number(path: Path) -> None:
    """They hold what follows from kernels and hardware alone. µs have a fraction, and sizes of W are shifted by 20 and
    more; a kernel's own limits are beyond these."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    fractions = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, float)}
    assert fractions <= {0.0}
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
    facts = facts_for("sm_90")
    small = Operands(torch.bfloat16, 4096, 4096, "nf4", 64, torch.uint8, nested=256)
    for limit, chosen in ((4096, True), (4095, False)):
        monkeypatch.setattr(h200, "DECODE_K_8", limit)
        monkeypatch.setattr(h200, "DECODE_SIZE_8", 0)
        cuda.choose.cache_clear()
        choice = cuda.choose(8, small, facts, False)
        assert choice is not None
        assert (choice.kernel is cuda.sm90_decode) is chosen
    cuda.choose.cache_clear()
