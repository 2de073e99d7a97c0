"""The plugin that vLLM finds by the entry point `vllm.general_plugins`: the quantization method "halfbyte"."""

from __future__ import annotations

from importlib.util import find_spec


def register() -> None:
    """Make "halfbyte" known to vLLM. vLLM calls it in each of its processes; without vLLM it does nothing."""
    if find_spec("vllm") is not None:
        import halfbyte.serving.vllm.config  # noqa: F401  registers itself
