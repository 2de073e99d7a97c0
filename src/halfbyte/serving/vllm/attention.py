"""vLLM's attention of batches in which every request has one new token, by halfbyte's kernel (kernels/attention).

vLLM's own is FlashAttention, and for all else it stays so: prompts, drafts, caches of 8 bits, many requests. Ours puts
the new key and value into the cache in the same launch, and wants no schedule.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from halfbyte.formats.constants import kept
from halfbyte.kernels.attention.sm90 import paged
from halfbyte.kernels.common.device import properties_of
from halfbyte.serving import ahead

USUAL_PAGE = 16  # tokens, where vLLM has not decided
MOST_REQUESTS = 512  # of more, FlashAttention is asked
# Of a batch's metadata; whatever else a version of vLLM has there must say nothing.
KNOWN = {
    "num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens", "block_table", "slot_mapping",
    "scheduler_metadata", "max_num_splits", "causal", "sliding_window",
}  # fmt: skip
OTHERS = [field.name for field in fields(FlashAttentionMetadata) if field.name not in KNOWN]


def use() -> None:
    """From now on, where vLLM would choose FlashAttention in this process, have it choose this."""
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{HalfbyteAttentionBackend.__name__}")


class HalfbyteAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    """FlashAttention's, under its name, since all that vLLM asks by that name holds for it."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return HalfbyteAttention

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return HalfbyteMetadataBuilder


class HalfbyteMetadataBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """A graph of batches with one new token each serves no others, and others do not serve these."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Without FlashAttention's schedule, which takes launches of its own, where nobody goes by it."""
        few = common_attn_metadata.max_query_len == 1 and common_attn_metadata.num_reqs <= MOST_REQUESTS
        return super().build(common_prefix_len, common_attn_metadata, fast_build or (few and self._is_ours))

    @cached_property
    def _is_ours(self) -> bool:
        kind = paged.Kind(self.kv_cache_dtype, self.num_heads_q, self.num_heads_kv, self.headdim, self.block_size)
        return can_run(kind, self.device)


class HalfbyteAttention(FlashAttentionImpl):  # type: ignore[misc]
    """One layer's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm = get_current_vllm_config()
        self._engine = vllm.instance_id
        if current_platform.is_cuda():
            self._compile_ahead(vllm)
            self._counters(torch.device("cuda", torch.cuda.current_device()))  # not in a graph, for the first time
        # Two batches at once, as vLLM may split one, would count with the same counters.
        self._comes_alone = not any(getattr(vllm.parallel_config, name, 0) for name in ("enable_dbo", "ubatch_size"))
        self._kind: paged.Kind | None = None  # of the last batch, and whether the kernel is for it
        self._suits = False

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if self._takes(attn_metadata, kv_cache):
            if output_scale is None and output_block_scale is None:
                m = attn_metadata
                n = m.num_actual_tokens
                keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
                cache = paged.PagedCache(keys, values, m.block_table, m.seq_lens, m.slot_mapping)
                new = query[:n], key[:n], value[:n]
                if output.is_contiguous() and paged.is_readable(*new, cache):
                    softcap, window = float(self.logits_soft_cap), self._window(m)
                    paged.attend_pages(
                        *new, cache, self._counters(query.device), self.scale, output,
                        softcap=softcap, sinks=self.sinks, window=window,
                    )  # fmt: skip
                    return output
            # Of such as these nobody has put the new token into the cache.
            super().do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        others = (output_scale, output_block_scale)
        attended: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *others)
        return attended

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """vLLM asks for this ahead of `forward`, which does it itself where it takes the batch."""
        metadata = get_forward_context().attn_metadata
        metadata = metadata[0] if isinstance(metadata, list) else metadata
        metadata = metadata.get(layer.layer_name) if isinstance(metadata, dict) else metadata
        if not self._takes(metadata, kv_cache):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def _takes(self, metadata: Any, kv_cache: Tensor) -> bool:
        """Whether the kernel is for a batch, as far as that can be said before there are queries."""
        m = metadata
        return (
            type(m) is FlashAttentionMetadata
            and m.max_query_len == 1
            and len(m.seq_lens) == m.num_actual_tokens <= min(MOST_REQUESTS, len(m.block_table), len(m.slot_mapping))
            and m.causal is True
            and not any(_says(getattr(m, name)) for name in OTHERS)
            and self._window(m) >= 0
            and self._is_known(kv_cache)
        )

    def _window(self, metadata: Any) -> int:
        """How many tokens one sees, itself included; 0 is all, and -1 what the kernel does not know."""
        left, right = getattr(metadata, "sliding_window", None) or self.sliding_window
        if (left, right) == (-1, -1):
            return 0
        return left + 1 if left >= 0 and right in (-1, 0) else -1

    def _is_known(self, kv_cache: Tensor) -> bool:
        sinks = None if self.sinks is None else self.sinks.dtype
        kind = paged.Kind(
            kv_cache.dtype, self.num_heads, self.num_kv_heads, self.head_size, kv_cache.shape[2],
            bool(self.logits_soft_cap), sinks,
        )  # fmt: skip
        if kind != self._kind:
            self._kind = kind
            self._suits = (
                self._comes_alone
                and kv_cache.dim() == 4
                and kv_cache.shape[1] == self.num_kv_heads
                and kv_cache.shape[3] == 2 * self.head_size
                and self.attn_type == AttentionType.DECODER
                and self.alibi_slopes is None
                and self.kv_sharing_target_layer_name is None
                and not self.batch_invariant_enabled
                and self.dcp_world_size == 1
                and sinks in (None, kind.dtype, torch.float32)
                and can_run(kind, kv_cache.device)
            )
        return self._suits

    def _compile_ahead(self, vllm: Any) -> None:
        """For the cache that vLLM is told to have. It may have another one after all."""
        sinks = None if self.sinks is None else self.sinks.dtype
        dtype, page = vllm.model_config.dtype, vllm.cache_config.block_size or USUAL_PAGE
        heads = self.num_heads, self.num_kv_heads, self.head_size
        kind = paged.Kind(dtype, *heads, page, bool(self.logits_soft_cap), sinks)
        ahead.attention(kind, MOST_REQUESTS, vllm.model_config.max_model_len)

    def _counters(self, device: torch.device) -> Tensor:
        return counters(self._engine, MOST_REQUESTS * self.num_kv_heads, device)


@kept
def counters(engine: str, count: int, device: torch.device) -> Tensor:
    """Zeros, and zeros again behind every launch. All layers of an engine have the same: they come one by one."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def can_run(kind: paged.Kind, device: torch.device) -> bool:
    """Whether the kernel is for such attention there."""
    return device.type == "cuda" and paged.can_compile(kind, properties_of(device.index))


def _says(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)
