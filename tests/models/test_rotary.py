"""transformers' functions of rotary embeddings: which are taken, and that they are put back."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.models import rotary

pytest.importorskip("transformers")


def file_of(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "granite"])
def test_taken(family: str, no_other_model: None) -> None:
    file = file_of(family)
    original = file.apply_rotary_pos_emb
    rotary.apply_to_library()
    replaced = file.apply_rotary_pos_emb
    assert replaced is not original
    assert replaced.__wrapped__ is original
    rotary.apply_to_library()
    assert file.apply_rotary_pos_emb is replaced
    rotary.undo_in_library()
    assert file.apply_rotary_pos_emb is original


@pytest.mark.parametrize("family", ["phi3", "gpt_oss", "glm"])  # they turn a part of a head, or its halves otherwise
def test_left(family: str, no_other_model: None) -> None:
    file = file_of(family)
    original = file.apply_rotary_pos_emb
    rotary.apply_to_library()
    assert file.apply_rotary_pos_emb is original
    rotary.undo_in_library()


def test_a_function_of_the_users_is_left(no_other_model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of("qwen2")
    monkeypatch.setattr(file, "rotate_half", lambda x: x)
    original = file.apply_rotary_pos_emb
    rotary.apply_to_library()
    assert file.apply_rotary_pos_emb is original
    rotary.undo_in_library()


def test_accelerate_and_restore(load: Any, no_other_model: None) -> None:
    """A model that trains has the gradients that it had: on a CPU the function is transformers'."""
    file = file_of("llama")
    original = file.apply_rotary_pos_emb
    model = load()
    hb.accelerate(model)
    assert file.apply_rotary_pos_emb is not original
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    cos, sin = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    for mine, right in zip(file.apply_rotary_pos_emb(q, k, cos, sin), original(q, k, cos, sin), strict=True):
        assert torch.equal(mine, right)
    hb.restore(model)
    assert file.apply_rotary_pos_emb is original
