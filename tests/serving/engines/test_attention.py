"""Which batches halfbyte's kernel takes from vLLM's FlashAttention, and what it is given. A stand-in computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from halfbyte.kernels.attention import reference

attention = pytest.importorskip("halfbyte.serving.vllm.attention")

HEADS, SHARED, SIZE, PAGE, SCALE = 8, 2, 64, 16, 0.1
LENGTHS = [40, 1, 0, 17]
LAYER = SimpleNamespace(layer_name="model.layers.0.self_attn.attn")
Calls = list[str]


@pytest.fixture(autouse=True)
def config() -> Iterator[VllmConfig]:
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def attend_pages(
    query: Tensor, key: Tensor, value: Tensor, cache: Any, counters: Tensor, scale: float, out: Tensor, *,
    softcap: float, sinks: Tensor | None, window: int,
) -> None:  # fmt: skip
    """As the kernel does it, text by text."""
    assert not counters.any()
    assert len(counters) >= len(query) * SHARED
    for text, length in enumerate(cache.lengths.tolist()):
        slot = int(cache.slots[text])
        if slot >= 0:
            cache.keys[slot // PAGE, slot % PAGE] = key[text]
            cache.values[slot // PAGE, slot % PAGE] = value[text]
        places = torch.arange(length)[-window:]
        pages = cache.table[text][places // PAGE]
        seen = [every[pages, places % PAGE].transpose(0, 1)[None].double() for every in (cache.keys, cache.values)]
        out[text] = reference.attend(query[text][None, :, None].double(), *seen, None, scale, softcap or None, sinks)[
            0, 0
        ]


class Batch:
    """Of texts whose tokens are in pages but for the new ones; cache: as vLLM 0.26 and later have it."""

    def __init__(self, layout: str = "NHD") -> None:
        torch.manual_seed(0)
        count = len(LENGTHS)
        self.texts = [torch.randn(length, SHARED, 2 * SIZE).bfloat16() for length in LENGTHS]
        self.cache = torch.zeros(12, PAGE, SHARED, 2 * SIZE, dtype=torch.bfloat16).transpose(1, 2)
        if layout == "HND":
            self.cache = torch.zeros(12, SHARED, PAGE, 2 * SIZE, dtype=torch.bfloat16)
        self.table, self.slots = torch.arange(12, dtype=torch.int32).view(count, 3), torch.full((count,), -1)
        for text, tokens in enumerate(self.texts):
            for place, token in enumerate(tokens[:-1]):
                self.cache[3 * text + place // PAGE, :, place % PAGE] = token
            if len(tokens):
                self.slots[text] = 3 * text * PAGE + len(tokens) - 1
        self.query = torch.randn(count + 1, HEADS, SIZE).bfloat16()  # one row of padding
        new = torch.stack([tokens[-1] if len(tokens) else torch.zeros(SHARED, 2 * SIZE) for tokens in self.texts])
        self.key, self.value = torch.cat((new, new[:1])).bfloat16().split(SIZE, -1)
        self.out = torch.full((count + 1, HEADS, SIZE), 777.0, dtype=torch.bfloat16)

    def metadata(self, **others: Any) -> Any:
        count = len(LENGTHS)
        known = {
            "num_actual_tokens": count, "max_query_len": 1, "max_seq_len": max(LENGTHS), "causal": True,
            "query_start_loc": torch.arange(count + 1), "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
            "block_table": self.table, "slot_mapping": self.slots, "use_cascade": False, "common_prefix_len": 0,
        }  # fmt: skip
        told = {field.name: known.get(field.name) for field in fields(attention.FlashAttentionMetadata)}
        return attention.FlashAttentionMetadata(**told | others)

    def right(self, window: int = 0) -> Tensor:
        found = torch.zeros(len(LENGTHS), HEADS, SIZE, dtype=torch.float64)
        for text, tokens in enumerate(self.texts):
            if len(tokens):
                seen = [part.transpose(0, 1)[None] for part in tokens[-window:].double().split(SIZE, -1)]
                found[text] = reference.attend(self.query[text][None, :, None].double(), *seen, None, SCALE)[0, 0]
        return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What FlashAttention was asked for."""
    made: Calls = []
    for name in ("forward", "do_kv_cache_update"):
        monkeypatch.setattr(attention.FlashAttentionImpl, name, lambda *args, _name=name: made.append(_name))
    monkeypatch.setattr(attention.paged, "attend_pages", attend_pages)
    monkeypatch.setattr(attention, "can_run", lambda kind, device: kind.dtype is torch.bfloat16)
    return made


