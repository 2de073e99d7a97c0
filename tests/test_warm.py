"""`halfbyte warm`: it compiles what `linear` would ask for, once, and leaves the cache whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import A100, H200
from safetensors.torch import save_file
from typer.testing import CliRunner

import halfbyte as hb
from halfbyte import warm
from halfbyte.cli import app
from halfbyte.formats import bitsandbytes, gpt_oss
from halfbyte.kernels.common import compiler, nvrtc
from halfbyte.kernels.common.device import DeviceProperties, properties_for
from halfbyte.kernels.common.targets import CUDA_TARGETS
from halfbyte.kernels.linear import cache as products
from halfbyte.kernels.linear import cuda, laid_out, reach, side_by_side
from halfbyte.kernels.linear.dispatch import choose_back
from halfbyte.kernels.linear.problem import Problem, problem_of
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.models import own, projections
from halfbyte.nn import Linear4bit
from halfbyte.warm_experts import Experts

pytestmark = pytest.mark.slow

runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NF4 = warm.Settings("nf4", 64, True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(code: int, *arguments: object) -> str:
    result = runner.invoke(app, ["warm", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    assert not (result.stderr if code == 0 else result.stdout)
    return result.stderr if code else result.stdout


def test_compiles_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--shape", "64x1024", "--rows", "1", "--target", "sm_90")
    text = run(0, *arguments)
    assert text.startswith("2 variants for sm_90, 0 of them cached already, ")  # decode, and hopper if batch-invariant
    assert text.endswith(f"kept in {cache}\n")
    kept = {path.name: path.read_bytes() for path in cache.iterdir()}
    assert len(kept) == 2
    assert all(name.endswith(".cubin") for name in kept)
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: pytest.fail("compiled although it is cached"))
    assert "2 variants for sm_90, 2 of them cached already" in run(0, *arguments)
    found = warm.variants(warm.of_shapes([(64, 1024)], [BF16], NF4), [1], H200)
    for variant in found:  # by the very way that `linear` takes
        assert nvrtc.cubin(variant)[:4] == b"\x7fELF"
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == kept


def test_other_targets(cache: Path) -> None:
    for target in ("sm_75", "sm_120"):
        run(0, "--shape", "96x320", "--rows", "1,9", "--dtype", "float16", "--target", target)
    assert len(list(cache.iterdir())) >= 2


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each product by itself, where a kernel is faster than the dense weight."""
    choose_back.cache_clear()
    wanted = warm.of_shapes([(64, 1024), (4096, 4096)], [BF16], NF4, bias=True)
    usual = set(warm.variants(wanted, [1, 300], H200))
    more = set(warm.variants(wanted, [1, 300], H200, gradients=True)) - usual
    assert {dict(variant.constants)["back"] for variant in more} == {True}
    assert all(dict(variant.constants).get("back", False) is False for variant in usual)
    more = set(warm.variants(wanted, [1, 300], A100, gradients=True)) - set(warm.variants(wanted, [1, 300], A100))
    assert more
    kernels = {"sm80_back/kernel.cu", "sm80_gemm/kernel.cu"}
    assert all(variant.source.partition("\n")[0].split('"')[1] in kernels for variant in more)
    choose_back.cache_clear()


def groups(path: Path, *dtypes: torch.dtype, settings: warm.Settings = NF4) -> set[warm.Product]:
    return warm.of_checkpoint(path, dtypes or (BF16,), settings)


