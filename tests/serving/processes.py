"""Processes of vLLM and of servers: on this machine only, within limits, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SECONDS = 280  # that an engine may take; a compiled one, or two processes, take one minute on two free cores


def environment(cache: Path, processes: int = 1) -> dict[str, str]:
    """Of a vLLM process on a small machine without a network: one thread each, a small cache, nothing shared."""
    fixed = {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if processes == 1 else "1",
    }  # fmt: skip
    if processes > 1:  # each on a core, or all on the only one
        cores = sorted(os.sched_getaffinity(0))
        fixed["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(processes))
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | fixed


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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[str], log: Path, seconds: float) -> None:
    """Until a server answers. Raises RuntimeError with its last words."""
    started = time.monotonic()
    while time.monotonic() - started < seconds and process.poll() is None:
        if status(port, "/health") == 200:
            return
        time.sleep(0.5)
    raise RuntimeError(f"no server: {log.read_text(encoding='utf-8')[-8000:]}")


def status(port: int, path: str, body: Any = None) -> int:
    """What a server on this machine says to a request; 0 where none is there."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and those that it started, which are of its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
