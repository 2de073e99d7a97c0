"""Runs tests/interpreter, where Triton kernels are interpreted on the CPU, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
PROCESSES = 2  # few, as each imports for seconds; more than one, for machines with several cores
FILES = sorted((Path(__file__).parents[1] / "interpreter").glob("test_*.py"))


@pytest.mark.parametrize("first", range(PROCESSES))
def test_interpreted(first: int) -> None:
    files = map(str, FILES[first::PROCESSES])
    command = [sys.executable, "-m", "pytest", *files, "-p", "no:cacheprovider", "-p", "no:randomly"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
