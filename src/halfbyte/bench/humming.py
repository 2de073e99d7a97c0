"""humming (github.com/vllm-project/humming, Apache-2.0), from PyPI as humming-kernels: products with int4 weights and
with stacks of int4 experts on an NVIDIA GPU.

Its own code quantizes the weights, in groups of 128 along K, and lays them out anew. K is filled up with zeros to a
multiple of 128. Its indexed product takes a list of rows sorted by expert, with each expert's rows padded to a multiple
of the kernel's tile; vLLM makes that list by a kernel of its own, and here it is made before anything is timed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

DENSE, INDEXED = "dense", "indexed"  # its names for the two products
PARTS = ("weight", "weight_scale", "zero_point", "weight_scale_2")  # of a weight, as its functions name them


@dataclass(frozen=True)
class Rows:
    """x [R, K], K padded, and its rows in humming's order: the k experts of row r are pairs k r to k r + k - 1."""

    x: Tensor
    top_k: int
    sorted_ids: Tensor
    expert_ids: Tensor
    num_tokens_padded: Tensor


class _Packed:
    """A weight [N, K] or a stack of experts [E, N, K] in humming's layout, and copies of it elsewhere in memory.

    dense: bf16 or fp16, on the current GPU. copies: how many there are, one of them the first.
    """

    GROUP_SIZE = 128

    @staticmethod
    def is_here(device: torch.device) -> bool:
        return device.type == "cuda" and find_spec("humming") is not None

    def __init__(self, dense: Tensor, copies: int, product: str) -> None:
        layers = import_module("humming.layer")
        n, self.k = dense.shape[-2:]
        self.padding = -self.k % self.GROUP_SIZE
        layer = layers.HummingLayer(
            shape_n=n,
            shape_k=self.k + self.padding,
            weight_config={"dtype": "int4", "group_size": self.GROUP_SIZE},
            num_experts=len(dense) if dense.dim() == 3 else None,
            torch_dtype=dense.dtype,
        ).to(dense.device)
        self.schema = layer.weight_schema
        if dense.dim() == 3:
            experts = [self._quantized(expert) for expert in dense]
            self.packed = {name: torch.stack([expert[name] for expert in experts]) for name in experts[0]}
        else:
            self.packed = self._quantized(dense)
        layer.load_from_tensors(self.packed)
        layer.transform()
        self.config, self.locks = layer.humming_config, layer.locks
        first = {name: part.detach() for name in PARTS if (part := getattr(layer, name, None)) is not None}
        self.copies = [first, *({name: part.clone() for name, part in first.items()} for _ in range(copies - 1))]
        self.forward = import_module("humming.forward").humming_forward
        self.compute = json.dumps({"gemm_type": product})

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.packed.values())

    def _quantized(self, dense: Tensor) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = self.schema.quant_tensor(self._padded(dense), self.schema, dense.dtype)
        return parts

    def _padded(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, self.padding)).contiguous()


class HummingLinear(_Packed):
    """A weight [N, K], K a multiple of the group."""

    def __init__(self, dense: Tensor, copies: int) -> None:
        super().__init__(dense, copies, DENSE)

    def exact(self) -> Tensor:
        """The dense weight [N, K], fp32."""
        dense: Tensor = self.schema.dequant_tensors(self.packed)
        return dense

    def __call__(self, x: Tensor, copy: int) -> Tensor:
        """x [M, K] -> [M, N]."""
        result: Tensor = self.forward(
            self.config, x, **self.copies[copy], locks=self.locks, compute_config=self.compute
        )
        return result


class Humming(_Packed):
    """A stack of experts."""

    def __init__(self, dense: Tensor, copies: int) -> None:
        super().__init__(dense, copies, INDEXED)
        self.count = len(dense)

    @property
    def bytes_of_expert(self) -> int:
        return self.nbytes // self.count

    def exact(self, expert: int) -> Tensor:
        """The dense weight [N, K] of an expert, fp32."""
        dense: Tensor = self.schema.dequant_tensors({name: part[expert] for name, part in self.packed.items()})
        return dense[:, : self.k]

    def rows(self, x: Tensor, ids: Tensor) -> Rows:
        """x [R, K] and the experts [R, k] of its rows."""
        pairs, top_k = ids.numel(), ids.shape[1]
        tile = self._tile(pairs)
        sorted_ids, expert_ids = padded_order(ids.reshape(-1), self.count, tile)
        length = torch.tensor(len(sorted_ids), dtype=torch.int32, device=x.device)
        return Rows(self._padded(x), top_k, sorted_ids, expert_ids, length)

    def __call__(self, rows: Rows, copy: int) -> Tensor:
        """[R k, N], the results of each row's experts one after the other."""
        result: Tensor = self.forward(
            self.config,
            rows.x,
            **self.copies[copy],
            sorted_ids=rows.sorted_ids,
            expert_ids=rows.expert_ids,
            num_tokens_padded=rows.num_tokens_padded,
            locks=self.locks,
            top_k=rows.top_k,
            compute_config=self.compute,
        )
        return result

    def _tile(self, pairs: int) -> int:
        """Rows of a tile of the kernel that humming takes for so many pairs."""
        ways: Any = import_module("humming.tune").get_heuristics_config(self.config, gemm_type=INDEXED)
        for least, most, way in ways:
            if least < pairs and (pairs <= most or most <= 0):
                return int(way["block_shape"][0])
        raise ValueError(f"humming has no kernel for {pairs} pairs of a token and an expert")


def padded_order(expert: Tensor, count: int, tile: int) -> tuple[Tensor, Tensor]:
    """(places, experts), int32: the places in `expert` [S] sorted by expert, those of each filled up to whole tiles
    with the number S, which stands for no row; and the expert of each tile."""
    tiles = -(-torch.bincount(expert, minlength=count) // tile)
    order = expert.argsort(stable=True)
    sorted_expert = expert[order]
    first_row = torch.searchsorted(sorted_expert, sorted_expert)
    rank = torch.arange(len(expert), dtype=torch.int64, device=expert.device) - first_row
    first_tile = tiles.cumsum(0) - tiles
    places = torch.full((int(tiles.sum()) * tile,), len(expert), dtype=torch.int32, device=expert.device)
    places[first_tile[sorted_expert] * tile + rank] = order.int()
    numbers = torch.arange(count, dtype=torch.int32, device=expert.device)
    return places, numbers.repeat_interleave(tiles)
