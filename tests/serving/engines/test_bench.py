"""`halfbyte bench engine` over vLLM itself, with its engine in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import environment, finish

from halfbyte.bench import engine_trace
from halfbyte.measure import records
from halfbyte.measure.models import SHAPES

LAYERS = SHAPES["tiny-moe"][1]["num_hidden_layers"]
SECONDS = 200.0  # that an engine may take; one alone takes 30 on two free cores
pytestmark = pytest.mark.timeout(3 * SECONDS + 60)


def bench(tmp_path: Path, cache: Path, *options: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "halfbyte", "bench", "engine", "--requests", "3", "--prompt-tokens", "16"]
    # Not bfloat16: on a CPU with AMX, vLLM 0.32's attention then ends with an illegal instruction for two query heads a
    # key head, as these models have.
    command += ["--new-tokens", "12", "--eager", "--dtype", "float32", "--limit", str(SECONDS)]
    command += ["--out", str(tmp_path), *options]
    variables = environment(cache, 2) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    del variables["VLLM_ENABLE_V1_MULTIPROCESSING"]  # which is as users have it
    finish(command, variables, tmp_path / "log", 3 * SECONDS)
    (path,) = tmp_path.glob("*/engine.json")
    rows: list[dict[str, object]] = records.read(path)["rows"]
    return rows


def test_beside_bitsandbytes(tmp_path: Path, cache: Path) -> None:
    """Where this vLLM has no bitsandbytes of its own, or its package is not there, the record says so."""
    theirs, ours = bench(tmp_path, cache, "--model", "tiny", "--providers", "halfbyte,bitsandbytes")
    assert (theirs["provider"], ours["provider"]) == ("bitsandbytes", "halfbyte")
    if "left_out" in theirs:
        assert "bitsandbytes" in str(theirs["left_out"])
    else:
        assert ours["same_first"] == 1.0
    assert ours["requests"] == 3
    assert float(str(ours["tokens_per_s"])) > 0
    assert ours["methods"]["HalfbyteLinearMethod"] == [  # type: ignore[index]
        "down_proj", "gate_up_proj", "o_proj", "qkv_proj",
    ]  # fmt: skip


def test_experts_and_a_trace(tmp_path: Path, cache: Path) -> None:
    """For which the engine is in the process that asks it."""
    trace = tmp_path / "trace.json"
    (row,) = bench(tmp_path, cache, "--model", "tiny-moe", "--providers", "halfbyte", "--trace", str(trace))
    assert "HalfbyteExpertsMethod" in row["methods"]  # type: ignore[operator]
    assert float(str(row["different_tokens"])) > 1
    found = json.loads(trace.read_text(encoding="utf-8"))
    assert found[0][1] == 0
    steps = sum(name == "vllm::unified_attention_with_output" for name, _, _ in found) // LAYERS
    assert 1 <= steps <= engine_trace.STEPS
