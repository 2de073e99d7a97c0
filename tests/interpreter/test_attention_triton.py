"""Attention of one token agrees with fp64, whatever the sizes, the strides, the mask and the cut."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.attention import reference
from halfbyte.kernels.attention.plan import MOST_PARTS, AttentionPlan, plan_for
from halfbyte.kernels.attention.triton import attend, takes
from halfbyte.kernels.common.device import DeviceProperties

#        texts, heads, heads of keys, tokens, size of keys, of values
SIZES = [
    (1, 1, 1, 1, 8, 8),
    (2, 6, 3, 37, 80, 80),
    (3, 8, 1, 64, 128, 64),
    (1, 20, 1, 130, 256, 256),
    (2, 2, 2, 9, 96, 1),
]
PLANS = [None, AttentionPlan(16, 1, 9, 4, 1), AttentionPlan(32, 2, 3, 4, 2), AttentionPlan(64, 3, 1, 4, 1)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("masked", [True, False])
def test_attend(sizes: tuple[int, ...], plan: AttentionPlan | None, masked: bool) -> None:
    texts, heads, shared, tokens, size, value = sizes
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half()

    query = random(texts, 1, heads, size + 3)[..., :size].transpose(1, 2)
    keys, values = random(texts, shared, tokens, size), random(texts, shared, tokens, value)
    masks = [None]
    if masked:
        mask = torch.rand((texts, 1, 1, tokens), generator=generator) < 0.6
        mask[0] = False  # sees nothing
        mask[-1, ..., 0] = True
        masks = [mask, mask[-1:], mask[-1:].expand(texts, 1, 1, tokens)]
    for mask in masks:
        assert takes(query, keys, values, mask)
        found = attend(query, keys, values, mask, 0.3, plan)
        right = reference.attend(query.double(), keys.double(), values.double(), mask, 0.3)
        assert found.shape == right.shape
        torch.testing.assert_close(found.double(), right, rtol=2e-3, atol=2e-3)


def test_what_is_masked_is_not_read() -> None:
    query, keys = torch.randn(1, 2, 1, 16).half(), torch.randn(1, 2, 40, 16).half()
    values, mask = torch.randn(1, 2, 40, 16).half(), torch.arange(40)[None, None, None] < 21
    right = attend(query, keys, values, mask, 1.0)
    keys[:, :, 21:], values[:, :, 21:] = float("nan"), float("inf")
    assert torch.equal(attend(query, keys, values, mask, 1.0), right)
    keys[:, :, 20] = float("nan")
    assert attend(query, keys, values, mask, 1.0).isnan().all()


def test_what_it_does_not_take() -> None:
    query, keys, mask = torch.zeros(2, 4, 1, 16).half(), torch.zeros(2, 2, 8, 16).half(), torch.ones(2, 1, 1, 8).bool()
    assert takes(query, keys, keys, mask)
    for found in (
        (query.float(), keys.float(), keys.float(), mask),
        (query.bfloat16(), keys, keys, mask),
        (query.expand(2, 4, 2, 16), keys, keys, mask),
        (query[:1], keys, keys, mask),
        (query[:, :3], keys, keys, mask),
        (query, keys.transpose(0, 1), keys, mask),
        (query, keys, keys[:, :, :7], mask),
        (query, keys, keys, mask.half()),
        (query, keys, keys, mask.expand(2, 4, 1, 8)),
        (query, keys, keys, mask[..., :7]),
        (query, keys[:, :, :0], keys[:, :, :0], mask[..., :0]),
        (query[0], keys[0], keys[0], mask),
        (torch.zeros(2, 4, 1, 512).half(), torch.zeros(2, 2, 8, 512).half(), keys, mask),
        (torch.zeros(2, 128, 1, 16).half(), keys, keys, mask),
        (query.to("meta"), keys, keys, mask),
    ):
        assert not takes(*found)


@pytest.mark.parametrize("sms", [20, 132])
@pytest.mark.parametrize("heads", [1, 8, 64, 256, 5000])
@pytest.mark.parametrize("size", [64, 256])
def test_plans(sms: int, heads: int, size: int) -> None:
    """They cover every token, leave no program without a token for long, and are few."""
    plans = set()
    for tokens in range(1, 9000, 7):
        plan = plan_for(DeviceProperties("cuda", 90, sms), heads, tokens, size)
        assert plan.block * plan.blocks * plan.parts >= tokens
        assert 1 <= plan.parts <= MOST_PARTS
        assert plan.parts == 1 or plan.parts * heads <= 4 * sms
        assert plan.block * plan.blocks * (plan.parts - 1) < 1.25 * tokens
        plans.add(plan)
    assert len(plans) <= 4 * (9000 // 32).bit_length()
