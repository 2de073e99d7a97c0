"""The plugin that vLLM finds by the entry point `vllm.general_plugins`: the quantization method "halfbyte"."""

from __future__ import annotations

from halfbyte.serving.choice import is_installed


def register() -> None:
    """Make "halfbyte" known to vLLM. vLLM calls it in each of its processes; without vLLM it does nothing."""
    if is_installed("vllm"):
        import halfbyte.serving.vllm.config  # noqa: F401  registers itself
