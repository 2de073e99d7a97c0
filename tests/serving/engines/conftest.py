"""Tests that need vLLM: `make test-vllm` runs them in an environment that has it. Nowhere else are they collected."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import served_models
from processes import environment, finish

from halfbyte.serving.choice import is_installed

collect_ignore_glob = [] if is_installed("vllm") else ["test_*.py"]

ENGINE = Path(__file__).with_name("engine.py")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """models(kind, format=None, **settings): the folder of a checkpoint, made when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(kind: str, format: str | None = None, **settings: Any) -> Path:
        name = "-".join(map(str, (kind, format or "dense", *sorted(settings.items()))))
        if name not in made:
            path = folder / str(len(made))
            made[name] = path
            if format is None:
                served_models.dense(path, kind)
            else:
                served_models.quantized(path, get(kind), format, **settings)
        return made[name]

    return get


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's, for all workers: it looks into a model's class in a process of its own, and compiles, once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "vllm-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def run_engine(tmp_path: Path, cache: Path) -> Callable[..., list[Any]]:
    """run_engine(checkpoint, steps, **arguments of LLM) in a process of its own; what each step gave (engine.py)."""

    def run(
        checkpoint: Path, *steps: str, adapter: Path | None = None, variables: Any = None, fuses: bool = False,
        **arguments: Any,
    ) -> Any:  # fmt: skip
        engine = {
            "model": str(checkpoint), "dtype": "float32", "enforce_eager": True, "max_model_len": 128,
            "max_num_seqs": 4, "disable_log_stats": True, "seed": 0,
        } | arguments  # fmt: skip
        job = {
            "engine": engine, "prompts": served_models.PROMPTS, "new_tokens": served_models.NEW_TOKENS,
            "steps": steps or ("tokens",), "adapter": str(adapter), "fuses": fuses,
        }  # fmt: skip
        (tmp_path / "job.json").write_text(json.dumps(job), encoding="utf-8")
        processes = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
        command = [sys.executable, str(ENGINE), str(tmp_path / "job.json"), str(tmp_path / "result.json")]
        variables = environment(cache, processes) | (variables or {})
        finish(command, variables, tmp_path / "log")
        return json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))

    return run
