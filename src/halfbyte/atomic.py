"""Output that is there whole or not at all: written beside its place under another name, then moved into it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_output(
    path: str | Path, *, directory: bool, overwrite: bool = False, marker: str = "*.safetensors"
) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends and vanishes when it raises (Ctrl-C as well).

    directory: whether `path` is a directory (the given path is then one already) or a file.
    overwrite: replace what is at `path`; it stays whole until the new output is.
    marker: a pattern of a file that a directory must hold to be replaced, so that no other folder is lost.

    Raises FileExistsError where `path` exists and may not be replaced, FileNotFoundError where its parent is missing,
    and OSError with a plain sentence when the disk is full.
    """
    path = Path(path)
    check_destination(path, directory=directory, overwrite=overwrite, marker=marker)
    target = path.resolve()  # behind a symbolic link, the file it points to is replaced, not the link
    _remove_stale(target)
    temporary = Path(tempfile.mkdtemp(prefix=f"{_prefix(target)}{os.getpid()}-", suffix=".tmp", dir=target.parent))
    try:
        os.chmod(temporary, 0o777 & ~_umask())  # mkdtemp makes it private
        output = temporary if directory else temporary / target.name
        yield output
        _sync(output)
        if directory:
            _swap_directory(output, target)
        else:
            os.replace(output, target)
        _sync_one(target.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                error.errno,
                f"the disk that holds {target.parent} is full; nothing was written: make room and run again",
            ) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_destination(path: Path, *, directory: bool, overwrite: bool, marker: str = "*.safetensors") -> None:
    """Raise unless `path` may be written to."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a directory; create it first")
    if not path.exists():
        return
    kind = "directory" if directory else "file"
    if path.is_dir() != directory:
        raise FileExistsError(f"{path} is {'not ' if directory else ''}a directory and the output is a {kind}")
    if not overwrite:
        raise FileExistsError(f"{path} exists; give another name, or say that it may be replaced (--overwrite)")
    if directory and any(path.iterdir()) and not any(path.glob(marker)):
        raise FileExistsError(f"{path} holds no {marker.lstrip('*')} file, so it is not replaced; delete it yourself")


def check_space(directory: Path, needed: int) -> None:
    """Raise OSError if the disk that holds `directory` has fewer than `needed` bytes left."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the output needs {needed / 1e6:,.1f} MB, and the disk of {directory} has {free / 1e6:,.1f} MB left",
        )


def _prefix(target: Path) -> str:
    """What the names of temporary files for `target` begin with on this host; the process's number comes next."""
    host = zlib.crc32(socket.gethostname().encode())
    return f".{target.name[:180]}.{host:08x}-"


def _remove_stale(target: Path) -> None:
    """Remove temporary files for `target` that processes of this host left behind when they were killed."""
    if os.name == "nt":  # there is no asking whether a process lives
        return
    prefix = _prefix(target)
    for path in target.parent.iterdir():
        found = re.fullmatch(re.escape(prefix) + r"(\d+)-\w+\.(tmp|old)", path.name)
        # The .old of a target that is gone is all that is left of it, so it stays.
        if found and not _lives(int(found[1])) and (found[2] == "tmp" or target.exists()):
            shutil.rmtree(path, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is another user's, so it lives; or no number of a process
        return True
    return True


def _swap_directory(new: Path, target: Path) -> None:
    if not target.exists():
        os.rename(new, target)
        return
    old = new.with_suffix(".old")
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have everything below `path` on the disk, so that a power cut after the move finds it whole."""
    for file in sorted(path.rglob("*")) if path.is_dir() else []:
        _sync_one(file)
    _sync_one(path)


def _sync_one(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no directories
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
