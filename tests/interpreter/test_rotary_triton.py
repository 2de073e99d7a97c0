"""Rotary embeddings in one launch: transformers' bits, forward, back and back again. In fp16, since the interpreter
does not round to bf16 as GPUs do; tests/gpu/test_rotary.py has both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.models import rotary

llama = pytest.importorskip("transformers.models.llama.modeling_llama")


@pytest.fixture(autouse=True)
def _replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rotary, "ON_CPU", True)
    yield
    rotary.undo_in_library()


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize(
    ("texts", "heads", "shared", "tokens", "size", "angles"),
    [(1, 4, 2, 5, 16, 1), (2, 3, 3, 7, 6, 2), (3, 2, 1, 1, 24, 1), (2, 8, 2, 4, 64, 2)],
)
def test_bits_and_gradients(texts: int, heads: int, shared: int, tokens: int, size: int, angles: int) -> None:
    cos, sin = draw(angles, tokens, size, seed=1), draw(angles, tokens, size, seed=2)
    upstream = draw(texts, heads, tokens, size, seed=3), draw(texts, shared, tokens, size, seed=4)
    of_grads = draw(texts, heads, tokens, size, seed=5), draw(texts, shared, tokens, size, seed=6)

    def run(function: Any) -> list[Tensor]:
        """Both results, both gradients, and what comes back through these."""
        given = [
            draw(texts, tokens, heads * size, seed=7).requires_grad_(),
            draw(texts, tokens, shared * size, seed=8).requires_grad_(),
        ]
        views = [x.view(texts, tokens, -1, size).transpose(1, 2) for x in given]
        results = function(*views, cos, sin)
        leaves = [x.detach().requires_grad_() for x in upstream]
        grads = torch.autograd.grad(results, given, leaves, create_graph=True)
        seen = [g.view(texts, tokens, -1, size).transpose(1, 2) for g in grads]
        return [*results, *grads, *torch.autograd.grad(seen, leaves, of_grads)]

    theirs = run(llama.apply_rotary_pos_emb)
    original = llama.apply_rotary_pos_emb
    rotary.apply_to_library()
    assert llama.apply_rotary_pos_emb is not original
    ours = run(llama.apply_rotary_pos_emb)
    for mine, right in zip(ours, theirs, strict=True):
        assert torch.equal(mine, right)
    if tokens > 1:  # of one, the stride says nothing
        assert ours[0].stride() == theirs[0].stride()


def test_a_gradient_with_any_strides() -> None:
    rotary.apply_to_library()
    cos, sin = draw(1, 3, 8, seed=1), draw(1, 3, 8, seed=2)
    q, k = draw(1, 2, 3, 8, seed=3).requires_grad_(), draw(1, 1, 3, 8, seed=4).requires_grad_()
    mine, _ = llama.apply_rotary_pos_emb(q, k, cos, sin)
    theirs, _ = llama.apply_rotary_pos_emb.__wrapped__(q, k, cos, sin)
    assert type(mine.grad_fn).__name__ == "_RotaryBackward"
    assert type(theirs.grad_fn).__name__ != "_RotaryBackward"
    for result in (mine, theirs):
        result.sum().backward()  # expanded from one number
    assert q.grad is not None
    whole = q.grad.clone()
    q.grad = None
    theirs_again, _ = llama.apply_rotary_pos_emb.__wrapped__(q, k, cos, sin)
    theirs_again.sum().backward()
    assert torch.equal(whole, 2 * q.grad)


def test_what_stays_transformers() -> None:
    rotary.apply_to_library()
    rotated = llama.apply_rotary_pos_emb
    cos, sin = draw(1, 3, 8, seed=1), draw(1, 3, 8, seed=2)
    q, k = draw(1, 2, 3, 8, seed=3).requires_grad_(), draw(1, 1, 3, 8, seed=4)

    def is_ours(*arguments: Any, **options: Any) -> bool:
        return type(rotated(*arguments, **options)[0].grad_fn).__name__ == "_RotaryBackward"

    assert is_ours(q, k, cos, sin)
    assert not is_ours(q.float(), k.float(), cos.float(), sin.float())
    assert not is_ours(q, k, cos.float(), sin.float())
    assert not is_ours(q, k, cos.clone().requires_grad_(), sin)
    assert not is_ours(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    assert not is_ours(q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0])
    assert not is_ours(q.transpose(2, 3).contiguous().transpose(2, 3), k, cos, sin)
    mapped = torch.func.vmap(lambda q: rotated(q, k, cos, sin)[0])(q.detach().expand(2, -1, -1, -1, -1))
    assert torch.equal(mapped[0], rotated(q, k, cos, sin)[0])
