"""Checkpoints for `halfbyte bench engine` and `bench serve`, made of a model's sizes alone: random NF4 weights, or a
configuration only.

A checkpoint of NF4 weights is what bitsandbytes would save: its keys, its configuration, experts one by one. All of its
4-bit weights are cut from one that was drawn and quantized, 16384 numbers after 16384 in random order, because to
quantize billions of them takes minutes. Scales are such that no layer drowns another (`models.spread_of`), as tokens
are compared. For weights that an engine draws itself (vLLM's `load_format="dummy"`) a configuration is enough.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from halfbyte.atomic import check_space
from halfbyte.checkpoints.experts import is_one, is_stack
from halfbyte.checkpoints.select import is_linear, quantization_config
from halfbyte.formats import bitsandbytes
from halfbyte.formats.nested import NESTED_BLOCK_SIZE
from halfbyte.formats.nf4 import NF4
from halfbyte.formats.weight import NestedScale, QuantizedWeight
from halfbyte.measure import models
from halfbyte.ops import quantize

KINDS = ("llama", "qwen3_moe")  # whose weights a checkpoint names as transformers' modules do, and which the tests run
MODELS = tuple(name for name, (kind, _) in models.SHAPES.items() if kind in KINDS)
CPU = torch.device("cpu")
DTYPE = torch.bfloat16
GROUP_SIZE = 128  # of INT4
NF4_WEIGHTS, INT4_CONFIG, DENSE_CONFIG = "nf4", "int4", "dense"  # what a checkpoint has: weights, or a configuration
PIECE = NF4.block_size * NESTED_BLOCK_SIZE  # weights that share an entry of the nested scales
POOL = 1 << 25  # weights that all others are cut from
SHARD = 1 << 30  # bytes of a file, which are in memory at once
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Sizes:
    """A named shape: transformers' configuration, and the shape of each weight by its name in a checkpoint."""

    config: Any
    shapes: dict[str, tuple[int, ...]]

    @property
    def packed(self) -> set[str]:
        """The weights that are in 4 bits in a quantized checkpoint: linear layers and experts."""
        return {name for name in self.shapes if is_linear(name) or is_one(name)}


