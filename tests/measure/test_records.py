"""Records: of which machine and code they are, and that a file is written whole or not at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.measure import records

CPU = torch.device("cpu")


@pytest.fixture
def record() -> dict[str, Any]:
    rows = [{"case": "2×3", "provider": "halfbyte", "median_us": 1.5}]
    return {"bench": "dequantize", "environment": records.environment(CPU), "rows": rows}


def test_the_environment(record: dict[str, Any]) -> None:
    facts = record["environment"]
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert all(facts[name] for name in ("device", "date", "python", "system", "halfbyte"))


def test_the_commit_is_of_the_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own repository; not of one around a copy, which may be of anything."""
    own, copied = (tmp_path / folder / "src/halfbyte/measure/records.py" for folder in (".", "copy"))
    for file in (own, copied):
        file.parent.mkdir(parents=True)
        file.write_text("first")
    (tmp_path / ".gitignore").write_text("/copy/\n")
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.com")
    for command in (("init", "--quiet"), ("add", "."), (*who, "commit", "--quiet", "--message", "first")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit(file: Path) -> str | None:
        monkeypatch.setattr(records, "__file__", str(file))
        return records.environment(CPU)["commit"]

    monkeypatch.delenv("HALFBYTE_COMMIT", raising=False)
    assert (commit(own), commit(copied)) == (head[:12], None)
    own.write_text("second")
    assert (commit(own), commit(copied)) == (head[:12] + "+", None)
    monkeypatch.setenv("HALFBYTE_COMMIT", "told")
    assert (commit(own), commit(copied)) == ("told", "told")


def test_there_and_back(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "dequantize.json"
    records.write(path, record)
    assert records.read(path) == record
    assert "2×3" in path.read_text(encoding="utf-8")
    records.write(path, record | {"copy_gb_per_s": 11.0})
    assert records.read(path)["copy_gb_per_s"] == 11.0
    assert [file.name for file in path.parent.iterdir()] == ["dequantize.json"]


@pytest.mark.parametrize("name", ["replace", "chmod", "fsync"])
def test_a_failure_leaves_what_was_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    path.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(OSError, match="no space left"):
            records.write(path, {"bench": "dequantize"})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, TypeError])
def test_an_interruption_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b'{"bench": "deq')
        raise error

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(error):
        records.write(tmp_path / "record.json", {"bench": "dequantize"})
    assert list(tmp_path.iterdir()) == []


def test_reads_only_records(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("[]", '{"a": 1}', "{"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"not a record|property name"):
            records.read(path)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Intel(R) Xeon(R) Platinum 8488C", "cpu-xeon-platinum-8488c"),
        ("AMD EPYC 9V74 80-Core Processor", "cpu-epyc-9v74-80-core"),
        ("", "cpu"),
    ],
)
def test_a_folder_for_each_device(name: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "device_name", lambda _: name)
    assert records.folder_of(CPU) == folder
    monkeypatch.setattr(records, "device_name", lambda _: "NVIDIA H200")
    assert records.folder_of(torch.device("cuda", 0)) == "h200"
