"""NVRTC is found where CUDA builds of torch, pip, conda and toolkits put it, and its words reach the user."""

import sys
from pathlib import Path

import pytest
import torch

from halfbyte.kernels.common import compiler

SOURCE = 'extern "C" __global__ void f(int* p) { *p = VALUE; }'


@pytest.fixture(autouse=True)
def _forget() -> None:
    compiler.find.cache_clear()


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a library")
    return path


def found_among(monkeypatch: pytest.MonkeyPatch, folders: list[Path], cuda: str | None = None) -> Path | None:
    monkeypatch.setattr(compiler, "_folders", lambda: folders)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    compiler.find.cache_clear()
    found = compiler.find()
    compiler.find.cache_clear()
    return found


def test_compiles() -> None:
    one, two = (compiler.compile_source(SOURCE, ["-arch=sm_90", f"--define-macro=VALUE={value}"]) for value in (1, 2))
    assert one[:4] == b"\x7fELF"
    assert one != two
    assert int(compiler.version().partition(".")[0]) >= 12
    assert compiler.find().name in compiler.identity()


def test_the_compilers_words() -> None:
    with pytest.raises(RuntimeError, match=r'(?s)-arch=sm_90.*identifier "VALUE" is undefined'):
        compiler.compile_source(SOURCE, ["-arch=sm_90"])


@pytest.mark.skipif(sys.platform == "win32", reason="names of Linux")
def test_torchs_own_release_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = put(tmp_path / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12")
    new = put(tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13")
    for other in ("libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "libnvrtc.so"):
        put(new.with_name(other))
    folders = [old.parent, new.parent, tmp_path / "nowhere"]
    assert found_among(monkeypatch, folders, "12.8") == old
    assert found_among(monkeypatch, folders, "13.0") == new
    assert found_among(monkeypatch, folders) == new
    assert found_among(monkeypatch, [tmp_path / "nowhere"], "13.0") is None


@pytest.mark.parametrize(
    ("name", "major"),
    [
        ("libnvrtc.so.13", 13),
        ("libnvrtc.so.12.8.93", 12),
        ("libnvrtc-b51b459d.so.12", 12),
        ("nvrtc64_120_0.dll", 12),
        ("nvrtc64_130_0.dll", 13),
        ("nvrtc64_130_0.alt.dll", 0),
        ("nvrtc-builtins64_130.dll", 0),
        ("libnvrtc.so", 0),
    ],
)
def test_names(name: str, major: int) -> None:
    assert compiler._major(Path(name)) == major


@pytest.mark.parametrize(
    ("cuda", "package"),
    [
        ("12.6", "nvidia-cuda-nvrtc-cu12"),
        ("12.8", "nvidia-cuda-nvrtc-cu12"),
        ("13.0", "nvidia-cuda-nvrtc"),
        (None, "nvidia-cuda-nvrtc"),
    ],
)
def test_without_one_the_error_says_what_to_install(
    cuda: str | None, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_among(monkeypatch, [], cuda) is None
    compiler._load.cache_clear()
    with pytest.raises(ImportError, match=f"pip install {package}$"):
        compiler.compile_source(SOURCE, [])
    monkeypatch.undo()
    compiler.find.cache_clear()
