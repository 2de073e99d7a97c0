"""Ceilings are measured here, kept by device, driver and torch, and measured anew on request."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from synthetic import limits

from halfbyte.measure.timing import Timing
from halfbyte.roofline import ceilings
from halfbyte.roofline.ceilings import Ceilings, Speed

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    monkeypatch.setattr(ceilings, "SIZES", {"cpu": (2**14, 2**16)})
    monkeypatch.setattr(ceilings, "SIDE", {"cpu": 64})
    return tmp_path


def test_measure(small: Path) -> None:
    found = ceilings.measure(CPU, rounds=3)
    assert set(found.bandwidth) == {"read", "write", "copy"}
    for sizes in found.bandwidth.values():
        assert list(sizes) == [2**14, 2**16]
        assert all(0 < speed.low <= speed.median <= speed.high for speed in sizes.values())
    assert set(found.matrix) == {"bfloat16", "float32"}
    assert found.launch["host"] > 0
    assert found.memory("read") == found.bandwidth["read"][2**16].median
    assert Ceilings.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_rates() -> None:
    """2 MB in 10, 5 and 20 µs: 200 GB/s, and the spread the right way round."""
    assert Speed.of(2e6 / 1e3, Timing(10, 5, 20, 9, "wall")) == Speed(200.0, 100.0, 400.0)


def test_kept_and_measured_anew(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def measure(device: torch.device) -> Ceilings:
        made.append(1)
        return limits()

    monkeypatch.setattr(ceilings, "measure", measure)
    assert ceilings.ceilings(CPU) == ceilings.ceilings(CPU) == limits()
    assert len(made) == 1
    ceilings.ceilings(CPU, anew=True)
    assert len(made) == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)  # another machine, as it were
    ceilings.ceilings(CPU)
    assert len(made) == 3
    assert len(list(small.glob("ceilings-*.json"))) == 2


def test_a_damaged_entry_is_measured_again(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda device: limits())
    path = ceilings.cache_file(CPU)
    for text in ("{", "[]", '{"environment": {}}'):
        path.write_text(text)
        assert ceilings.ceilings(CPU) == limits()


def test_a_cache_that_cannot_be_written(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small / "file").touch()
    monkeypatch.setenv("HALFBYTE_CACHE", str(small / "file"))
    monkeypatch.setattr(ceilings, "measure", lambda device: limits())
    assert ceilings.ceilings(CPU) == limits()


INTERPRETED = """
import torch
from halfbyte.roofline import triton as t
source = torch.randint(0, 1000, (3 * t.TILE,), dtype=torch.int32)
target, sink = torch.full_like(source, -1), torch.full((t.TILE,), 7, dtype=torch.int32)
t.copy(source, target, passes=2, blocks=2)
assert torch.equal(source, target)
t.read(source, sink, passes=2, blocks=2)
assert (sink == 7).all()
t.write(target, passes=2, blocks=2)
assert torch.equal(target, (torch.arange(t.TILE, dtype=torch.int32) + 1).repeat(3))
for wrong in (source[1:], source.float()):
    try:
        t.write(wrong, blocks=1)
    except ValueError as error:
        assert "a multiple of 4096 of int32 is accepted" in str(error)
    else:
        raise AssertionError
"""


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    """It replaces all of Triton when that is imported, so it gets a process of its own."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", [75, 90, 120, "gfx942"])
@pytest.mark.parametrize("kernel", ["read_kernel", "write_kernel", "copy_kernel"])
def test_kernels_compile(kernel: str, target: int | str) -> None:
    pytest.importorskip("triton")
    from halfbyte.kernels.common.targets import compile_for
    from halfbyte.roofline import triton

    names = {"read_kernel": ("source", "sink"), "write_kernel": ("target",), "copy_kernel": ("source", "target")}
    signature = dict.fromkeys(names[kernel], "*i32") | {"words": "i32", "passes": "i32"}
    compile_for(getattr(triton, kernel), target, signature, {"TILE": triton.TILE})
