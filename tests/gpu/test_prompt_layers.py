"""Prompts, and batches of requests, through layers in few launches: what transformers' own give, but for rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.measure.error import relative_error
from halfbyte.models.prompt_layers import BATCHED
from halfbyte.models.steps import pool_of

from .test_models import assert_same_but_for_ties, generate, model, prompt  # noqa: F401

pytest.importorskip("bitsandbytes")


def agreed(layers: Any) -> list[bool | None]:
    return [None if layer is None else layer.agrees for layer in layers.known.values()]


def launches(run: Any) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.self_device_time_total)


@pytest.mark.parametrize(("texts", "tokens", "padding"), [(1, 9, 0), (3, 40, 5), (2, 300, 7)])
def test_logits(model: Any, texts: int, tokens: int, padding: int) -> None:  # noqa: F811
    ids = prompt(texts, tokens)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    options: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip

    def logits(**others: Any) -> Tensor:
        found: Tensor = generate(model, ids, **options, **others).logits[0]
        return found

    hb.accelerate(model)
    logits()  # compares layers
    pool = pool_of(model)
    assert pool is not None
    assert agreed(pool.prompt_layers) == [True] * len(model.model.layers)
    ours, theirs = logits(), logits(disable_compile=True)
    assert relative_error(ours.double(), theirs.double()) < 0.03
    assert torch.equal(ours, logits())
    assert launches(logits) < launches(lambda: logits(disable_compile=True))


def test_batches_of_requests_on_graphs(model: Any) -> None:  # noqa: F811
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    greedy = transformers.GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = transformers.ContinuousBatchingConfig(block_size=16, num_blocks=256, max_batch_tokens=128)
    prompts = [prompt(1, tokens) for tokens in (3, 150, 70)]
    hb.accelerate(model)
    found = model.generate_batch(
        [ids[0].tolist() for ids in prompts], generation_config=greedy, continuous_batching_config=settings
    )
    layers = vars(model.model.layers[0])[BATCHED]
    assert agreed(layers) == [True] * len(model.model.layers)
    for ids, one in zip(prompts, found.values(), strict=True):
        assert one.error is None
        text = torch.cat((ids[0], torch.tensor(one.generated_tokens, device=ids.device)))[None]
        assert_same_but_for_ties(model, text, generate(model, ids))
