"""The output is there whole or not at all, and what was there before stays until then."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte import atomic
from halfbyte.atomic import atomic_output, check_space


def write(
    path: Path, text: str, *, directory: bool, overwrite: bool = False, error: BaseException | None = None
) -> None:
    with atomic_output(path, directory=directory, overwrite=overwrite) as place:
        (place / "m.safetensors" if directory else place).write_text(text)
        assert not path.exists() or read(path) == "old"
        if error:
            raise error


def read(path: Path) -> str:
    return (path / "m.safetensors" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("directory", [True, False])
@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1), OSError(errno.EIO, "x")])
def test_nothing_is_left_behind(tmp_path: Path, directory: bool, error: BaseException) -> None:
    path = tmp_path / "out"
    with pytest.raises(type(error)):
        write(path, "new", directory=directory, error=error)
    assert not list(tmp_path.iterdir())
    write(path, "old", directory=directory)
    assert read(path) == "old"
    with pytest.raises(type(error)):
        write(path, "new", directory=directory, overwrite=True, error=error)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert read(path) == "old"
    write(path, "new", directory=directory, overwrite=True)
    assert read(path) == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("directory", [True, False])
def test_permissions_follow_the_umask(tmp_path: Path, directory: bool) -> None:
    mask = os.umask(0o027)
    try:
        write(tmp_path / "out", "x", directory=directory)
    finally:
        os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == (0o750 if directory else 0o640)


def test_a_failed_swap_restores_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    write(path, "old", directory=True)
    rename = os.rename
    calls = []

    def failing(source: object, target: object) -> None:
        calls.append((source, target))
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(KeyboardInterrupt):
        write(path, "new", directory=True, overwrite=True)
    assert len(calls) == 3
    assert read(path) == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_may_not_be_replaced(tmp_path: Path) -> None:
    file, directory, precious = tmp_path / "file", tmp_path / "directory", tmp_path / "precious"
    write(file, "old", directory=False)
    write(directory, "old", directory=True)
    precious.mkdir()
    (precious / "thesis.tex").touch()
    for path, kind in ((file, False), (directory, True)):
        with pytest.raises(FileExistsError, match="--overwrite"):
            write(path, "new", directory=kind)
        with pytest.raises(FileExistsError, match="a directory and the output is a"):
            write(path, "new", directory=not kind, overwrite=True)
    with pytest.raises(FileExistsError, match=r"holds no \.safetensors file"):
        write(precious, "new", directory=True, overwrite=True)
    with pytest.raises(FileNotFoundError, match="create it first"):
        write(tmp_path / "no" / "where", "new", directory=True)
    assert (read(file), read(directory)) == ("old", "old")


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "file", "old", directory=False)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "file")
    write(tmp_path / "link", "new", directory=False, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "real" / "file") == "new"


def test_full_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"needs 1,000,000,000,000\.0 MB, and the disk of"):
        check_space(tmp_path, 10**18)
    with pytest.raises(OSError, match="is full; nothing was written") as info:
        write(tmp_path / "out", "new", directory=False, error=OSError(errno.ENOSPC, "No space left on device"))
    assert info.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", "print(1)"], stdout=subprocess.DEVNULL)
    process.wait()
    return process.pid


@pytest.mark.skipif(os.name == "nt", reason="there is no asking whether a process lives")
@pytest.mark.parametrize("directory", [True, False])
def test_what_dead_processes_left_is_removed(tmp_path: Path, directory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this host and for this target only; the last copy of an old target stays."""
    target = tmp_path / "out[1].safetensors"

    def leave(process: int, kind: str = "tmp", host: str | None = None, of: Path = target) -> Path:
        with monkeypatch.context() as patch:
            if host:
                patch.setattr("socket.gethostname", lambda: host)
            path = tmp_path / f"{atomic._prefix(of)}{process}-abc_1.{kind}"
        path.mkdir()
        (path / "m.safetensors").touch()
        return path

    dead = dead_process()
    old, stale = leave(dead, "old"), leave(dead)
    kept = [leave(os.getpid()), leave(os.getppid()), leave(dead, host="elsewhere"), leave(dead, of=tmp_path / "other")]
    write(target, "old", directory=directory)
    assert sorted(tmp_path.iterdir()) == sorted([target, old, *kept])
    write(target, "new", directory=directory, overwrite=True)
    assert sorted(tmp_path.iterdir()) == sorted([target, *kept])
    assert not stale.exists()


def test_the_temporary_name_is_one_that_is_found_again(tmp_path: Path) -> None:
    """A killed process cannot tidy up, so the next one must know its leavings by their name."""
    code = (
        "import os, sys\nfrom halfbyte.atomic import atomic_output\n"
        "with atomic_output(sys.argv[1], directory=True) as place:\n    os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")]).returncode == 9
    assert len(list(tmp_path.iterdir())) == 1
    write(tmp_path / "out", "new", directory=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