def test_what_captured_steps_fuse(tmp_path: Path) -> None:
    """Of a family that is known, by its config.json; each is what a step will ask for."""
    sides = {"q_proj": (4096, 4096), "k_proj": (1024, 4096), "v_proj": (1024, 4096), "o_proj": (4096, 4096)}
    inner = {"gate_proj": (14336, 4096), "up_proj": (14336, 4096), "down_proj": (4096, 14336)}
    names = {f"self_attn.{name}": shape for name, shape in sides.items()} | {f"mlp.{n}": s for n, s in inner.items()}
    tensors = {f"model.layers.0.{name}.weight": torch.empty(shape, dtype=BF16) for name, shape in names.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert not any(isinstance(group, warm.Fused) for group in groups(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_act": "silu"}))
    found = groups(tmp_path)
    fused = sorted((len(one.group), one.fusion.activation) for one in found if isinstance(one, warm.Fused))
    assert fused == [(1, ""), (1, ""), (2, "silu"), (3, "")]
    assert warm.settings_of(found) == NF4
    more = set(warm.variants(found, [1], H200)) - set(warm.variants(groups(tmp_path / "model.safetensors"), [1], H200))
    assert not more  # the same folder
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_act": "gelu"}))
    assert len(warm.variants(found, [1], H200)) == len(warm.variants(groups(tmp_path), [1], H200)) + 4


def test_checkpoints(tmp_path: Path) -> None:
    weights = {"gate_proj": (96, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
    tensors = {f"model.layers.0.mlp.{name}.weight": torch.randn(shape).half() for name, shape in weights.items()}
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(64).half()
    tensors["model.embed_tokens.weight"] = torch.randn(100, 64).half()
    for name in weights:  # quantized, too, but no layers of their own
        tensors[f"model.layers.1.mlp.experts.0.{name}.weight"] = torch.randn(64, 64).half()
    source = tmp_path / "dense.safetensors"
    save_file(tensors, source)
    gate = Problem(BF16, 96, 128, "nf4", 64, torch.uint8, 256)
    up = Problem(BF16, 64, 128, "nf4", 64, torch.uint8, 256, bias=True)
    down = Problem(BF16, 128, 64, "nf4", 64, torch.uint8, 256)
    assert groups(source) == {(gate,), (up,), (down,), (gate, up)}
    for format, options in (("nf4", []), ("fp4", ["--flat", "--block-size", "128"]), ("int4", ["--group-size", "32"])):
        target = tmp_path / f"{format}.safetensors"
        result = runner.invoke(app, ["quantize", str(source), str(target), "--format", format, *options])
        assert result.exit_code == 0, result.output
        size, nested = {"nf4": (64, True), "fp4": (128, False), "int4": (32, False)}[format]
        # It says itself what its weights are, and they are what was foretold of the dense one.
        assert groups(target, F16, F32) == groups(source, F16, F32, settings=warm.Settings(format, size, nested))
    gate, up = Problem(BF16, 96, 128, "int4", 128, F16), Problem(BF16, 64, 128, "int4", 128, F16, bias=True)
    # Groups of 128 do not divide the third's K.
    assert groups(source, settings=warm.Settings("int4", 128, False)) == {(gate,), (up,), (gate, up)}
    text = run(0, tmp_path / "nf4.safetensors", "--rows", "1", "--target", "sm_80")
    assert "variants for sm_80" in text


def test_no_tensor_is_read(tmp_path: Path) -> None:
    """Only headers: a file whose tensors are a hole in the disk."""
    n, k = 4096, 1 << 20
    info = {"dtype": "BF16", "shape": [n, k], "data_offsets": [0, 2 * n * k]}
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": info}).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * n * k)
    assert groups(path) == {(Problem(BF16, n, k, "nf4", 64, torch.uint8, 256),)}


EXPERTS, HIDDEN, INNER = 4, 256, 128
MIXTURE = {"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": HIDDEN, "num_experts_per_tok": 2}


def block_of(
    k: int = 2, format: str = "nf4", size: int = 64, scale: torch.dtype = F32, activation: str = "silu", **more: Any
) -> Experts:
    gate_up = Problem(BF16, EXPERTS * 2 * INNER, HIDDEN, format, size, scale, **more)
    return Experts(EXPERTS, k, gate_up, replace(gate_up, n=EXPERTS * HIDDEN, k=INNER), activation)


def mixture(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def one_by_one(layers: int = 2) -> dict[str, torch.Tensor]:
    """As Qwen3-MoE has it."""
    sides = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    found = {
        f"model.layers.{layer}.mlp.experts.{e}.{name}.weight": torch.randn(shape).bfloat16()
        for layer in range(layers) for e in range(EXPERTS) for name, shape in sides.items()
    }  # fmt: skip
    return found | {"model.layers.0.mlp.gate.weight": torch.randn(EXPERTS, HIDDEN).bfloat16()}


def test_dense_experts(tmp_path: Path) -> None:
    """One by one or in stacks: what they will be, without nested scales; equal layers count once."""
    ones = mixture(tmp_path / "ones", MIXTURE, one_by_one())
    stacks = {"gate_up_proj": torch.zeros(EXPERTS, 2 * INNER, HIDDEN), "down_proj": torch.zeros(EXPERTS, HIDDEN, INNER)}
    stacked = mixture(
        tmp_path / "stacks", {"text_config": MIXTURE},
        {f"model.layers.0.mlp.experts.{name}": stack.bfloat16() for name, stack in stacks.items()},
    )  # fmt: skip
    for path in (ones, stacked):
        assert groups(path) == {block_of()}
        assert groups(path, settings=warm.Settings("int4", 128, False)) == {block_of(2, "int4", 128, BF16)}
        assert warm.settings_of(groups(path)) == warm.Settings("nf4", 64, False)
        with pytest.raises(ValueError, match="no weight of a linear layer"):
            groups(path, settings=warm.Settings("int4", 96, False))  # which divides no K
        saved = tmp_path / f"{path.name}-nf4"
        result = runner.invoke(app, ["quantize", str(path), str(saved)])
        assert result.exit_code == 0, result.output
        assert groups(saved) == {block_of()}  # as foretold
    for config in ({}, MIXTURE | {"hidden_act": "relu"}):  # how many experts, or how gates are computed, nobody knows
        (ones / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="no weight of a linear layer"):
            groups(ones)


def test_experts_of_bitsandbytes(tmp_path: Path) -> None:
    """One by one with nested scales, which a stack writes out. Beside a layer of another shape."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in one_by_one().items():
        if ".experts." in name:
            tensors |= bitsandbytes.to_tensors(name, hb.quantize(weight, "nf4"))
    name = "model.layers.0.mixer.in_proj.weight"
    tensors |= bitsandbytes.to_tensors(name, hb.quantize(torch.randn(64, 64).bfloat16(), "nf4"))
    path = mixture(tmp_path / "model", MIXTURE | {"num_experts_per_tok": 3}, tensors)
    assert groups(path) == {block_of(3), (Problem(BF16, 64, 64, "nf4", 64, torch.uint8, 256),)}
    assert warm.settings_of(groups(path)) == NF4


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Its own MXFP4 stacks, and those that Unsloth quantized one by one; both with biases."""
    config = {"model_type": "gpt_oss", "hidden_act": "silu", "hidden_size": HIDDEN, "experts_per_token": 4}
    sides = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    own: dict[str, torch.Tensor] = {}
    unsloth: dict[str, torch.Tensor] = {}
    for name, (n, k) in sides.items():
        stack = hb.quantize(torch.randn(EXPERTS, n, k), "mxfp4")
        at = "model.layers.0.mlp.experts"
        own |= gpt_oss.to_tensors(f"{at}.{name}", stack) | {f"{at}.{name}_bias": torch.zeros(EXPERTS, n).bfloat16()}
        for e in range(EXPERTS):
            one = f"{at}.{name}s.{e}"
            unsloth |= bitsandbytes.to_tensors(f"{one}.weight", hb.quantize(torch.randn(n, k), "nf4"))
            unsloth[f"{one}.bias"] = torch.zeros(n).bfloat16()
    more: Any = {"activation": "swiglu_oai", "bias": True}
    assert groups(mixture(tmp_path / "own", config, own)) == {block_of(4, "mxfp4", 32, torch.uint8, **more)}
    assert groups(mixture(tmp_path / "unsloth", config, unsloth)) == {block_of(4, **more)}


def test_experts_are_compiled(tmp_path: Path, cache: Path) -> None:
    """For so many tokens: on Hopper of few another kernel than of many, on other GPUs one for all, and a sort."""
    block = block_of()
    few, many = (set(warm.variants([block], [m], H200)) for m in (1, 2048))
    assert len(few) == 2
    assert few.isdisjoint(many)
    assert many == set(block.variants(2048, H200))
    assert set(warm.variants([block], [1, 2048], H200)) == few | many
    elsewhere = warm.variants([block], [1], A100)
    assert len(elsewhere) == 3
    assert {variant.capability for variant in elsewhere} == {80}
    path = mixture(tmp_path / "model", MIXTURE, one_by_one(1))
    assert "2 variants for sm_90, 0 of them" in run(0, path, "--rows", "1", "--target", "sm_90")
    assert all(nvrtc.cached(variant) is not None for variant in few)


Layers = dict[str, tuple[int, int, dict[str, Any]]]  # by their paths: N, K and what else each is made with


def linked(layers: Layers, path: Path) -> list[list[Linear4bit]]:
    """Saves a model of these layers, and gives the groups that are found in it when it is accelerated."""
    model, found = torch.nn.Module(), []
    for name, (n, k, options) in layers.items():
        *parents, last = name.split(".")
        at = model
        for parent in parents:
            if parent not in at._modules:
                at.add_module(parent, torch.nn.Module())
            at = at.get_submodule(parent)
        at.add_module(last, Linear4bit(k, n, **{"bias": False, "dtype": BF16} | options))
    save_file(model.state_dict(), path)
    for name in layers:
        own.apply(model.get_submodule(name))
    projections.link(model, (own,))
    for name in layers:
        group: Any = projections.of(model.get_submodule(name))
        if group and group not in found:
            found.append(group)
    return found


def asked(group: list[Linear4bit], rows: int, monkeypatch: pytest.MonkeyPatch) -> set[nvrtc.Variant]:
    """What these layers ask the compiler for on an H200, by the very way that `linear_group` takes."""
    found: set[nvrtc.Variant] = set()

    def made(index: int, x_units: int, plan: Any, compiled: nvrtc.Variant, ctas: int = 0) -> tuple[None, None]:
        if ctas:
            found.add(compiled)
        return None, None

    x = torch.randn(rows, group[0].in_features).bfloat16()
    with monkeypatch.context() as patch:
        for kept in (decode.launches, laid_out.launches, products.bound_groups):
            patch.setattr(kept, "entries", {})
        for module in (cuda, decode, laid_out, side_by_side):
            patch.setattr(module, "properties_of", lambda index: H200)
        patch.setattr(reach, "without_kernels", lambda properties: None)
        for module in (decode, laid_out):
            patch.setattr(module, "tensor_map", lambda *_: b"")
        patch.setattr(decode, "_launch", lambda *arguments: found.add(arguments[-1]))
        # One launch for all; launches that follow each other compile what their weights take alone.
        patch.setattr(laid_out, "make_launches", made)
        cuda.bind_group(rows, x, [layer.weight for layer in group], [layer.bias for layer in group])
    return found


def test_fused_projections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Layers = {
        "self_attn.q_proj": (64, 1024, {}),
        "self_attn.k_proj": (32, 1024, {"bias": True}),
        "self_attn.v_proj": (32, 1024, {}),
        "self_attn.o_proj": (1024, 64, {}),
        "mlp.gate_proj": (96, 1024, {}),
        "mlp.up_proj": (96, 1024, {}),
    }
    layers = {f"layers.{i}.{name}": properties for i in range(2) for name, properties in layer.items()}
    layers |= {
        "w1": (128, 512, {"nested": False}),  # in no module but the model itself
        "w3": (64, 512, {"nested": False}),
        "attention.query": (32, 1024, {}),
        "attention.key": (32, 1024, {"format": "fp4"}),  # the other two are of one kind
        "attention.value": (32, 1024, {}),
    }
    path, properties = tmp_path / "model.safetensors", H200
    found = linked(layers, path)
    assert len(found) == 6
    x = torch.randn(1, 1024).bfloat16()
    kinds = {tuple(problem_of(x, one.weight, one.bias) for one in group) for group in found}
    assert len(kinds) == 4  # both layers are alike
    foretold = groups(path)
    alone = {group for group in foretold if len(group) == 1}
    assert foretold - alone == kinds
    assert alone > {(one,) for group in kinds for one in group}
    for m in (1, 8, 16, 32, 33):
        wanted = {variant for group in found for variant in asked(group, m, monkeypatch)}
        assert m > 8 or len(wanted) == 3  # two of the pairs take the same variant
        assert set(warm.variants(kinds, [m], properties)) == wanted
        assert set(warm.variants(foretold, [m], properties)) == wanted | set(warm.variants(alone, [m], properties))


def test_no_fused_projections(tmp_path: Path) -> None:
    layers: Layers = {
        "a.q_proj": (64, 1024, {}),  # alone
        "a.up_proj": (64, 1024, {}),  # of another list than its neighbour
        "b.k_proj": (64, 1024, {}),  # the right name in another module
        "c.gate_proj": (64, 1024, {}),
        "c.up_proj": (64, 512, {}),
        "d.gate_proj": (64, 1024, {}),
        "d.up_proj": (64, 1024, {"nested": False}),
        "e.gate_proj": (64, 1024, {"block_size": 128}),
        "e.up_proj": (64, 1024, {"format": "int4"}),
        "f.first": (64, 1024, {}),
        "f.second": (64, 1024, {}),
    }
    path = tmp_path / "model.safetensors"
    assert linked(layers, path) == []
    assert {len(group) for group in groups(path)} == {1}
    assert {len(group) for group in warm.of_shapes([(64, 1024), (32, 1024)], [BF16], NF4, bias=True)} == {1}


def test_fused_projections_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    (group,) = linked({"mlp.gate_proj": (64, 1024, {}), "mlp.up_proj": (32, 1024, {})}, path)
    run(0, path, "--rows", "1", "--target", "sm_80")
    (variant,) = asked(group, 1, monkeypatch)
    assert nvrtc.cached(variant) is None  # sm_80 has no such kernel
    run(0, path, "--rows", "1", "--target", "sm_90")
    assert nvrtc.cached(variant) is not None


def test_rows_and_shapes() -> None:
    assert warm.parse_rows("1-4, 16,3") == [1, 2, 3, 4, 16]
    assert warm.parse_shape("4096x14336") == (4096, 14336)
    for text in ("", "0", "4-1", "1,", "a", "-3", "1-2-3"):
        with pytest.raises(ValueError, match="write 1-16,64"):
            warm.parse_rows(text)
    for text in ("", "4096", "0x5", "5x0", "5x5x5", "-1x5"):
        with pytest.raises(ValueError, match="write NxK"):
            warm.parse_shape(text)


def test_targets() -> None:
    for capability in CUDA_TARGETS:
        assert properties_for(f"sm_{capability}").ptx == capability
    assert properties_for("sm_90") == DeviceProperties("cuda", 90, 132, 232448)
    assert properties_for("sm_90", 78).sms == 78


def test_wrong_usage_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shape = ("--shape", "64x1024")
    assert "give a checkpoint, or weights as --shape NxK" in run(2, "--target", "sm_90")
    assert "name the one to compile for, as --target sm_90" in run(2, *shape)
    assert "name it with --target" in run(2, *shape, "--sms", "78")
    assert "known targets are sm_75, sm_80" in run(2, *shape, "--target", "sm_70")
    assert "sms is 0" in run(2, *shape, "--target", "sm_90", "--sms", "0")
    assert "write NxK" in run(2, "--shape", "64", "--target", "sm_90")
    assert "write 1-16,64" in run(2, *shape, "--rows", "x", "--target", "sm_90")
    assert "block_size is 65" in run(2, *shape, "--block-size", "65", "--target", "sm_90")
    assert "K is 1000" in run(2, "--shape", "64x1000", "--format", "int4", "--target", "sm_90")


def test_failures_are_1(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist" in run(1, tmp_path / "nowhere", "--target", "sm_90")
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "norm.safetensors")
    assert "no weight of a linear layer" in run(1, tmp_path / "norm.safetensors", "--target", "sm_90")
    cache.write_text("a file")
    assert "cache" in run(1, "--shape", "64x1024", "--rows", "1", "--target", "sm_90")
    cache.unlink()
    monkeypatch.setattr(compiler, "find", lambda: None)
    compiler._load.cache_clear()
    assert "pip install nvidia-cuda-nvrtc" in run(1, "--shape", "64x1024", "--rows", "1", "--target", "sm_90")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupted(cache: Path) -> None:
    """A real process, stopped while it compiles: what is in the cache is whole."""
    shapes = [part for k in range(1, 30) for part in ("--shape", f"512x{1024 * k}")]
    command = [sys.executable, "-m", "halfbyte", "warm", *shapes, "--dtype", "float16", "--target", "sm_90"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    end = time.monotonic() + 120
    while len(list(cache.glob("*.cubin"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert stderr == "halfbyte: interrupted\n"
    found = {path.name for path in cache.iterdir()}
    assert all(name.endswith(".cubin") and not name.startswith(".") for name in found)
    settings = warm.of_shapes([(512, 1024 * k) for k in range(1, 30)], [F16], NF4)
    wanted = warm.variants(settings, range(1, 65), H200)
    assert sum(nvrtc.cached(variant) is not None for variant in wanted) == len(found) < len(wanted)