def sizes_of(name: str, layers: int = 0) -> Sizes:
    """Of one of MODELS. layers: so many of them only; 0 for all."""
    from transformers import AutoModelForCausalLM

    config = models.config_of(name, DTYPE, layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    config.architectures = [type(model).__name__]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    shapes: dict[str, tuple[int, ...]] = {}
    for key, weight in model.state_dict().items():
        if is_stack(key):
            shapes |= _one_by_one(key, weight.shape)
        elif key not in tied:
            shapes[key] = tuple(weight.shape)
    return Sizes(config, shapes)


def _one_by_one(key: str, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """The experts of a stack [E, N, K], as checkpoints name them."""
    path, _, last = key.rpartition(".")
    count, n, k = shape
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    return {f"{path}.{e}.{part}.weight": (n // len(parts), k) for e in range(count) for part in parts}


class Checkpoints:
    """Folders of checkpoints, made when they are first asked for. They are large, so only those of one model are there
    at a time. Use as a context manager: when it ends, all of them are gone.

    Folders have the same names in every run, below one that has not: an engine that is started in the latter and given
    the former finds what it has compiled in an earlier run.
    """

    def __init__(self, layers: int, nested: bool) -> None:
        self.layers, self.nested = layers, nested
        self._sizes: dict[str, Sizes] = {}
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._drop()

    def sizes(self, model: str) -> Sizes:
        if model not in self._sizes:
            self._drop()
            self._sizes = {model: sizes_of(model, self.layers)}
        return self._sizes[model]

    def get(self, model: str, holds: str) -> Path:
        """holds: NF4_WEIGHTS, INT4_CONFIG or DENSE_CONFIG. Raises OSError where there is no room."""
        sizes = self.sizes(model)
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="halfbyte-", dir=_place(sizes))
        path = Path(self._folder.name) / f"{model}-{holds}"
        if not path.exists():
            path.mkdir()
            if holds == NF4_WEIGHTS:
                write_weights(path, sizes, self.nested)
            write_config(path, sizes, holds, self.nested)
        return path

    def served(self, model: str) -> Path:
        """NF4 weights, and a tokenizer, which a server needs: a word for each token."""
        path = self.get(model, NF4_WEIGHTS)
        write_tokenizer(path, self.sizes(model).config.vocab_size)
        return path

    def _drop(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None


def _place(sizes: Sizes) -> Path:
    """Memory that looks like a disk, where it has the room, so that loading waits for no disk."""
    packed = sizes.packed
    needed = sum(_bytes_of(prod(shape), name in packed) for name, shape in sizes.shapes.items()) + SHARD
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed:
        return MEMORY
    place = Path(gettempdir())
    check_space(place, needed)
    return place


def _bytes_of(count: int, is_packed: bool) -> int:
    return count // 2 + 4 * (count // NF4.block_size) if is_packed else DTYPE.itemsize * count


def write_config(path: Path, sizes: Sizes, holds: str, nested: bool) -> None:
    """config.json, with which transformers and vLLM take the checkpoint for what it is."""
    facts = sizes.config.to_dict()
    dense = [name.removesuffix(".weight") for name in sizes.shapes.keys() - sizes.packed if len(sizes.shapes[name]) > 1]
    block_sizes = {NF4_WEIGHTS: NF4.block_size, INT4_CONFIG: GROUP_SIZE}
    if holds in block_sizes:
        dtype = str(DTYPE).removeprefix("torch.")
        facts["quantization_config"] = quantization_config(
            holds, block_sizes[holds], nested and holds == NF4_WEIGHTS, dtype, sorted(dense)
        )
    (path / "config.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def write_tokenizer(path: Path, vocabulary: int) -> None:
    """Of the words t0, t1 and so on; special ones are those of the configuration (`models.config_of`). A chat is its
    messages, one after the other."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocabulary)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t3", chat_template=template
    )
    tokenizer.save_pretrained(path)


def write_weights(path: Path, sizes: Sizes, nested: bool) -> None:
    """Files of at most SHARD bytes, or one weight more, and their index. nested: scales of linear layers; experts have
    plain ones."""
    index: dict[str, str] = {}
    for number, tensors in enumerate(_shards(_drawn(sizes, nested)), 1):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, path / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    told = json.dumps({"metadata": {}, "weight_map": index})
    (path / "model.safetensors.index.json").write_text(told, encoding="utf-8")


def _shards(weights: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of each file."""
    shard: dict[str, Tensor] = {}
    size = 0
    for tensors in weights:
        shard |= tensors
        size += sum(tensor.nbytes for tensor in tensors.values())
        if size > SHARD:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _drawn(sizes: Sizes, nested: bool) -> Iterator[dict[str, Tensor]]:
    """The tensors of each weight."""
    generator = torch.Generator().manual_seed(0)
    pools = {each: Pool(each, generator) for each in ({False, nested} if any(map(is_one, sizes.shapes)) else {nested})}
    packed, layers = sizes.packed, sizes.config.num_hidden_layers
    for name, shape in sizes.shapes.items():
        module = name.removesuffix(".weight")
        spread = models.spread_of(shape[-1], module, layers)
        if name in packed:
            weight = pools[nested and not is_one(name)].cut(shape, spread)
            yield bitsandbytes.to_tensors(name, weight)
        elif len(shape) == 1:
            yield {name: torch.ones(shape, dtype=DTYPE, device=CPU)}  # a norm's
        else:
            spread *= models.ROUTER if module.endswith(".gate") else 1.0
            yield {name: torch.empty(shape, dtype=DTYPE, device=CPU).normal_(std=spread, generator=generator)}


class Pool:
    """A quantized weight of standard deviation 1, and others that are cut from it. nested: its scales."""

    def __init__(self, nested: bool, generator: torch.Generator) -> None:
        self.generator = generator
        self.weight = quantize(
            torch.randn(POOL, dtype=torch.float32, device=CPU, generator=generator), NF4.name, nested=nested
        )

    def cut(self, shape: tuple[int, ...], spread: float) -> QuantizedWeight:
        """A weight of this shape and standard deviation, of pieces in random order."""
        source, count = self.weight, prod(shape)
        chosen = torch.randint(
            POOL // PIECE, (-(-count // PIECE),), dtype=torch.int64, device=CPU, generator=self.generator
        )
        packed = source.packed.view(-1, PIECE // 2)[chosen].view(-1)[: count // 2]
        scale = source.scale.view(-1, NESTED_BLOCK_SIZE)[chosen].view(-1)[: -(-count // NF4.block_size)]
        if source.nested is None:
            return QuantizedWeight(NF4.name, packed, scale * spread, shape, DTYPE, NF4.block_size)
        code, absmax, offset, _ = source.nested
        nested = NestedScale(code, absmax[chosen] * spread, offset * spread)
        return QuantizedWeight(NF4.name, packed, scale, shape, DTYPE, NF4.block_size, nested)
