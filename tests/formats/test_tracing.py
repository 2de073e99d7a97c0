"""A view of bitsandbytes' tensors made inside a compiled function: no graph break, also for a Params4bit."""

from __future__ import annotations

import pytest
import torch

from halfbyte import dequantize, from_bitsandbytes

bnb = pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_compiles_whole(alone: bool, nested: bool) -> None:
    layer = bnb.nn.Linear4bit(128, 64, quant_type="nf4", compress_statistics=nested).to("cpu")
    weight, state = layer.weight, layer.weight.quant_state

    def view() -> torch.Tensor:
        return dequantize(from_bitsandbytes(weight) if alone else from_bitsandbytes(weight.data, state))

    compiled = torch.compile(view, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), view())
