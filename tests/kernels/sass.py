"""What machine code, of sm_70 to sm_90, waits for."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

READS, ARRIVAL = ("LDS", "LDSM"), "SYNCS.ARRIVE"
WORDS = re.compile(r"LDSM\b|LDS\.128$")


class Instruction(NamedTuple):
    """text: as nvdisasm writes it. told_by: the scoreboard that tells when its result is there, or None. waits_for:
    those that it waits for."""

    text: str
    told_by: int | None
    waits_for: tuple[int, ...]


def instructions(path: Path, kernel: str) -> Iterator[Instruction]:
    """Of a kernel in a cubin, in their order. An instruction has 128 bits, of which 110 to 112 say by what it is told,
    where 7 is nothing, and 116 to 121 what it waits for."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    text = subprocess.run([tool, "-c", "-hex", path], capture_output=True, text=True, check=True).stdout
    code = text[text.index(f".text.{kernel}:") :].partition("\n//-----")[0]
    word = r"/\* 0x([0-9a-f]{16}) \*/"
    for found in re.finditer(rf"/\*[0-9a-f]+\*/\s+(.*?);\s+{word}\s+{word}", code):
        upper = int(found[3], 16)
        board = upper >> 110 - 64 & 7
        waits = upper >> 116 - 64 & 63
        told_by = board if board < 7 else None
        yield Instruction(found[1], told_by, tuple(i for i in range(6) if waits >> i & 1))


def arrivals_with_reads_on_their_way(path: Path, kernel: str, back: bool = False) -> list[str]:
    """The arrivals at barriers before which something was read from shared memory that nobody has waited for: whoever
    waits at that barrier may write there first. Results of reads come in their order, so the next one that is told by a
    scoreboard tells of those that are not. back: words of W, which come by LDSM or sixteen bytes at a time, may be on
    their way where stages of x are given back, once products have been waited for, but not where W's are, before
    that."""
    found, on_their_way, untold, multiplies = [], dict[int, str](), False, False
    for instruction in instructions(path, kernel):
        for board in instruction.waits_for:
            on_their_way.pop(board, None)
        operation = re.sub(r"^@!?U?P\d+ ", "", instruction.text)
        name = operation.partition(".")[0].split()[0]
        if name == "HGMMA":
            multiplies = True
        elif operation.startswith("WARPGROUP.DEPBAR"):
            multiplies = False
        elif name in READS:
            if instruction.told_by is None:
                untold = True
            else:
                on_their_way[instruction.told_by] = operation.split()[0]
                untold = False
        elif operation.startswith(ARRIVAL):
            harmless = back and not multiplies and not untold and all(map(WORDS.match, on_their_way.values()))
            if (on_their_way or untold) and not harmless:
                found.append(instruction.text)
    return found
