"""Options that several commands share, and what is made of their values."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.formats.spec import FORMATS

if TYPE_CHECKING:
    import torch


class Dtype(str, Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. By default the first GPU, or the CPU.")]
NAMES = "|".join(FORMATS)  # of formats, as help shows them
BlockSize = Annotated[int | None, typer.Option(help="nf4, fp4: weights that share a scale, 32, [64], ... 4096.")]
GroupSize = Annotated[int | None, typer.Option(help="int4: weights that share a scale, 32, 64 or [128].")]
Nested = Annotated[bool | None, typer.Option("--nested/--flat", help="nf4, fp4: scales in one byte [default] or four.")]


@contextmanager
def usage() -> Iterator[None]:
    """A ValueError inside is the command line's fault: exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def progress(*, of_bytes: bool, shown: bool | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, with SIGTERM and SIGHUP made ordinary exits, so that temporary files go. It is told
    what is at work, how much is done, and how much there is."""
    from halfbyte.terminal import progress as bar_of

    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP, and under nohup it is ignored
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with bar_of(shown, of_bytes=of_bytes) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def device_of(name: str | None) -> str:
    """A device that works here. Raises BadParameter for one that does not."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except Exception as error:  # RuntimeError for a wrong name, AssertionError where torch has no such backend
        reason = str(error).strip().partition("\n")[0]
        raise typer.BadParameter(f"device {name!r} cannot be used here ({reason}); cpu always can") from error
    return name


def device_to_measure(name: str | None) -> torch.device:
    """The CPU or a GPU, which becomes the current one. Raises BadParameter for any other."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"device {name!r} is none; write cpu, cuda or cuda:1") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise typer.BadParameter("there is no CUDA device here; --device cpu always works")
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise typer.BadParameter(f"the bench runs on cpu and cuda, not on {device.type}")
    return device


def counts_of(text: str | None) -> Sequence[int]:
    """[M, ...] of "M,M"."""
    counts = () if text is None else tuple(text.split(","))
    if not all(count.strip().isdigit() and int(count) > 0 for count in counts):
        raise typer.BadParameter(f"rows {text!r} are not numbers; write 1,16,64")
    return tuple(map(int, counts))


def size_of(text: str | None) -> int | None:
    """Bytes from "5GB", "500 MB", "2GiB" or a plain number."""
    if text is None:
        return None
    compact = text.replace(" ", "").upper()
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}
    number = compact.rstrip("KMGIB")
    try:
        size = int(float(number) * units[compact[len(number) :]])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise typer.BadParameter(f"max-shard-size {text!r} is not a size; 5GB, 500MB or a number of bytes is expected")
    return size
