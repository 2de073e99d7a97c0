"""The plugin's methods on layers as vLLM makes them, for every process of a group, without an engine."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

import halfbyte as hb
from halfbyte.formats.layouts import layout_of
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.serving import products
from halfbyte.serving.ahead import Ahead
from halfbyte.serving.arrivals import parameter_of
from halfbyte.serving.vllm import head, register
from halfbyte.serving.vllm.head import HalfbyteHeadMethod
from halfbyte.serving.vllm.linear import HalfbyteLinearMethod

K = 512
KINDS = [("nf4", {"nested": True}), ("fp4", {"nested": False}), ("int4", {"group_size": 64}), ("mxfp4", {})]


@pytest.fixture(autouse=True)
def config() -> Iterator[VllmConfig]:
    register()
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def method_of(format: str) -> Any:
    kind = "halfbyte" if format in ("int4", "mxfp4") else "bitsandbytes"
    method = {"quant_method": kind, "load_in_4bit": True}
    return get_quantization_config("halfbyte").from_config(method)


def made(format: str, n: int, k: int = K, seed: int = 0, **settings: Any) -> QuantizedWeight:
    torch.manual_seed(seed)
    return hb.quantize(torch.randn(n, k, dtype=torch.bfloat16), format, **settings)


def loaded(
    quantization: Any, weights: dict[Any, QuantizedWeight], sizes: list[int], k: int, rank: int, processes: int,
    replicas: int = 1,
) -> tuple[HalfbyteLinearMethod, torch.nn.Module]:  # fmt: skip
    """A layer of one process, whose checkpoint has `weights` by vLLM's names of shards."""
    layer: Any = torch.nn.Module()
    layer.tp_rank, layer.tp_size, layer.num_kv_head_replicas = rank, processes, replicas
    method = HalfbyteLinearMethod(quantization.scheme, "model.layer")
    on_disk = next(iter(weights.values())).shape[1]
    method.create_weights(layer, k, sizes, on_disk, sum(sizes) * processes, torch.bfloat16)
    for shard, q in weights.items():
        for key, tensor in layout_of(q.format).to_tensors("weight", q).items():
            param = getattr(layer, parameter_of(key))
            param.weight_loader(param, tensor, *(() if shard is None else (shard,)))
    method.process_weights_after_loading(layer)
    return method, layer


