"""The experts of a mixture-of-experts model with 4-bit weights: a plain torch module.

It has the parameters' names, the arguments and the results of transformers' fused experts (`MixtralExperts` and its
like), and of each of the two projections, gate_up_proj and down_proj:

    NAME          the packed bytes, [E, N, K / 2] uint8, or [E, N, K / 8] int32 for int4
    NAME_scale    [E, N, K / block]: fp32, for int4 a float dtype, for mxfp4 uint8
    NAME_bias     [E, N], where there are biases

K comes last for all models, gpt-oss too. `experts.gate_up` and `experts.down` are the weights that these are parts of,
each a QuantizedWeight [E, N, K].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from halfbyte import eager_experts
from halfbyte import library as library  # torch.compile supports the block as an operator
from halfbyte.autocast import autocast_dtype
from halfbyte.experts import moe
from halfbyte.formats.settings import DEFAULT
from halfbyte.formats.stacks import StackWriter, as_stack
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.experts.reference import ACTIVATIONS, SWIGLU_OAI
from halfbyte.kernels.linear.fusion import Residual
from halfbyte.ops import quantize

PROJECTIONS = ("gate_up_proj", "down_proj")
SCALE, BIAS = "_scale", "_bias"  # what follows a projection's name

# Where PEFT looks for the shape of a parameter whose tensor has another one, to give its adapters their sizes. The name
# is DeepSpeed's, whose parameters are in pieces.
DENSE_SHAPE = "ds_shape"


class Experts4bit(torch.nn.Module):
    """Gate, up and down projections of E experts in 4 bits, and the weighted sum of those that each token has chosen.

    num_experts, hidden_size, intermediate_size: E, H and I. bias: whether the projections have biases. activation: as
    `halfbyte.moe` takes it; with "swiglu_oai" gate and up rows are interleaved. format, block_size, group_size: as
    `halfbyte.quantize` takes them; scales are never nested.
    device, dtype: of the biases, and of the dense experts that are made, as torch.nn.Linear makes one, and rounded.

    Casting the module (`.half()`, `.to(dtype)`) casts the biases and leaves packed weights and scales as they are. The
    weights take no gradients; x, top_k_weights and biases do. Raises TypeError or ValueError for what does not fit.
    """

    # What libraries ask of transformers' experts.
    is_transposed = False
    has_gate = True

    gate_up_proj_bias: Parameter | None
    down_proj_bias: Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        format: str = DEFAULT,
        *,
        activation: str = "silu",
        block_size: int | None = None,
        group_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"block_size": block_size, "group_size": group_size}
        stacks, biases = [], []
        for n, k in ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)):
            writer = StackWriter((num_experts, n, k))
            rows: list[Tensor] = []
            for expert in range(num_experts):
                dense = torch.nn.Linear(k, n, bias, device, dtype)
                writer.write(expert, 0, quantize(dense.weight, format, nested=False, **sizes))
                rows.append(dense.bias)
            stacks.append(writer.weight())
            biases.append(Parameter(torch.stack(rows).detach()) if bias else None)
        self._hold(stacks[0], stacks[1], activation, biases[0], biases[1])

    @classmethod
    def from_quantized(
        cls,
        gate_up_proj: QuantizedWeight,
        down_proj: QuantizedWeight,
        activation: str = "silu",
        gate_up_proj_bias: Parameter | None = None,
        down_proj_bias: Parameter | None = None,
    ) -> Experts4bit:
        """The module around stacks [E, 2I, H] and [E, H, I], whose packed bytes it shares. Biases: [E, 2I] and [E, H].

        Nested scales are written out.
        """
        experts = cls.__new__(cls)
        torch.nn.Module.__init__(experts)
        experts._hold(gate_up_proj, down_proj, activation, gate_up_proj_bias, down_proj_bias)
        return experts

    def _hold(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        activation: str,
        gate_up_bias: Parameter | None,
        down_bias: Parameter | None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; known are {', '.join(map(repr, ACTIVATIONS))}")
        gate_up, down = as_stack(gate_up), as_stack(down)
        count, twice, hidden = gate_up.shape
        if twice % 2 or down.shape != (count, hidden, twice // 2):
            raise ValueError(
                f"gate_up_proj has shape {list(gate_up.shape)} and down_proj {list(down.shape)}; "
                "they must be [E, 2I, H] and [E, H, I]"
            )
        self.num_experts, self.hidden_dim, self.intermediate_dim = count, hidden, twice // 2
        self.activation = activation
        self.is_concatenated = activation != SWIGLU_OAI
        self.has_bias = gate_up_bias is not None or down_bias is not None
        self._weights = {}
        for name, q, bias in zip(PROJECTIONS, (gate_up, down), (gate_up_bias, down_bias), strict=True):
            if bias is not None and bias.shape != q.shape[:2]:
                raise ValueError(f"{name}_bias has shape {list(bias.shape)}; {list(q.shape[:2])} is needed")
            self.register_parameter(name, Parameter(q.packed, requires_grad=False))
            self.register_parameter(name + SCALE, Parameter(q.scale, requires_grad=False))
            self.register_parameter(name + BIAS, bias)
            self._weights[name] = q
        self._tell_shapes()

    def _tell_shapes(self) -> None:
        """Note on the packed parameters which shapes their weights have; copies and casts lose it."""
        for name, q in self._weights.items():
            setattr(self._parameters[name], DENSE_SHAPE, torch.Size(q.shape))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._tell_shapes()

    @property
    def gate_up(self) -> QuantizedWeight:
        """[E, 2I, H], sharing the memory of the parameters."""
        return self.stack("gate_up_proj")

    @property
    def down(self) -> QuantizedWeight:
        """[E, H, I], sharing the memory of the parameters."""
        return self.stack("down_proj")

    def stack(self, name: str) -> QuantizedWeight:
        """Either of them, by the name of its parameter."""
        # Of the parameters as they are now: those who move or shard a model replace them.
        q, packed, scale = self._weights[name], self._parameters[name], self._parameters[name + SCALE]
        if q.packed is packed and q.scale is scale:
            return q
        assert packed is not None
        assert scale is not None
        self._weights[name] = replace(q, packed=packed, scale=scale, shape=(packed.shape[0], *q.shape[1:]))
        return self._weights[name]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H] in the biases' dtype, top_k_index and top_k_weights [T, k] -> [T, H].

        Under autocast hidden_states may have any dtype, and the result has autocast's. An id that is E or above, or
        negative, is of an expert on another device and is skipped.
        """
        dtype = autocast_dtype(hidden_states)
        x = hidden_states
        biases: list[Tensor | None] = [self.gate_up_proj_bias, self.down_proj_bias]
        if dtype is not None:
            x, biases = x.to(dtype), [None if bias is None else bias.to(dtype) for bias in biases]
        return moe(x, top_k_index, top_k_weights, self.gate_up, self.down, self.activation, *biases)

    def added(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, residual: Residual) -> Tensor:
        """What `forward` gives for x, added to a residual [T, H]; without gradients or autocast."""
        biases = (self.gate_up_proj_bias, self.down_proj_bias)
        of_gate_up, of_down = (None if bias is None else bias.to(x.dtype) for bias in biases)
        block = Block(self.gate_up, self.down, self.activation, of_gate_up, of_down)
        return eager_experts.moe(x, top_k_index, top_k_weights, block, residual)

    def extra_repr(self) -> str:
        q = self._weights["gate_up_proj"]
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_dim}, "
            f"intermediate_size={self.intermediate_dim}, bias={self.has_bias}, activation={self.activation}, "
            f"format={q.format}, {q.spec.size_name}={q.block_size}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts4bit:
        """Move the weights as `fn` does, but leave their dtypes, which are those of the format, alone."""
        names = [name + suffix for name in PROJECTIONS for suffix in ("", SCALE)]
        weights: dict[str, Any] = {name: self._parameters.pop(name) for name in names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        others, self._parameters = self._parameters, {}
        for name, parameter in weights.items():
            moved = fn(parameter.data)
            moved = moved if moved.dtype == parameter.dtype else parameter.data.to(moved.device)
            self._parameters[name] = Parameter(moved, requires_grad=False)
        self._parameters.update(others)
        self._tell_shapes()
        return self
