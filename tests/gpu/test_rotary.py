"""Rotary embeddings in one launch on a GPU: transformers' bits, and gradients of whole models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.models import rotary

llama = pytest.importorskip("transformers.models.llama.modeling_llama")


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    rotary.undo_in_library()
    yield
    rotary.undo_in_library()


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("texts", "heads", "shared", "tokens", "size", "angles"),
    [
        (1, 32, 8, 512, 128, 1),
        (2, 28, 4, 333, 128, 2),
        (3, 16, 8, 1, 256, 1),
        (2, 3, 1, 7, 6, 2),
        (1, 40, 40, 65, 80, 1),
    ],
)
def test_bits(texts: int, heads: int, shared: int, tokens: int, size: int, angles: int, dtype: torch.dtype) -> None:
    cos = draw(angles, tokens, size, dtype=dtype, seed=1)
    sin = draw(angles, tokens, size, dtype=dtype, seed=2)
    upstream = [draw(texts, n, tokens, size, dtype=dtype, seed=n) for n in (heads, shared)]

    def run() -> list[Tensor]:
        given = [draw(texts, tokens, n * size, dtype=dtype, seed=3 + n).requires_grad_() for n in (heads, shared)]
        views = [x.view(texts, tokens, -1, size).transpose(1, 2) for x in given]
        results = llama.apply_rotary_pos_emb(*views, cos, sin)
        return [*results, *torch.autograd.grad(results, given, upstream)]

    theirs = run()
    rotary.apply_to_library()
    for _ in range(3):  # Triton's launch, and from then on the driver's
        ours = run()
        assert type(ours[0].grad_fn).__name__ == "_RotaryBackward"
        for mine, right in zip(ours, theirs, strict=True):
            assert torch.equal(mine, right)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_a_model(checkpointing: bool) -> None:
    """Every bit of the loss and of each gradient is the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, 512, (2, 65), generator=torch.Generator().manual_seed(0), device="cpu").cuda()

    def run() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    theirs = run()
    rotary.apply_to_library()
    for mine, right in zip(run(), theirs, strict=True):
        assert torch.equal(mine, right)
