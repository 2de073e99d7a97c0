"""A report made once on this machine's CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from synthetic import limits


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Small operators on several threads wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """The report of a small model, as the command writes it. Ceilings are given, for they are not what is tested."""
    pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("jinja2")
    from typer.testing import CliRunner

    from halfbyte.cli import app

    out = tmp_path_factory.mktemp("profile") / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halfbyte.roofline.ceilings.measure", lambda device: limits())
        patch.setenv("HALFBYTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        arguments = ["--model", "tiny", "--batch", "1,2", "--context", "32", "--rounds", "3", "--device", "cpu"]
        result = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(
            app, ["profile", *arguments, "--out", str(out)]
        )
    assert result.exit_code == 0, result.output
    (out.parent / "printed.txt").write_text(result.stdout, encoding="utf-8")
    return out
