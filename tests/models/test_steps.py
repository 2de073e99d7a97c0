"""Buckets of a model's pool: their sizes, who gets which, and what goes first."""

from typing import Any

import pytest
import torch

from halfbyte.models import steps
from halfbyte.models.buckets import cache_bytes, longest_text, texts_bucket, tokens_bucket
from halfbyte.models.fingerprint import fingerprint
from halfbyte.models.loop import Reports

from .families import DEVICE, make

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    return make("llama")


def test_sizes_of_texts() -> None:
    assert [texts_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 17, 64)] == [1, 2, 4, 4, 8, 8, 16, 32, 64]


def test_sizes_of_tokens() -> None:
    found = sorted({tokens_bucket(n, 1 << 20) for n in range(1, 3000)})
    assert found == [128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072]
    assert all(n <= tokens_bucket(n, 1 << 20) <= max(128, 1.5 * n) for n in range(1, 3000))


def test_no_size_is_above_the_longest_text_unless_the_call_is() -> None:
    assert tokens_bucket(800, 1000) == 1000
    assert tokens_bucket(700, 1000) == 768
    assert tokens_bucket(1001, 1000) == 1024
    assert tokens_bucket(5, 100) == 100


def test_bytes_of_a_cache(model: Any) -> None:
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        model(torch.ones((2, 5), dtype=torch.int64, device=DEVICE), past_key_values=cache)
    assert cache_bytes(model, 2, 40) == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert longest_text(model) == 512


def use(pool: steps.StepPool, model: Any, texts: int, tokens: int) -> Any:
    with pool.lease(model, transformers.StaticCache, texts, tokens) as bucket:
        assert bucket is not None
        assert bucket.is_busy
        return bucket


def test_the_least_recently_used_goes_first(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = cache_bytes(model, 1, 128)
    monkeypatch.setattr(steps, "SHARE", 4.6 * one / steps.total_bytes(DEVICE))
    pool = steps.StepPool()
    first, second = use(pool, model, 1, 9), use(pool, model, 2, 9)
    assert use(pool, model, 1, 100) is first
    assert pool.buckets == [second, first]
    third = use(pool, model, 1, 150)  # 1.5 of the one
    assert pool.buckets == [second, first, third]
    use(pool, model, 2, 60)
    fourth = use(pool, model, 1, 256)
    assert pool.buckets == [second, fourth]
    assert pool.nbytes == 4 * one
    pool.release()
    assert not pool.buckets


def test_a_call_that_needs_more_than_is_kept_gets_it_and_no_more(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SHARE", 2.1 * cache_bytes(model, 1, 128) / steps.total_bytes(DEVICE))
    pool = steps.StepPool()
    kept = use(pool, model, 1, 9)
    with pool.lease(model, transformers.StaticCache, 3, 130) as bucket:
        assert bucket is not None
        assert (bucket.store.rows, bucket.store.tokens) == (3, 130)
        assert kept not in pool.buckets
        with pool.lease(model, transformers.StaticCache, 1, 9) as none:
            assert none is None
    assert not pool.buckets


def test_memory_that_a_call_will_find(model: Any) -> None:
    pool = steps.StepPool()
    assert not pool.holds(model, 2, 9)
    bucket = use(pool, model, 2, 9)
    assert pool.holds(model, 2, 128)
    assert not pool.holds(model, 1, 9)
    assert not pool.holds(model, 2, 129)
    with torch.inference_mode():
        assert not pool.holds(model, 2, 9)
    with pool.lease(model, transformers.StaticCache, 2, 9) as again:
        assert again is bucket
        assert not pool.holds(model, 2, 9)
    pool.release()
    assert not pool.holds(model, 2, 9)


def test_a_cache_is_made_once(model: Any) -> None:
    """Until the model has other layers, or is another one."""
    pool = steps.StepPool()
    assert pool.empty_cache(model, 40) is None
    made = transformers.StaticCache(config=model.config, max_cache_len=30)
    pool.remember(model, made)
    with torch.no_grad():  # whoever fills the first one, fills that one alone
        model(torch.ones((2, 5), dtype=torch.int64, device=DEVICE), past_key_values=made)
    right = transformers.StaticCache(config=model.config, max_cache_len=40)
    for _ in range(2):
        found = pool.empty_cache(model, 40)
        assert type(found) is type(right)
        assert vars(found).keys() == vars(right).keys()
        for ours, theirs in zip(found.layers, right.layers, strict=True):
            assert vars(ours) == vars(theirs)
        with torch.no_grad():
            model(torch.ones((2, 5), dtype=torch.int64, device=DEVICE), past_key_values=found)
        assert [int(layer.get_seq_length()) for layer in found.layers] == [5] * 3
    other = make("llama", num_hidden_layers=2)
    assert pool.empty_cache(other, 40) is None
    pool.remember(model, found)  # not empty
    assert pool.empty_cache(model, 40) is None
    windows = make("mistral")
    pool.remember(windows, transformers.StaticCache(config=windows.config, max_cache_len=40))
    assert pool.empty_cache(windows, 40) is None


def test_settings_have_buckets_of_their_own(model: Any) -> None:
    pool = steps.StepPool()
    plain = use(pool, model, 1, 9)
    with torch.inference_mode():
        assert use(pool, model, 1, 9) is not plain
    assert use(pool, model, 1, 9) is plain
    with pytest.raises(KeyError), pool.lease(model, transformers.StaticCache, 1, 9):
        raise KeyError
    assert not plain.is_busy


def test_fingerprints(model: Any) -> None:
    before = fingerprint(model)
    assert fingerprint(model) == before
    model.lm_head.weight.add_(0)
    assert fingerprint(model) == before
    changes = []
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    changes.append(fingerprint(model))
    handle.remove()
    model.train()
    changes.append(fingerprint(model))
    model.eval()
    weight = model.lm_head.weight.data
    model.lm_head.weight.data = weight.clone()
    changes.append(fingerprint(model))
    model.lm_head.weight.data = weight
    norm, model.model.norm = model.model.norm, torch.nn.Identity()
    changes.append(fingerprint(model))
    model.model.norm = norm
    model.set_attn_implementation("eager")
    changes.append(fingerprint(model))
    model.set_attn_implementation("sdpa")
    assert fingerprint(model) == before
    assert before not in changes
    assert len(set(changes)) == len(changes)


def test_a_fingerprint_sees_adapters(model: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    adapted = peft.get_peft_model(make("llama"), config)
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    found = [fingerprint(adapted)]
    layer.scaling["default"] *= 2
    found.append(fingerprint(adapted))
    with adapted.disable_adapter():
        found.append(fingerprint(adapted))
    assert fingerprint(adapted) == found[1]
    assert len(set(found)) == 3


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_reports_come_in_their_order(ahead: int) -> None:
    report = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    reports = Reports(report, ahead)
    seen = []
    for number in range(7):
        report.fill_(number)
        reports.send()
        if number >= ahead:
            seen.append(int(reports.read()[0]))
    seen += [int(reports.read()[0]) for _ in range(ahead)]
    assert seen == list(range(7))
