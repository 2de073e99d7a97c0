"""Pipeline parallel: each stage builds and loads its own layers, with the bytes that they have in the whole model.

vLLM's CPU build cannot run a pipeline, with dense models neither, so what is tested here is what comes before.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import environment, finish
from served_models import in_mxfp4

STAGES = Path(__file__).with_name("stages.py")


@pytest.fixture(scope="module")
def built(models: Callable[..., Path], cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each model: the whole, the first stage and the second."""
    folder = tmp_path_factory.mktemp("stages")
    paths = {  # the one with experts first, for whose processes vLLM makes more groups
        "gpt-oss": in_mxfp4(folder / "gpt-oss", models("gpt_oss"), "nf4"),
        "bitsandbytes": models("llama", "nf4", nested=True),
    }
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4}
    job = {"engines": [engine | {"model": str(path)} for path in paths.values()], "stages": 2}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, str(STAGES), str(folder / "job.json"), str(folder / "result.json")]
    finish(command, environment(cache), folder / "log")
    return dict(zip(paths, json.loads((folder / "result.json").read_text(encoding="utf-8")), strict=True))


@pytest.mark.parametrize("kind", ["bitsandbytes", "gpt-oss"])
def test_a_stage_has_its_own_layers(built: dict[str, Any], kind: str) -> None:
    whole, *stages = built[kind]
    assert not whole["left out"]
    names: set[str] = set()
    for number, stage in enumerate(stages):
        asked = [prefix for prefix, _ in stage["asked"]]
        assert asked == [prefix for prefix, _ in whole["asked"] if prefix in asked]
        assert {match[1] for prefix in asked if (match := re.search(r"layers\.(\d+)", prefix))} == {str(number)}
        assert f"model.layers.{1 - number}" in stage["left out"]
        assert not any(kind == "PPMissingLayer" for _, kind in stage["asked"])
        assert all(whole["digests"][name] == digest for name, digest in stage["digests"].items())
        assert not any(f"layers.{1 - number}." in name for name in stage["digests"])
        names |= set(stage["digests"])
    assert names == set(whole["digests"])
    assert any("nested_absmax" in name for name in names)
