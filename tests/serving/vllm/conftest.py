"""Tests that need vLLM: `make test-vllm` runs them in an environment that has it. Nowhere else are they collected."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import served_models

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

ENGINE = Path(__file__).with_name("engine.py")
SECONDS = 200  # that an engine may take; a compiled one takes a minute here, two processes take one more


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


def environment(cache: Path, processes: int = 1) -> dict[str, str]:
    """Of a vLLM process on a small machine without a network: one thread each, a small cache, nothing shared."""
    fixed = {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if processes == 1 else "1",
    }  # fmt: skip
    if processes > 1:  # each on a core, or all on the only one
        cores = sorted(os.sched_getaffinity(0))
        fixed["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(processes))
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | fixed


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's cache: it looks into a model's class in a process of its own, and compiles, once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run_engine(tmp_path: Path, cache: Path) -> Callable[..., list[Any]]:
    """run_engine(checkpoint, steps, **arguments of LLM) in a process of its own; what each step gave (engine.py)."""

    def run(checkpoint: Path, *steps: str, adapter: Path | None = None, variables: Any = None, **arguments: Any) -> Any:
        engine = {
            "model": str(checkpoint), "dtype": "float32", "enforce_eager": True, "max_model_len": 128,
            "max_num_seqs": 4, "disable_log_stats": True, "seed": 0,
        } | arguments  # fmt: skip
        job = {
            "engine": engine, "prompts": served_models.PROMPTS, "new_tokens": served_models.NEW_TOKENS,
            "steps": steps or ("tokens",), "adapter": str(adapter),
        }  # fmt: skip
        (tmp_path / "job.json").write_text(json.dumps(job), encoding="utf-8")
        processes = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
        command = [sys.executable, str(ENGINE), str(tmp_path / "job.json"), str(tmp_path / "result.json")]
        variables = environment(cache, processes) | (variables or {})
        finish(command, variables, tmp_path / "log")
        return json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))

    return run


def finish(command: list[str], variables: dict[str, str], log: Path, seconds: float = SECONDS) -> None:
    """Run a command to its end, or end it and all its processes. Raises RuntimeError with its last words."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, start_new_session=True)
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"nothing after {seconds} s"
        finally:
            end(process)
    if code != 0:
        raise RuntimeError(f"{command[1]} gave {code}: {log.read_text(encoding='utf-8')[-8000:]}")


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and those that it started, which are of its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
