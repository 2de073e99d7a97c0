"""Runs tests/interpreter, where Triton kernels are interpreted on the CPU, each file in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
FILES = sorted((Path(__file__).parents[1] / "interpreter").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_interpreted(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(file), "-p", "no:cacheprovider", "-p", "no:randomly"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