@pytest.mark.parametrize(("format", "settings"), KINDS)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_q_k_and_v(format: str, settings: dict[str, Any], processes: int) -> None:
    """Each process has its rows of q, and those of the key and value head that its neighbours may share."""
    weights = {name: made(format, n, seed=n, **settings) for name, n in (("q", 256), ("k", 128), ("v", 128))}
    dense = {name: hb.dequantize(q, torch.float32) for name, q in weights.items()}
    heads, replicas = max(2 // processes, 1), max(processes // 2, 1)  # two heads of 64 in all
    sizes = [256 // processes, 64 * heads, 64 * heads]
    for rank in range(processes):
        method, layer = loaded(method_of(format), weights, sizes, K, rank, processes, replicas)
        first = rank // replicas * 64 * heads
        right = torch.cat([dense["q"].chunk(processes)[rank], *(dense[n][first : first + 64 * heads] for n in "kv")])
        assert torch.equal(method.dequantize_weight(layer), right.bfloat16())
        x = torch.randn(2, K)
        assert torch.allclose(method.apply(layer, x), x @ right.T, atol=1e-3)
        nested = sum(name.endswith("nested_code") for name, _ in layer.named_parameters())
        assert nested == (3 if format == "nf4" else 0)  # blocks of 64: each cut falls between groups of 32 rows


@pytest.mark.parametrize(("format", "settings"), KINDS)
@pytest.mark.parametrize("shard", [None, (0, 1)])
def test_gate_and_up_that_a_checkpoint_keeps_in_one(format: str, settings: dict[str, Any], shard: Any) -> None:
    q = made(format, 256, **settings)
    gate, up = hb.dequantize(q).chunk(2)
    for rank in range(2):
        method, layer = loaded(method_of(format), {shard: q}, [64, 64], K, rank, 2)
        right = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        assert torch.equal(method.dequantize_weight(layer), right)


@pytest.mark.parametrize(("format", "settings"), KINDS)
def test_columns(format: str, settings: dict[str, Any]) -> None:
    q = made(format, 96, **settings)
    for rank in range(4):
        method, layer = loaded(method_of(format), {None: q}, [96], K // 4, rank, 4)
        assert torch.equal(method.dequantize_weight(layer), hb.dequantize(q).chunk(4, 1)[rank])


def test_a_cut_inside_a_block_is_refused() -> None:
    q = made("nf4", 96, block_size=256)
    said = r"model\.layer cannot be cut for 4 processes: columns 0 to 128 .* cut a scale block: .*tensor_parallel_size"
    with pytest.raises(ValueError, match=said):
        loaded(method_of("nf4"), {None: q}, [96], K // 4, 0, 4)


def test_a_weight_of_another_shape_is_refused() -> None:
    for sizes, k, said in (
        ([96], 256, "512 cannot be cut into parts of 256"),
        ([64], K, "96 cannot be cut into parts"),
    ):
        with pytest.raises(ValueError, match=rf"model\.layer cannot be cut for 1 processes: {said}"):
            loaded(method_of("nf4"), {None: made("nf4", 96)}, sizes, k, 0, 1)
    with pytest.raises(ValueError, match=r"model\.layer: the checkpoint's weight has 96 rows; \[64, 64\] are expected"):
        loaded(method_of("nf4"), {None: made("nf4", 96)}, [64, 64], K, 0, 1)


def test_batch_invariance_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = torch.randn(64, K), {name: made("nf4", 64, seed=ord(name)) for name in "qkv"}
    for asked in ("0", "1"):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", asked)
        quantization = method_of("nf4")
        assert quantization.scheme.batch_invariant == (asked == "1")
    method, layer = loaded(quantization, weights, [64, 64, 64], K, 0, 1)
    asked, linear = [], products.linear

    def recorded(x: torch.Tensor, q: QuantizedWeight, bias: Any, batch_invariant: bool = False) -> torch.Tensor:
        asked.append(batch_invariant)
        return linear(x, q, bias, batch_invariant)

    monkeypatch.setattr(products, "linear", recorded)
    assert torch.equal(method.apply(layer, x)[:1], method.apply(layer, x[:1]))
    assert asked == [True] * 6  # q, k and v, each alone


def test_what_is_traced_is_part_of_vllms_key(config: VllmConfig) -> None:
    keys = set()
    for format, settings in KINDS:
        quantization = method_of(format)
        quantization.scheme.traced = config.additional_config
        loaded(quantization, {None: made(format, 64, **settings)}, [64], K, 0, 1)
        keys.add(config.compute_hash())
    assert len(keys) == len(KINDS)


def test_names_that_stay_dense() -> None:
    options = '{"modules_to_not_convert": ["o_proj", "q_proj", "k_proj", "v_proj", "gate_proj"]}'
    quantization = get_quantization_config("halfbyte").from_config_dict_json(options)
    quantization.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"],
    }  # fmt: skip
    assert quantization._stays_dense("model.layers.0.self_attn.o_proj")
    assert quantization._stays_dense("model.layers.0.self_attn.qkv_proj")
    assert quantization._stays_dense("model.layers.0.mlp.gate")  # a router
    assert not quantization._stays_dense("model.layers.0.mlp.down_proj")
    with pytest.raises(ValueError, match=r"names some of .*gate_proj, .*up_proj, which vLLM computes as one layer"):
        quantization._stays_dense("model.layers.0.mlp.gate_up_proj")


@pytest.mark.parametrize("files", [["model.safetensors.index.json"], ["model.safetensors"]])
def test_experts_of_a_checkpoint_on_the_hub(files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what names the tensors is fetched, of the revision that is served."""
    name, asked = "model.layers.0.mlp.experts.0.up_proj.weight.absmax", []

    def snapshot_download(repository: str, revision: str, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, *allow_patterns))
        for file in fnmatch.filter(files, allow_patterns[0]):
            if file.endswith("json"):
                (tmp_path / file).write_text(json.dumps({"weight_map": {name: ""}}), encoding="utf-8")
            else:
                save_file({name: torch.zeros(2)}, tmp_path / file)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    quantization = method_of("nf4")
    quantization.maybe_update_config("org/model", revision="main")
    assert quantization.experts
    index = ("org/model", "main", "*.safetensors.index.json")
    assert asked == [index, ("org/model", "main", "*.safetensors")][: 1 + ("json" not in files[0])]


def test_a_dense_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own weight and product, but for rows that halfbyte has a kernel for."""
    quantization = method_of("nf4")
    quantization.scheme.ahead = Ahead(8)
    method = quantization.get_quant_method(ParallelLMHead.__new__(ParallelLMHead), "lm_head")
    assert isinstance(method, HalfbyteHeadMethod)
    layer = torch.nn.Module()
    method.create_weights(layer, 64, [100], 64, 100, torch.bfloat16)
    layer.weight.data = torch.randn(100, 64, dtype=torch.bfloat16)
    method.process_weights_after_loading(layer)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    right = torch.nn.functional.linear(x, layer.weight)
    torch.testing.assert_close(method.apply(layer, x), right)
    monkeypatch.setattr(head.launch, "supports", lambda x, weight, bias: len(x) == 3)
    monkeypatch.setattr(head.launch, "head", lambda x, weight, bias: 2 * right)
    assert torch.equal(method.apply(layer, x), 2 * right)
    torch.testing.assert_close(method.apply(layer, x[:2]), right[:2])
    quantization.scheme.batch_invariant = True
    assert quantization.get_quant_method(ParallelLMHead.__new__(ParallelLMHead), "lm_head") is None
