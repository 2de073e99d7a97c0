"""gpt-oss in vLLM: MXFP4 stacks of its checkpoints, multiplied with by `halfbyte.moe`, against the dense model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from processes import SECONDS, end, environment, free_port, wait_for
from served_models import NEW_TOKENS, PROMPTS, dequantized, in_mxfp4, tokens_in, tokens_of
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization import get_quantization_config

import halfbyte as hb
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.serving import invariant
from halfbyte.serving.vllm import register
from halfbyte.serving.vllm.config import vllm_runs_mxfp4
from halfbyte.serving.vllm.gpt_oss import GptOssExpertsMethod

EXPERTS, HIDDEN, INNER = 4, 64, 96
Models = Callable[..., Path]
Engine = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def served(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], tuple[Path, Any]]:
    """served(format of attention's projections): a checkpoint, and the tokens of the dense model it stands for."""
    folder, made = tmp_path_factory.mktemp("gpt-oss"), {}

    def get(attention: str | None) -> tuple[Path, Any]:
        from transformers import AutoModelForCausalLM

        if attention not in made:
            path = in_mxfp4(folder / f"{attention}", models("gpt_oss"), attention)
            dense = dequantized(folder / f"{attention}-dense", path)
            model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
            made[attention] = path, tokens_of(model)
        return made[attention]

    return get


def test_as_openai_saves_it(served: Any, run_engine: Engine) -> None:
    """No flag is needed where vLLM has no kernels of its own, such as on a CPU without AMX."""
    path, right = served(None)
    asked = {"quantization": "halfbyte"} if vllm_runs_mxfp4() else {}
    found, _, again = run_engine(path, "tokens", "reload", "tokens", **asked)
    assert tokens_in(found) == right
    assert found == again


def test_halfbytes_own_on_two_hosts(served: Any, cache: Path, tmp_path: Path) -> None:
    """Attention is in NF4, and the three blocks of each expert are shared out: two here and one there. Both hosts are
    this machine, but each process belongs to a server of its own."""
    path, right = served("nf4")
    ports, meeting, hosts = [free_port(), free_port()], str(free_port()), []
    variables = environment(cache, 2) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    engine = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4"]
    engine += ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", meeting]
    try:
        for rank, port in enumerate(ports):
            command = [sys.executable, "-m", "halfbyte", "serve", str(path), "--port", str(port), "--name", "m", "--"]
            command += [*engine, "--node-rank", str(rank), *(["--headless"] if rank else [])]
            with (tmp_path / f"log{rank}").open("w", encoding="utf-8") as log:
                hosts.append(
                    subprocess.Popen(command, env=variables, stdout=log, stderr=log, text=True, start_new_session=True)
                )
        wait_for(ports[0], hosts[0], tmp_path / "log0", SECONDS)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{ports[0]}/v1", api_key="none", timeout=60, max_retries=0)
        answers = client.completions.create(
            model="m", prompt=PROMPTS, max_tokens=NEW_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        assert [answer.text.split() for answer in answers.choices] == [
            [f"t{token}" for token in made] for made in right
        ]
    finally:
        for host in hosts:
            end(host)


def layer_of(rank: int, processes: int, inner: int = INNER) -> Any:
    parallel = SimpleNamespace(tp_rank=rank, tp_size=processes)
    layer: Any = torch.nn.Module()
    layer.moe_config = SimpleNamespace(has_bias=True, intermediate_size=inner, moe_parallel_config=parallel)
    layer.activation, layer.apply_router_weight_on_input, layer.expert_map = "swigluoai", False, None
    return layer


def made(layer: Any) -> GptOssExpertsMethod:
    scheme = get_quantization_config("halfbyte").from_config({"quant_method": "mxfp4"}).scheme
    return GptOssExpertsMethod(scheme, layer, "model.layers.0.mlp.experts")


def stacks() -> tuple[QuantizedWeight, QuantizedWeight, tuple[torch.Tensor, torch.Tensor]]:
    """Of gate and up, of down, and the biases of both."""
    torch.manual_seed(0)
    gate_up, down = (
        hb.quantize(torch.randn(EXPERTS, *side), "mxfp4") for side in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    return gate_up, down, (torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN))


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    register()
    config = VllmConfig()
    hf_config = SimpleNamespace(quantization_config={"quant_method": "halfbyte"})
    config.model_config = SimpleNamespace(hf_config=hf_config, enforce_eager=True)
    with set_current_vllm_config(config):
        yield config


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_parts_of_all_processes_add_up(config: VllmConfig, processes: int) -> None:
    """Three blocks for so many processes, of which the last one may have none. Each part is loaded twice, the second
    time over garbage, as a reload does."""
    gate_up, down, biases = stacks()
    x, ids, shares = torch.randn(5, HIDDEN), torch.randint(EXPERTS, (5, 2)), torch.rand(5, 2)
    right = hb.moe(x, ids, shares, gate_up, down, "swiglu_oai", *biases)
    found = torch.zeros_like(right)
    for rank in range(processes):
        layer = layer_of(rank, processes)
        method = made(layer)
        _, inner = method.maybe_roundup_sizes(HIDDEN, INNER // processes, x.dtype, layer.moe_config.moe_parallel_config)
        assert inner == -(-3 // processes) * 32
        method.create_weights(layer, EXPERTS, HIDDEN, inner, x.dtype)
        expected = dict(layer.named_parameters())
        first, last = min(rank * inner, INNER), min((rank + 1) * inner, INNER)
        come = {
            "w13_weight": gate_up.packed[:, 2 * first : 2 * last], "w13_bias": biases[0][:, 2 * first : 2 * last],
            "w13_weight_scale": gate_up.scale[:, 2 * first : 2 * last], "w2_bias": biases[1] * (rank == 0),
            "w2_weight": down.packed[..., first // 2 : last // 2],
            "w2_weight_scale": down.scale[..., first // 32 : last // 32],
        }  # fmt: skip
        for name, tensor in [*come.items(), *come.items()]:
            expected[name].data.fill_(77)
            expected[name].weight_loader(expected[name], tensor, weight_name=name, shard_id=None, expert_id=None)
        method.process_weights_after_loading(layer)
        found += method.apply(layer, x, shares, ids)
    assert (found - right).norm() / right.norm() < 1e-6
    assert config.model_config.hf_config.quantization_config["quant_method"] == "mxfp4"


@pytest.mark.parametrize("invariant", [False, True])
def test_experts_that_are_shared_out_add_up(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, invariant: bool
) -> None:
    """With expert parallel vLLM's model hands over whole experts, and its map says which are here."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    gate_up, down, biases = stacks()
    x, ids, shares = torch.randn(5, HIDDEN), torch.randint(EXPERTS, (5, 2)), torch.rand(5, 2)
    right = hb.moe(x, ids, shares, gate_up, down, "swiglu_oai", *biases)
    found = torch.zeros_like(right)
    for rank, here in enumerate((slice(0, 3), slice(3, EXPERTS))):
        layer, count = layer_of(0, 1), (3, 1)[rank]
        layer.expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        layer.expert_map[here] = torch.arange(count, dtype=torch.int32)
        method = made(layer)
        method.create_weights(layer, count, HIDDEN, INNER, x.dtype)
        for stem, stack, bias in (("w13", gate_up, biases[0]), ("w2", down, biases[1])):
            for name, tensor in (("weight", stack.packed), ("weight_scale", stack.scale), ("bias", bias)):
                param = getattr(layer, f"{stem}_{name}")
                param.weight_loader(param, tensor[here], weight_name=name, shard_id=None, expert_id=None)
        method.process_weights_after_loading(layer)
        found += method.apply(layer, x, shares, ids.int())
    assert (found - right).norm() / right.norm() < 1e-6


def test_dummies_are_not_zero(config: VllmConfig) -> None:
    config.load_config.load_format = "dummy"
    layer = layer_of(0, 1)
    method = made(layer)
    method.create_weights(layer, EXPERTS, HIDDEN, INNER, torch.float32)
    method.process_weights_after_loading(layer)
    y = method.apply(layer, torch.randn(3, HIDDEN), torch.rand(3, 2), torch.tensor([[0, 1], [2, 3], [3, 0]]))
    assert y.isfinite().all()
    assert (y != 0).any()


def test_batch_invariance(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product is one of `linear` that says so; and a CUDA graph, which cannot hold them, is refused."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, asked, linear = layer_of(0, 1), [], invariant.linear

    def recorded(*arguments: Any, batch_invariant: bool = False) -> torch.Tensor:
        asked.append(batch_invariant)
        return linear(*arguments, batch_invariant=batch_invariant)

    monkeypatch.setattr(invariant, "linear", recorded)
    config.load_config.load_format = "dummy"
    method = made(layer)
    method.create_weights(layer, EXPERTS, HIDDEN, INNER, torch.float32)
    method.process_weights_after_loading(layer)
    x, ids, shares = torch.randn(64, HIDDEN), torch.randint(EXPERTS, (64, 2)), torch.rand(64, 2)
    y = method.apply(layer, x, shares, ids)
    assert asked == [True] * 2 * EXPERTS
    for row in range(0, 64, 9):
        one = slice(row, row + 1)
        assert torch.equal(method.apply(layer, x[one], shares[one], ids[one]), y[one])
    config.model_config.enforce_eager = False
    with pytest.raises(ValueError, match=r"no CUDA graph can capture that: pass enforce_eager=True"):
        made(layer)


def test_adapters_of_experts_are_refused(config: VllmConfig) -> None:
    config.lora_config = SimpleNamespace(target_modules=["q_proj"])
    made(layer_of(0, 1))
    config.lora_config.target_modules = None
    with pytest.raises(ValueError, match=r"take no LoRA adapters: name the layers .*--lora-target-modules"):
        made(layer_of(0, 1))


def test_what_is_refused(config: VllmConfig) -> None:
    layer = layer_of(0, 1, inner=80)
    with pytest.raises(ValueError, match=r"experts asks for sides of 64 and 80, which are no multiples of 32"):
        made(layer).maybe_roundup_sizes(HIDDEN, 80, torch.bfloat16, layer.moe_config.moe_parallel_config)
    method = made(layer_of(0, 1))
    method.create_weights(layer, EXPERTS, HIDDEN, INNER, torch.bfloat16)
    with pytest.raises(ValueError, match=r"w13_weight comes expert by expert"):
        layer.w13_weight.weight_loader(layer.w13_weight, torch.zeros(1), "w13_weight", "gpt_oss_w13", 0)
