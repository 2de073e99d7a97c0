"""What only a GPU shows of prompts on graphs: that they repeat bits, on any stream, in memory that stays what it is.

That the tokens are right is shown by tests/models/test_prompt_graphs.py, on a GPU where there is one.
"""

from __future__ import annotations

import gc
import threading
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.measure import models
from halfbyte.measure.error import relative_error
from halfbyte.models.buckets import prompt_bucket
from halfbyte.models.prompt_graphs import PromptGraphs
from halfbyte.models.steps import pool_of

from .test_models import SIDES, generate, model, prompt  # noqa: F401

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("error:halfbyte. .* cannot be captured")  # neither prompts nor a model's steps


def logits(model: Any, ids: Tensor, padding: int = 0, **options: Any) -> Tensor:  # noqa: F811
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    found = generate(
        model, ids, attention_mask=mask, max_new_tokens=1, output_logits=True, return_dict_in_generate=True, **options
    )
    return found.logits[0].double()  # type: ignore[no-any-return]


def window(model: Any) -> float:  # noqa: F811
    """Prompts that fill it up go without graphs."""
    return getattr(model.config, "sliding_window", None) or inf


def graphs(model: Any) -> PromptGraphs:  # noqa: F811
    pool = pool_of(model)
    assert pool is not None
    return pool.prompt_graphs


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("texts", "tokens", "padding"), [(1, 3, 0), (1, 40, 0), (3, 40, 5), (2, 300, 7), (8, 16, 0)])
def test_bits(model: Any, texts: int, tokens: int, padding: int, attention: str) -> None:  # noqa: F811
    """A prompt on a graph is that of the first call, which had none; those of other lengths lie between."""
    hb.accelerate(model)
    model.set_attn_implementation(attention)
    ids = prompt(texts, tokens)
    first = logits(model, ids, padding)
    for other in (1, -1, 2, -2):
        logits(model, prompt(texts, max(2, tokens + other)), padding)
        assert torch.equal(logits(model, ids, padding), first)
    on_graphs = any(prompt.captured is not None for prompt in graphs(model).prompts.values())
    assert on_graphs == (prompt_bucket(texts, tokens) < window(model))
    assert relative_error(first, logits(model, ids, padding, disable_compile=True)) < 0.03


def test_plans_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN takes heads of 128 numbers, and plans for the strides of keys, which are a graph's own."""
    sizes = SIDES | {"hidden_size": 512, "num_key_value_heads": 2, "num_hidden_layers": 2}
    monkeypatch.setitem(models.SHAPES, "small", ("llama", sizes))
    loaded = models.load("small", torch.device("cuda"), torch.bfloat16)
    hb.accelerate(loaded)
    for tokens in (40, 100, 250, 500, 1000):
        for _ in range(3):
            generate(loaded, prompt(1, tokens))
    assert all(kept.captured is not None for kept in graphs(loaded).prompts.values())


def test_streams(model: Any) -> None:  # noqa: F811
    """Threads whose work is on streams of their own share graphs and their memory."""
    hb.accelerate(model)
    texts = [prompt(1, tokens) for tokens in (100, 120, 110, 127)]
    right = [generate(model, ids) for ids in texts]
    found: dict[int, list[Tensor]] = {}

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[index] = [generate(model, texts[index]) for _ in range(5)]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for index, results in found.items():
        assert all(torch.equal(result, right[index]) for result in results)


def test_memory(model: Any) -> None:  # noqa: F811
    """New lengths in every call, captures among them, leave memory as it is once all sizes have come."""
    hb.accelerate(model)
    lengths = [(37 * number) % 480 + 5 for number in range(60)]
    for tokens in (*lengths, *lengths):
        generate(model, prompt(1, tokens))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for tokens in lengths:
        generate(model, prompt(1, tokens))
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (2 << 20)
    assert len(graphs(model).prompts) > (8 if window(model) > 512 else -1)
    hb.release(model)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before
