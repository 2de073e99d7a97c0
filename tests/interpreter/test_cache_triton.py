"""New tokens are put where they belong and nowhere else, whatever the sizes and strides."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from pairs import every_pair

from halfbyte.kernels.cache.triton import append, supports
from halfbyte.models import rotation

SIZES = [(1, 1, 1, 1, 1), (2, 3, 5, 16, 8), (1, 8, 70, 128, 128), (9, 3, 4, 80, 72), (1, 2, 3, 5000, 7)]


@every_pair(
    {
        "texts, heads, tokens, key, value": SIZES,
        "dtype": [torch.bfloat16, torch.float32],
        "turned": [False, True],
        "tokens_at_once": [1, 3],
        "counts": [True, False],
    }
)
def test_append(
    texts: int,
    heads: int,
    tokens: int,
    key: int,
    value: int,
    dtype: torch.dtype,
    turned: bool,
    tokens_at_once: int,
    counts: bool,
) -> None:
    count = tokens_at_once

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def new(size: int) -> torch.Tensor:  # as a projection leaves it, and a part of something larger
        return (
            random(texts, count, heads, size + 3)[..., :size].transpose(1, 2)
            if turned
            else random(texts, heads, count, size)
        )

    keys, values = random(texts, heads, tokens, key), random(texts, heads, tokens, value)
    length = torch.tensor(0)
    for place in range(min(tokens, 3) + 1):
        right = keys.clone(), values.clone()
        length.fill_(place if place < 3 else tokens)  # the last one does not fit
        there, new_keys, new_values = int(length), new(key), new(value)
        assert supports(keys, values, new_keys, new_values, length, count)
        append(keys, values, new_keys, new_values, length, counts=counts)
        for at in range(there, min(there + count, tokens)):
            right[0][:, :, at], right[1][:, :, at] = new_keys[:, :, at - there], new_values[:, :, at - there]
        assert torch.equal(keys, right[0])
        assert torch.equal(values, right[1])
        assert int(length) == there + (count if counts else 0)


def test_a_step_s_slot_stays_where_it_is() -> None:
    """A layer that is computed both ways puts its token into the same slot twice."""
    keys, values, new = torch.zeros(2, 3, 8, 16), torch.zeros(2, 3, 8, 16), torch.randn(2, 3, 1, 16)
    layer = SimpleNamespace(keys=keys, values=values, cumulative_length=torch.tensor(5))
    for sign in (1, -1):
        rotation._write(layer, sign * new, sign * 2 * new)
        assert int(layer.cumulative_length) == 5
        assert torch.equal(keys[:, :, 5:6], sign * new)
        assert torch.equal(values[:, :, 5:6], sign * 2 * new)
    assert not keys[:, :, 6:].any()


def test_what_it_does_not_take() -> None:
    keys, new, length = torch.zeros(2, 4, 8, 16), torch.zeros(2, 4, 1, 16), torch.tensor(0)
    assert supports(keys, keys, new, new, length)
    for found in (
        (keys, keys, torch.zeros(2, 4, 2, 16), new, length),
        (keys, keys, torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 16), length),
        (keys, keys, torch.zeros(2, 4, 9, 16), torch.zeros(2, 4, 9, 16), length, 9),
        (keys, keys, new.double(), new, length),
        (keys, keys, new[:1], new[:1], length),
        (keys, keys, torch.zeros(2, 4, 16, 1).transpose(2, 3)[..., ::2], new, length),
        (keys.transpose(0, 1), keys, new, new, length),
        (keys[:0], keys[:0], new[:0], new[:0], length),
        (torch.zeros(2, 4, 8, 2**15), keys, torch.zeros(2, 4, 1, 2**15), new, length),
        (keys, keys, new, new, torch.tensor(0, device="meta")),
    ):
        assert not supports(*found)
