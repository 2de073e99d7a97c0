"""The experts of a mixture-of-experts block, where a token's bits must not depend on the other tokens.

`moe` chooses its kernels by how many tokens an expert has. Here each expert that has some is a product of its own, by
`linear` with batch_invariant=True, so products are rounded to x's dtype. Which tokens those are is read on the host: on
a GPU that waits for the stream, and no CUDA graph can capture it.
"""

from __future__ import annotations

from torch import Tensor, float32

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.experts import reference
from halfbyte.ops import linear


def invariant_moe(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """What `halfbyte.moe` computes of the same arguments [T, H]; a row's bits depend on that row alone.

    Activations and the sum over the experts of a token, in its order, are fp32. Experts begin with a scale block.
    """
    (tokens, hidden), k = x.shape, top_k_index.shape[1]
    order, groups = reference.sort(top_k_index.reshape(-1), gate_up.shape[0])
    y = x.new_zeros((tokens * k, hidden), dtype=float32)
    for expert, first, last in groups:
        places = order[first:last]
        biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
        pairs = linear(x[places // k], gate_up[expert], biases[0], batch_invariant=True)
        inner = reference.activate(pairs.float(), activation).to(x.dtype)
        y[places] = linear(inner, down[expert], biases[1], batch_invariant=True).float()
    return reference.combine(y.view(tokens, k, hidden), top_k_weights, x.dtype)
