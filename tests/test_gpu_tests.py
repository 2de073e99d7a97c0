"""Tests of GPUs, which no CI runs: what they call is there, and takes what they give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Not what mypy says of types: of what may be None, or of what an operator takes, tests know more.
WRONG = re.compile(
    'Missing positional argument|Unexpected keyword argument|Module ".*" has no attribute|is not defined'
)
SETTINGS = """
[mypy]
explicit_package_bases = true
ignore_missing_imports = true
[mypy-numpy.*,torch.*,transformers.*,triton.*,vllm.*,bitsandbytes.*,peft.*,accelerate.*,hypothesis.*,pytest.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_calls_are_those_of_today(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS)
    monkeypatch.setenv("MYPYPATH", f"{TESTS}:{TESTS.parent / 'src'}")
    monkeypatch.chdir(TESTS.parent)
    told, failed, _ = api.run(["--config-file", str(settings), "--cache-dir", str(tmp_path), str(TESTS / "gpu")])
    assert not failed
    assert "checked" in told  # all files were
    assert not [line for line in told.splitlines() if WRONG.search(line)]
