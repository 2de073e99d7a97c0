"""What would not be loaded afterwards is refused before anything is written, or written so that it is loaded."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import LINEAR, K, everything, left, tensors

from halfbyte import hub
from halfbyte.checkpoints import dequantize_checkpoint, quantize_checkpoint


def refused(match: str, source: Path, target: Path, error: type[Exception] = ValueError, **settings: Any) -> None:
    """Both with --dry-run and without, and nothing is there afterwards."""
    before = left(target.parent)
    for dry_run in (True, False):
        with pytest.raises(error, match=match):
            quantize_checkpoint(source, target, dry_run=dry_run, **settings)
    assert left(target.parent) == before


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"include": ["*"]}, "'model.embed_tokens.weight', an embedding"),
        ({"only": ["*"]}, "only takes in 'model.embed_tokens.weight', an embedding"),
        ({"include": ["*embed_tokens"]}, "exclude 'model.embed_tokens' for one"),
    ],
)
def test_embeddings(source: Path, tmp_path: Path, settings: dict[str, Any], match: str) -> None:
    refused(match, source, tmp_path / "x", **settings)
    if settings != {"include": ["*embed_tokens"]}:
        quantize_checkpoint(source, tmp_path / "x", exclude=["*embed_tokens"], **settings)


def test_routers_and_tied_heads(source: Path, tmp_path: Path) -> None:
    config = {"model_type": "llama", "tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    refused("'lm_head.weight', which config.json ties", source, tmp_path / "x", include=["lm_head"])
    file = tmp_path / "moe.safetensors"
    names = ("mlp.experts.0.up_proj", "mlp.gate", "mlp.up_proj")
    save_file({f"{name}.weight": torch.randn(32, K) for name in names}, file)
    refused("'mlp.gate.weight', a router", file, tmp_path / "x.safetensors", include=["*gate"])
    refused("'mlp.experts.0.up_proj.weight', one of several", file, tmp_path / "x.safetensors", include=["*experts*"])


def test_a_directory_without_config(source: Path, tmp_path: Path) -> None:
    (source / "config.json").unlink()
    refused(r"has no config\.json, without which nothing loads", source, tmp_path / "x")


def test_shards_without_an_index_get_one(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors.index.json").unlink()
    summary = quantize_checkpoint(source, tmp_path / "x")
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == everything(tmp_path / "x").keys()
    assert sorted(summary.files) == sorted(
        path.relative_to(tmp_path / "x").as_posix() for path in (tmp_path / "x").rglob("*") if path.is_file()
    )


def test_shards_that_are_missing(tmp_path: Path) -> None:
    """Their names tell, where no index does."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    for number in (1, 3):
        save_file({f"l.{number}.weight": torch.randn(32, K)}, source / f"model-{number:05}-of-00003.safetensors")
    refused("lacks model-00002-of-00003.safetensors, and has no index", source, tmp_path / "x")


def test_kinds_of_source_and_destination(source: Path, tmp_path: Path) -> None:
    refused("is the name of a file, and .*source is a whole model", source, tmp_path / "x.safetensors")
    save_file(tensors(), tmp_path / "s.safetensors")
    refused(r"end its name in \.safetensors", tmp_path / "s.safetensors", tmp_path / "x")


def test_dry_run_says_what_is_done(source: Path, tmp_path: Path) -> None:
    planned = quantize_checkpoint(source, tmp_path / "x", "int4", dry_run=True)
    assert left(tmp_path) == ["source"]
    done = quantize_checkpoint(source, tmp_path / "x", "int4")
    assert planned.dry_run
    assert not done.dry_run
    assert planned.files == done.files == tuple(sorted(done.files))
    assert [(p.name, p.shape, p.bytes_after) for p in planned.layers] == [
        (d.name, d.shape, d.bytes_after) for d in done.layers
    ]
    assert (planned.copied, planned.skipped, planned.bytes_after) == (done.copied, done.skipped, done.bytes_after)
    assert all(layer.relative_error is None for layer in planned.layers)
    back = dequantize_checkpoint(tmp_path / "x", tmp_path / "y", dry_run=True)
    assert {layer.name for layer in back.layers} == {layer.name for layer in done.layers}
    assert left(tmp_path) == ["source", "x"]


