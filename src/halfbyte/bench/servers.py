"""Servers for a bench: halfbyte's, and the same engine without it. Each is a group of processes, ended as a whole."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from halfbyte.bench.load import HOST
from halfbyte.serving.choice import TRANSFORMERS, VLLM
from halfbyte.serving.transformers_server import CPU_MEMORY

PATIENCE = 600.0  # seconds until a server answers
FAREWELL = 30.0  # seconds from SIGTERM to SIGKILL

_ERROR = re.compile("Error|Value error|Fatal Python error")  # pydantic's, below a line that says only where; a signal
# No error; those of vLLM whose reason another process told before; a line of code in a traceback.
_ELSEWHERE = re.compile(r"WARNING|root cause above|\(above\) for the root cause|RuntimeError: cancelled|^\s*raise ")
_PREFIX = re.compile(r"^\(\w+ pid=\d+\)\s+(\w+ [\d-]+ [\d:]+ \[\S+\] )?")  # of vLLM's lines: who, how bad, when, where


def with_halfbyte(
    engine: str, model: str, port: int, dtype: str, more: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The command of `halfbyte serve`, and the variables that it needs."""
    command = [sys.executable, "-m", "halfbyte", "serve", model, "--engine", engine, "--port", str(port)]
    return [*command, "--dtype", dtype, *(["--", *more] if more else [])], {}


def without(engine: str, model: str, port: int, dtype: str, more: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The engine's own command for the same checkpoint, none of halfbyte in it: of vLLM without plugins."""
    if engine == VLLM:
        serve = "import sys; from halfbyte.serving.vllm.server import run; run(sys.argv[1:])"
        command = [sys.executable, "-c", serve, "serve", model, "--served-model-name", model, "--host", HOST]
        return [*command, "--port", str(port), "--dtype", dtype, *more], {"VLLM_PLUGINS": "none"}
    assert engine == TRANSFORMERS
    serve = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", serve, "serve", model, "--continuous-batching", "--host", HOST]
    if not torch.cuda.is_available():  # both leave the same memory to others
        command += ["--cb-max-memory-percent", str(CPU_MEMORY)]
    return [*command, "--port", str(port), "--dtype", dtype, *more], {}


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind((HOST, 0))
        port: int = tried.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], variables: Mapping[str, str], port: int) -> Iterator[None]:
    """The server, from when it answers. Raises RuntimeError with its last words where it does not."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env={"PYTHONFAULTHANDLER": "1", **os.environ, **variables}, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        try:
            _wait(process, port, log)
            yield
        finally:
            end(process, FAREWELL)


def last_words(log: Path) -> str:
    """Why a process ended: the last error in what it said, or its last line."""
    words = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    words = [_PREFIX.sub("", line) for line in words]
    errors = [line for line in words if _ERROR.search(line) and not _ELSEWHERE.search(line)]
    return (errors or words or ["it said nothing"])[-1].strip()[:300]


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + PATIENCE
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(last_words(log))
        time.sleep(0.5)


def _answers(port: int) -> bool:
    connection = HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def end(process: subprocess.Popen[bytes], farewell: float = 0.0) -> None:
    """End a process that was started with its own session, and all that it started. farewell: seconds until SIGKILL."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(farewell)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
