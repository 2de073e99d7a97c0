"""The kernels of attention compile for every target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import gpu_of, on_targets

from halfbyte.kernels.common.targets import compile_for, pointer

pytest.importorskip("triton")

from halfbyte.kernels.attention import triton as attention
from halfbyte.kernels.attention.plan import plan_for

pytestmark = pytest.mark.slow


@on_targets(
    "texts, heads, shared, tokens, size, dtype",
    [
        (1, 32, 8, 320, 128, torch.float16),
        (1, 64, 8, 4099, 80, torch.bfloat16),
        (32, 16, 16, 4099, 256, torch.float16),
        (128, 32, 1, 8, 64, torch.bfloat16),
    ],
)
def test_compiles(
    texts: int,
    heads: int,
    shared: int,
    tokens: int,
    size: int,
    dtype: torch.dtype,
    target: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = gpu_of(target)
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(attention, "launch", lambda *launch: kept.append(launch))
    monkeypatch.setattr(attention, "properties_of", lambda _: properties)
    query = torch.empty(texts, heads, 1, size, dtype=dtype, device="meta")
    keys = torch.empty(texts, shared, tokens, size, dtype=dtype, device="meta")
    mask = torch.empty(texts, 1, 1, tokens, dtype=torch.bool, device="meta")
    taken = attention.takes(query, keys, keys, mask)
    assert taken == (target != 75 or dtype is torch.float16)  # Turing's tensor cores do not know bf16
    if not taken:
        return
    attention.attend(query, keys, keys, mask, size**-0.5)
    parts = plan_for(properties, texts * shared, tokens, size).parts
    assert len(kept) == (1 if parts == 1 else 2)
    for kernel, _, arguments, _, configure in kept:
        values = dict(zip(kernel.arg_names, arguments, strict=False))
        signature = {n: pointer(v.dtype) if isinstance(v, torch.Tensor) else "i32" for n, v in values.items()}
        unaligned = [name for name, value in values.items() if isinstance(value, int) and value % 16]
        grid, options = configure(properties)
        assert grid == (texts * shared * parts if kernel is attention.attend_kernel else texts * heads)
        constants = {name: options.pop(name) for name in kernel.arg_names if name in options}
        compiled = compile_for(kernel, target, signature, constants, unaligned, **options)
        assert compiled.asm["ptx" if isinstance(target, int) else "hsaco"]
        if isinstance(target, int):
            assert compiled.metadata.shared <= properties.shared_memory
