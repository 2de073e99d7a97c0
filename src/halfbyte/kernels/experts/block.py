"""What a block of experts is made of: what is the same for every token."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight


class Block(NamedTuple):
    """gate_up: a stack [E, 2I, H]. down: [E, H, I]. activation: of reference.ACTIVATIONS. gate_up_bias: [E, 2I];
    down_bias: [E, H]; each in x's dtype, or None."""

    gate_up: QuantizedWeight
    down: QuantizedWeight
    activation: str
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def stacks(self) -> tuple[QuantizedWeight, QuantizedWeight]:
        return self.gate_up, self.down

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        return self.gate_up_bias, self.down_bias

    def with_biases(self, gate_up_bias: Tensor | None, down_bias: Tensor | None) -> Block:
        return self._replace(gate_up_bias=gate_up_bias, down_bias=down_bias)
