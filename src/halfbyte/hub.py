"""Sources by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

# Weights in other files than safetensors are not read, so they are not fetched.
_NOT_READ = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.ckpt"]


def local(source: str | Path) -> Path:
    """Where `source` lies: itself if it is there, or the snapshot of a repository "org/name", fetched into the hub's
    own cache. Any other name comes back as it is.

    Raises ImportError without huggingface_hub, and FileNotFoundError for what cannot be had.
    """
    path, name = Path(source), Path(source).as_posix()
    if path.exists() or not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", name) or name.endswith(".safetensors"):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"{name} does not exist here; to get it from the Hugging Face hub: pip install huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(name, ignore_patterns=_NOT_READ))
    except Exception as error:  # its errors are requests', httpx' and its own, by version
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{name} does not exist here, and the Hugging Face hub did not give it ({reason}); check the name, the "
            "network and `hf auth login`, or give a path"
        ) from error
