"""`halfbyte bench pages` without a GPU: what it asks for, what is right, and how it is told."""

from __future__ import annotations

from typing import Any

import torch

from halfbyte.bench import pages
from halfbyte.bench.attention import Heads


def test_batches() -> None:
    assert [batch.name for batch in pages.batches_of("1x300, 3×20x500")] == [
        "1 × 300 tokens", "3 × 20 tokens, one of 500",
    ]  # fmt: skip
    assert pages.Batch(4, 20, 500).lengths == [20, 500, 20, 20]
    assert pages.Batch(1, 20).lengths == [20]
    assert pages.Batch(2, 20, 5).lengths == [20, 20]
    assert list(pages.models_of("llama-3-8b,gpt-oss-120b")) == ["llama-3-8b", "gpt-oss-120b"]


def test_what_is_right() -> None:
    """By torch, from the cache with the new tokens in their slots."""
    torch.manual_seed(0)
    heads, batch = Heads(4, 2, 64), pages.Batch(3, 17, 40)
    given = pages.Pages(heads, batch, torch.float32, torch.device("cpu"))
    right = given.right()
    rows = given.held.view(-1, 2, 128)
    rows[given.slots] = torch.cat((given.key, given.value), -1)
    for number, length in enumerate(batch.lengths):
        places = torch.arange(length)
        seen = rows[given.table[number][places // 16] * 16 + places % 16].transpose(0, 1)[None]
        keys, values = seen.split(64, -1)
        query = given.query[number][None, :, None]
        found = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        torch.testing.assert_close(found[0, :, 0].double(), right[number], atol=1e-5, rtol=1e-5)


def test_markdown() -> None:
    row = {
        "case": "llama-3-8b, 1 × 300 tokens",
        "provider": "halfbyte",
        "median_us": 5.0,
        "gb_per_s": 80.0,
        "of_copy": 0.02,
    }
    environment: dict[str, Any] = {"device": "A GPU", "driver": "1", "commit": "abc", "date": "2026-11-29"}
    record = {"bench": "pages", "environment": environment, "method": "by hand", "copy_gb_per_s": 4200.0}
    peer = row | {"provider": pages.FLASH, "median_us": 10.0}
    told = pages.markdown(record | {"rows": [row, peer]})
    assert "| llama-3-8b, 1 × 300 tokens | 5.0 | 80 | 2% | 10.0 | **2.00** |" in told
    wrong = {"case": row["case"], "provider": pages.FLASH, "error": "error 1"}
    assert "| 5.0 | 80 | 2% | wrong |  |" in pages.markdown(record | {"rows": [row, wrong]})
    assert "| 5.0 | 80 | 2% |  |  |" in pages.markdown(record | {"rows": [row]})
