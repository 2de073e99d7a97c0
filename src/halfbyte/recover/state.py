"""What a search has found so far, in a JSON file that is written anew after each position, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.atomic import atomic_output
from halfbyte.recover.result import Calibration, Position

SAMPLES = 64  # values of each parameter that stand for all in a fingerprint


class State:
    """The file of one search, known by its fingerprint."""

    def __init__(self, path: str | Path, fingerprint: str) -> None:
        self.path, self.fingerprint = Path(path), fingerprint

    def load(self) -> tuple[Calibration, list[Position]] | None:
        """What was found before, or None. Raises ValueError for a file that belongs to another search."""
        if not self.path.exists():
            return None
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            fingerprint = kept["fingerprint"]
            positions = [Position(**line | {"alternatives": tuple(line["alternatives"])}) for line in kept["positions"]]
            calibration = Calibration(**kept["calibration"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{self.path} is not the state of a recovery; give another name") from error
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"{self.path} belongs to another recovery: its model, states or options differ; give another name, or "
                "delete it to begin anew"
            )
        return calibration, positions

    def save(self, calibration: Calibration, positions: list[Position]) -> None:
        kept = {
            "fingerprint": self.fingerprint,
            "calibration": asdict(calibration),
            "positions": [asdict(position) for position in positions],
        }
        with atomic_output(self.path, directory=False, overwrite=True) as output:
            output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def fingerprint(model: nn.Module, states: Tensor, options: Mapping[str, Any]) -> str:
    """SHA-256 over samples of every parameter and buffer, all of the states, and the options."""
    digest = hashlib.sha256(json.dumps(dict(options), sort_keys=True).encode())
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().reshape(-1)
        _update(digest, values[:: max(1, len(values) // SAMPLES)][:SAMPLES])
    _update(digest, states)
    return digest.hexdigest()


def _update(digest: Any, values: Tensor) -> None:
    digest.update(values.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