def made(**others: Any) -> Any:
    told = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    return attention.HalfbyteAttention(HEADS, SIZE, SCALE, SHARED, **told | others)


def run(impl: Any, batch: Batch, metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In vLLM's order."""
    context = SimpleNamespace(attn_metadata={LAYER.layer_name: metadata})
    monkeypatch.setattr(attention, "get_forward_context", lambda: context)
    impl.do_kv_cache_update(LAYER, batch.key, batch.value, batch.cache, batch.slots)
    impl.forward(LAYER, batch.query, batch.key, batch.value, batch.cache, metadata, batch.out)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("window", [0, 9])
def test_one_new_token_each(layout: str, window: int, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, impl = Batch(layout), made(sliding_window=window or None)
    run(impl, batch, batch.metadata(), monkeypatch)
    assert calls == []
    found, right = batch.out[: len(LENGTHS)].double(), batch.right(window)
    assert (found - right).norm() < 0.01 * right.norm()
    assert (batch.out[len(LENGTHS) :] == 777).all()
    for text, tokens in enumerate(batch.texts):
        if len(tokens):
            last = len(tokens) - 1
            assert torch.equal(batch.cache[3 * text + last // PAGE, :, last % PAGE], tokens[-1])


@pytest.mark.parametrize(
    "others",
    [
        {"max_query_len": 2},
        {"causal": False},
        {"causal": torch.ones(4)},
        {"seq_lens": torch.tensor(LENGTHS[:3])},
        {"num_actual_tokens": 3},
        {"rswa_window": 3},
        {"num_prefill_reqs": 1},
        {"dcp_context_kv_lens": torch.zeros(4)},
    ],
    ids=str,
)
def test_other_batches(others: dict[str, Any], calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch()
    run(made(), batch, batch.metadata(**others), monkeypatch)
    assert calls == ["do_kv_cache_update", "forward"]


@pytest.mark.parametrize(
    "others",
    [
        {"alibi_slopes": [0.5] * HEADS},
        {"kv_sharing_target_layer_name": "another"},
        {"attn_type": "encoder_decoder"},
    ],
    ids=str,
)
def test_other_layers(others: dict[str, Any], calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch()
    run(made(**others), batch, batch.metadata(), monkeypatch)
    assert calls == ["do_kv_cache_update", "forward"]


def test_other_caches_and_counters(config: VllmConfig, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch()
    batch.cache = batch.cache.to(torch.float8_e4m3fn)
    run(made(), batch, batch.metadata(), monkeypatch)
    config.parallel_config.ubatch_size = 2
    run(made(), Batch(), batch.metadata(), monkeypatch)
    monkeypatch.setattr(attention, "MOST_REQUESTS", 3)
    run(made(), Batch(), batch.metadata(), monkeypatch)
    assert calls == 3 * ["do_kv_cache_update", "forward"]


def test_what_the_kernel_does_not_read(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is known late: the new tokens are in the cache nevertheless."""
    batch = Batch()
    batch.query = torch.randn(len(LENGTHS) + 1, HEADS, SIZE + 1).bfloat16()[..., :SIZE]
    run(made(), batch, batch.metadata(), monkeypatch)
    assert calls == ["do_kv_cache_update", "forward"]


def test_a_profiling_run(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    run(made(), Batch(), None, monkeypatch)
    assert calls == ["do_kv_cache_update", "forward"]


@pytest.mark.parametrize(("length", "requests", "ours"), [(1, 4, True), (2, 4, False), (1, 1000, False)])
def test_schedules(length: int, requests: int, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention's is left out where nobody goes by it."""
    monkeypatch.setattr(attention.FlashAttentionMetadataBuilder, "build", lambda self, prefix, common, fast: fast)
    builder = object.__new__(attention.HalfbyteMetadataBuilder)
    common = SimpleNamespace(max_query_len=length, num_reqs=requests)
    for can, others in ((True, False), (False, False), (False, True)):
        vars(builder)["_is_ours"] = can
        assert builder.build(0, common, others) == (others or (can and ours))


def test_it_stands_in_for_flash_attention() -> None:
    backend = AttentionBackendEnum.FLASH_ATTN
    attention.use()
    try:
        assert backend.get_class() is attention.HalfbyteAttentionBackend
        assert backend.get_class().get_name() == "FLASH_ATTN"
        assert backend.get_class().get_impl_cls() is attention.HalfbyteAttention
        assert backend.get_class().get_builder_cls() is attention.HalfbyteMetadataBuilder
    finally:
        backend.clear_override()