def test_experts_stay_dense_and_are_named(tmp_path: Path) -> None:
    """One by one and in stacks; biases and shared experts are no part of that."""
    torch.manual_seed(0)
    one_by_one = [f"model.layers.0.mlp.experts.{i}.{name}.weight" for i in range(2) for name in ("gate_proj", "w2")]
    stacks = ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]
    shared = "model.layers.0.mlp.shared_experts.up_proj.weight"
    content = {name: torch.randn(32, K).bfloat16() for name in (*one_by_one, shared)}
    content |= {name: torch.randn(2, 32, K).bfloat16() for name in stacks}
    content["model.layers.1.mlp.experts.gate_up_proj_bias"] = torch.randn(2, 32).bfloat16()
    source = tmp_path / "source"
    source.mkdir()
    save_file(content, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    summary = quantize_checkpoint(source, tmp_path / "x")
    assert [layer.name for layer in summary.layers] == [shared]
    assert set(summary.experts) == {*one_by_one, *stacks}
    assert summary.experts_bytes == sum(content[name].nbytes for name in summary.experts)
    written = load_file(tmp_path / "x" / "model.safetensors")
    assert all(torch.equal(written[name], content[name]) for name in summary.experts)
    skip = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]["llm_int8_skip_modules"]
    assert "model.layers.0.mlp.experts" in skip
    assert not any(".experts." in name for name in skip)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_transformers_alone_loads_a_model_with_dense_experts(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    sizes = {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts": 4, "moe_intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=320, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts_per_tok=2, dtype=torch.bfloat16, **sizes,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "dense")
    summary = quantize_checkpoint(tmp_path / "dense", tmp_path / "x", experts=False)
    assert len(summary.layers) == 8  # attention
    assert summary.experts
    dequantize_checkpoint(tmp_path / "x", tmp_path / "back")
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        found, info = load(tmp_path / "x", device_map="cpu", dtype=torch.bfloat16, output_loading_info=True)
        expected = load(tmp_path / "back", dtype=torch.bfloat16)(ids).logits.float()
        logits = found(ids).logits.float()
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (logits - expected).norm() < 0.02 * expected.norm()


@contextmanager
def an_ordinary_user(path: Path, locked: str) -> Iterator[Path]:
    """A copy of `path` for somebody without root's powers, in which `locked` may not be read."""
    place = Path(tempfile.mkdtemp())
    copy = shutil.copytree(path, place / path.name)
    for found in (place, copy, *copy.rglob("*")):
        found.chmod(0o777)
    (copy / locked).chmod(0o333)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield copy
    finally:
        if root:
            os.seteuid(0)
        copy.chmod(0o777)
        shutil.rmtree(place)


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
@pytest.mark.parametrize("name", ["", "config.json", "b.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_what_cannot_be_read_is_called_that(source: Path, name: str) -> None:
    with an_ordinary_user(source, name) as copy:
        refused(f"{copy.name}.*{name} cannot be read", copy, copy.parent / "x", PermissionError)


def test_a_name_on_the_hub(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        if name == "org/gone":
            raise RuntimeError("404 Not Found\nmuch more")
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert {layer.name for layer in quantize_checkpoint("org/model-1.5", tmp_path / "x").layers} == set(LINEAR)
    refused(
        r"the Hugging Face hub did not give it \(404 Not Found\)", Path("org/gone"), tmp_path / "y", FileNotFoundError
    )
    assert set(asked) == {"org/model-1.5", "org/gone"}
    for path in ("a/b/c", "nowhere", "../model", "org/x.safetensors", str(source)):
        assert hub.local(path) == Path(path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("pip install huggingface_hub", Path("org/model"), tmp_path / "y", ImportError)
