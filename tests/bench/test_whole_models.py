"""The benches of whole models, run on a tiny one; and what is made of their records."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.table import Table
from typer.testing import CliRunner

from halfbyte import ops
from halfbyte.bench import calls, decode, runs, train, whole_models
from halfbyte.cli import app
from halfbyte.formats.bitsandbytes import from_bitsandbytes
from halfbyte.kernels.common import slow
from halfbyte.measure import decoder, models, records
from halfbyte.measure.report import provenance
from halfbyte.models import attention, caches, fused, peft_experts, regions

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


def run(out: Path, bench: str, *options: str) -> dict[str, object]:
    result = CliRunner().invoke(
        app, ["bench", bench, "--model", "tiny", "--device", "cpu", "--rounds", "3", "--out", str(out), *options]
    )
    assert result.exit_code == 0, result.output
    (path,) = out.glob(f"*/{bench}.json")
    return records.read(path)


LABEL = "tiny, 16 tokens of context, 4 new tokens"


@pytest.mark.slow
def test_decode(tmp_path: Path) -> None:
    record = run(tmp_path, "decode", "--batch", "1,2", "--context", "16", "--new-tokens", "4")
    rows = record["rows"]
    assert isinstance(rows, list)
    found = {(row["batch"], row["mode"], row["provider"]) for row in rows}
    assert found == {
        (batch, mode, provider)
        for batch in (1, 2)
        for mode in ("eager", "prefill", "generate")
        for provider in ("bitsandbytes", "halfbyte")
    }
    assert all(row["median_ms"] > 0 and 0 < row["relative_error"] < 0.05 for row in rows)
    assert whole_models.markdown(record).count(f"| {LABEL} |") == 6
    speeds = {row["provider"]: row["tokens_per_s"] for row in rows if (row["batch"], row["mode"]) == (1, "generate")}
    assert (
        f"`generate` with {LABEL} makes {speeds['halfbyte']:.1f} tokens a second with halfbyte"
        in whole_models.summary(record)
    )
    facts = record["environment"]
    assert isinstance(facts, dict)
    on_a_gpu = {key: value for key, value in facts.items() if key != "threads"} | {"driver": "1"}
    table = whole_models.summary(record | {"environment": on_a_gpu}).splitlines()
    assert table[0] == "| model | texts at once | bitsandbytes, tokens/s | halfbyte, tokens/s | speed-up |"
    assert [line.startswith(f"| {LABEL} | {batch} |") for batch, line in enumerate(table[2:4], 1)] == [True, True]


@pytest.mark.slow
def test_errors_are_of_the_steps_that_graphs_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mode in its own way, to the logits of a plain step; here nothing is compiled."""
    for module in (caches, attention, slow):
        monkeypatch.setattr(module, "has_triton", lambda: False)
    monkeypatch.setattr(regions, "_compiled", lambda function: lambda *given, **named: function(*given, **named))
    monkeypatch.setattr(decoder, "modes_of", lambda device: decoder.MODES)
    entered: list[bool] = []
    layers: list[int] = []
    compute = fused._Layer._attend
    monkeypatch.setattr(fused._Layer, "_attend", lambda *given, **named: layers.append(1) or compute(*given, **named))
    capturable = decoder.capturable
    monkeypatch.setattr(decoder, "capturable", lambda cache, ours: entered.append(ours) or capturable(cache, ours))
    errors = decoder.errors_against_fp32("tiny", torch.device("cpu"), torch.bfloat16)
    assert set(errors) == {(name, mode) for name in ("bitsandbytes", "halfbyte") for mode in decoder.MODES}
    for name in ("bitsandbytes", "halfbyte"):
        assert errors[name, "eager"] == pytest.approx(errors[name, "graph"], rel=0.02)
    assert errors["bitsandbytes", "graph"] == errors["bitsandbytes", "fused graph"] > 0
    assert 0 < errors["halfbyte", "fused graph"] <= 1.02 * errors["halfbyte", "graph"]
    steps = 2 * 16  # texts of 4 and of 1, tokens
    assert (entered.count(False), entered.count(True)) == (2 * steps, steps)
    assert len(layers) == steps * decoder.CHECKED_LAYERS


@pytest.mark.slow
def test_dense_weights_are_timed_in_every_mode() -> None:
    """As the other two are, for a CPU its one mode of a step."""
    model = models.load("tiny", torch.device("cpu"), torch.bfloat16)
    models.make_dense(model, torch.bfloat16)
    settings = decode.Settings(context=16, new_tokens=4, rounds=2)
    rows = list(decode._dense_rows(model, 2, settings, torch.device("cpu")))
    assert [(row["provider"], row["mode"]) for row in rows] == [
        ("bf16", mode) for mode in ("eager", "prefill", "generate")
    ]
    assert all(row["median_ms"] > 0 for row in rows)


@pytest.mark.slow
def test_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run(tmp_path, "train", "--tokens", "16,2x12")
    rows = record["rows"]
    assert isinstance(rows, list)
    providers = ["bitsandbytes", "halfbyte", "bf16"]
    assert [
        (row["provider"], row.get("texts", 1), row["tokens"]) for row in sorted(rows, key=lambda r: r["tokens"])
    ] == [
        *((provider, 2, 12) for provider in providers),
        *((provider, 1, 16) for provider in providers),
    ]
    assert all(row["gradients_apart"] < train.MOST_APART for row in rows)
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(
            1e3 * row.get("texts", 1) * row["tokens"] / row["median_ms"], rel=0.1
        )
    learned = {row["provider"]: row["losses"] for row in rows if row["tokens"] == 16}
    assert not any("losses" in row for row in rows if row["tokens"] == 12)
    for losses in learned.values():
        assert len(losses) == 12
        assert losses[-1] < 0.97 * losses[0]
        assert losses == pytest.approx(learned["bitsandbytes"], rel=train.MOST_LOSS_APART)
    assert all(row["loss"] == learned[row["provider"]][0] for row in rows if row["tokens"] == 16)

    monkeypatch.setattr(train, "STEPS", 3)
    again = run(tmp_path, "train", "--tokens", "16", "--no-checkpointing")["rows"]
    assert isinstance(again, list)
    assert [(row["model"], row["tokens"]) for row in again] == [
        *(("tiny", row["tokens"]) for row in rows), *3 * (("tiny, no checkpointing", 16),)
    ]  # fmt: skip
    assert {row["provider"]: row["loss"] for row in again[-3:]} == {
        row["provider"]: row["loss"] for row in rows if row["tokens"] == 16
    }

    told = whole_models.markdown(record, "tokens").splitlines()
    assert [line.split(" | ")[:3] for line in told if "| step |" in line] == [
        ["| tiny", tokens, "step"] for tokens in ("16", "2 × 12")
    ]
    assert f"| tiny | 16 | halfbyte | {learned['halfbyte'][0]:.4f} | {learned['halfbyte'][1]:.4f} |" in "\n".join(told)
    rows = [row | {"peak_gb": 1.5} for row in rows]
    short = whole_models.training_summary(record | {"rows": rows}).splitlines()
    assert short[0].startswith(
        "| model | tokens a step | bitsandbytes, ms a step | bf16, ms a step | halfbyte, ms a step | "
        "speed-up over bitsandbytes | speed-up over bf16 |"
    )
    assert all(
        line.startswith(f"| tiny | {tokens} |") for tokens, line in zip(("16", "2 × 12"), short[2:4], strict=True)
    )
    assert short[2].endswith("×** | 1.5 | 1.5 |")


def test_backward_computes_layers_once_more_or_keeps_what_it_needs() -> None:
    found = {}
    for checkpointing in (True, False):
        model = models.load("tiny", torch.device("cpu"), torch.bfloat16, layers=1)
        forwards: list[int] = []
        layer = train._adapted(model, train._targets(model, False), checkpointing).base_model.model.model.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_, calls=forwards: calls.append(1))
        train.Step(model).gradients(torch.arange(3, 19).view(1, -1))
        found[checkpointing] = len(forwards)
    assert found == {True: 2, False: 1}


def test_dense_layers_have_the_same_adapters() -> None:
    model = models.load("tiny", torch.device("cpu"), torch.bfloat16, layers=1)
    targets = train._targets(model, False)
    adapted = train._adapted(model, targets, True)
    adapters = train._draw_adapters(adapted)
    weight = next(module for _, module in models.four_bit(adapted)).weight
    right = ops.dequantize(from_bitsandbytes(weight), torch.bfloat16)
    dense = train._dense(adapted, targets, adapters, True)
    assert not list(models.four_bit(dense))
    assert adapters.keys() == {name for name, parameter in dense.named_parameters() if parameter.requires_grad}
    assert all(torch.equal(dense.get_parameter(name), value) for name, value in adapters.items())
    layer = dense.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer).__module__ == "peft.tuners.lora.layer"
    assert torch.equal(layer.base_layer.weight, right)
    step = train.Step(dense)
    ids = torch.arange(3, 19).view(1, -1)
    losses = step.found(ids, learns=True).losses
    assert losses[-1] < losses[0]
    assert all(torch.equal(dense.get_parameter(name), value) for name, value in adapters.items())


@pytest.mark.slow
def test_a_step_without_memory_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits stays: the same provider with fewer tokens, and the others."""
    monkeypatch.setattr(train, "STEPS", 3)
    gradients = train.Step.gradients

    def limited(step: train.Step, ids: torch.Tensor) -> torch.Tensor:
        if ids.numel() > 16 and not list(models.four_bit(step.model)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradients(step, ids)

    monkeypatch.setattr(train.Step, "gradients", limited)
    told: list[str] = []
    settings = train.Settings(train.loads_of("16,2x12"), rounds=2, layers=1)
    rows = list(train.train_rows("tiny", torch.device("cpu"), settings, told.append))
    assert [(row["provider"], row["tokens"]) for row in rows] == [
        ("bitsandbytes", 16), ("halfbyte", 16), ("bitsandbytes", 12), ("halfbyte", 12), ("bf16", 16)
    ]  # fmt: skip
    assert told[-1] == "tiny: 2 × 12 tokens without bf16: there is no memory for a step"
    record = {"bench": "train", "rows": rows, "environment": records.environment(torch.device("cpu"))}
    assert whole_models.markdown(record, "tokens").count("| step |") == 2


def test_loads() -> None:
    assert train.loads_of("512, 2x4096,3×7") == ((1, 512), (2, 4096), (3, 7))
    for text in ("", "x", "0", "2x", "2x0", "1x2x3", "512,", "-1"):
        with pytest.raises(ValueError, match="is no number of tokens; write 512, or 2x4096"):
            train.loads_of(text)
    result = CliRunner().invoke(app, ["bench", "train", "--model", "tiny", "--device", "cpu", "--tokens", "2x"])
    assert result.exit_code == 2


@pytest.mark.slow
def test_experts_run_in_4_bits_and_then_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never both at once: bitsandbytes' turn comes when halfbyte's is over, with what the same bytes stand for."""
    monkeypatch.setattr(train, "STEPS", 3)  # `test_train` has them all
    options = ("--model", "tiny-moe", "--batch", "2", "--context", "16", "--new-tokens", "4")
    rows = run(tmp_path, "decode", *options)["rows"]
    assert isinstance(rows, list)
    modes = ("eager", "prefill", "generate")
    assert [(row["provider"], row["mode"]) for row in rows] == [
        (provider, mode) for provider in ("halfbyte", "bitsandbytes") for mode in modes
    ]
    assert all(row["median_ms"] > 0 and 0 < row["relative_error"] < decode.MOST_APART_OF_EXPERTS for row in rows)
    record = run(tmp_path, "train", "--model", "tiny-moe", "--tokens", "16")
    rows = record["rows"]
    assert isinstance(rows, list)
    assert [row["provider"] for row in rows] == ["halfbyte", "bitsandbytes", "bf16"]
    assert 0 < rows[0]["gradients_apart"] < train.MOST_APART_OF_EXPERTS
    alone = record | {"rows": rows[:1]}  # as where there is no memory for dense experts
    assert whole_models.markdown(alone, "tokens").count("| tiny-moe | 16 | step |") == 1
    assert "tiny-moe" not in whole_models.training_summary(alone)


TINY_GPT_OSS = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-moe", "tiny-gpt-oss"])
def test_experts_with_adapters(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside PEFT's own adapters of dense experts, and grouped products with those, however the dense ones lie."""
    monkeypatch.setattr(train, "STEPS", 3)  # `test_train` has them all
    monkeypatch.setitem(models.SHAPES, "tiny-gpt-oss", ("gpt_oss", TINY_GPT_OSS))
    products: list[tuple[int, ...]] = []
    product = peft_experts.product
    monkeypatch.setattr(peft_experts, "product", lambda x, w, rows: products.append(w.shape) or product(x, w, rows))
    frozen = run(tmp_path, "train", "--model", model, "--tokens", "16")["rows"]
    assert isinstance(frozen, list)
    assert not products
    record = run(tmp_path, "train", "--model", model, "--tokens", "16", "--experts")
    rows = record["rows"]
    assert isinstance(rows, list)
    assert [(row["model"], row["provider"]) for row in rows] == [
        *((model, provider) for provider in ("halfbyte", "bitsandbytes", "bf16")),
        *((f"{model}, experts adapted", provider) for provider in ("halfbyte", "bitsandbytes", train.GROUPED)),
    ]
    assert {row["loss"] for row in rows[:3]} == {row["loss"] for row in frozen}
    for some in (rows[:3], rows[3:]):
        theirs = next(row["loss"] for row in some if row["provider"] == "bitsandbytes")
        assert all(row["loss"] == pytest.approx(theirs, rel=train.MOST_LOSS_APART) for row in some)
    assert all(row["gradients_apart"] < train.MOST_APART_OF_EXPERTS for row in rows)
    hidden, inner = (128, 96) if model == "tiny-gpt-oss" else (256, 128)
    dense = {shape[1:] for shape in products if train.RANK not in shape[1:]}  # of the provider with grouped products
    assert dense == {(hidden, 2 * inner), (inner, hidden)}
    assert f"| {model}, experts adapted | 16 | step |" in whole_models.markdown(record, "tokens")


def test_losses_that_differ_are_not_timed() -> None:
    found = {name: train.Found(loss, torch.ones(3)) for name, loss in (("bitsandbytes", 2.0), ("halfbyte", 2.1))}
    train._agree({"halfbyte": found["halfbyte"]}, 0.05)
    with pytest.raises(ValueError, match=r"losses differ from bitsandbytes.*halfbyte.*nothing is timed"):
        train._agree(found, 0.05)
    learned = {
        name: train.Found(2.0, torch.ones(3), (2.0, last)) for name, last in (("bitsandbytes", 1.0), ("halfbyte", 1.06))
    }
    with pytest.raises(ValueError, match=r"losses of 12 steps differ from bitsandbytes.*halfbyte': 0\.03"):
        train._agree(learned, 0.05)


@pytest.mark.slow
def test_a_model_without_experts_to_adapt(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "train", "--model", "tiny", "--device", "cpu", "--experts"])
    assert result.exit_code != 0
    assert "no experts in 4 bits" in str(result.exception) + result.output


@pytest.mark.slow
@pytest.mark.parametrize(("bench", "module"), [("decode", decode), ("train --tokens 24", train)])
def test_wrong_numbers_are_not_timed(
    bench: str, module: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MOST_APART", 0.0)
    result = CliRunner().invoke(
        app, ["bench", *bench.split(), "--model", "tiny", "--device", "cpu", "--rounds", "3", "--out", str(tmp_path)]
    )
    assert result.exit_code != 0
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("command", [["bench", "decode"], ["bench", "train"], ["profile"]], ids=" ".join)
@pytest.mark.parametrize("name", ["gpt-9", "tiny,gpt-9", "empty"])
def test_a_model_that_is_none(command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, before anything is printed or measured, that says what would be taken."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*command, "--model", name, "--device", "cpu"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    if name == "empty":
        assert "has no config.json" in result.stderr
    else:
        assert "gpt-9' is none: it is neither a folder here nor one of the shapes tiny" in result.stderr
        assert all(told in result.stderr for told in ("llama-3-8b", "path", "org/name"))


def test_a_model_that_runs_otherwise_is_another_one() -> None:
    """In a record; and as usual it has its own name."""
    named = {
        settings.label("m")
        for kind in (decode.Settings, calls.Settings, train.Settings)
        for settings in (kind(), kind(layers=2), kind(rounds=9))
    }
    assert named == {"m", "m, 2 layers"}
    assert decode.Settings(context=32, new_tokens=16).label("m") == "m, 32 tokens of context, 16 new tokens"
    assert calls.Settings(prompt=32, tokens=16).label("m") == "m, 32 prompt tokens, 16 new tokens"
    assert train.Settings(layers=2, experts=True).label("m") == "m, 2 layers, experts adapted"
    assert train.Settings(checkpointing=False).label("m") == "m, no checkpointing"


def test_models_that_ran_before_stay_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their places, each with the commit that it is of, and only beside what ran on the same libraries."""
    cpu, turn = torch.device("cpu"), iter(range(9))

    def rows_of(name: str) -> list[dict[str, Any]]:
        return [{"model": name, "batch": 1, "provider": "halfbyte", "mode": "eager", "turn": next(turn)}]

    facts_of_this = records.environment(cpu)

    def run(names: str, commit: str, layers: int = 0, **facts: str) -> dict[str, Any]:
        label = decode.Settings(layers=layers).label
        monkeypatch.setattr(records, "environment", lambda device: facts_of_this | {"commit": commit, **facts})
        runs.run_models(
            "decode", "by hand", names.split(","), label, lambda name: rows_of(label(name)), lambda _: Table(), cpu,
            tmp_path,
        )  # fmt: skip
        (path,) = tmp_path.glob("*/decode.json")
        return records.read(path)

    run("a,b", "old")
    found = run("b,c", "new")
    assert [(row["model"], row["commit"], row["turn"]) for row in found["rows"]] == [
        ("a", "old", 0), ("b", "new", 2), ("c", "new", 3)
    ]  # fmt: skip
    assert provenance(found).endswith("; commit new; a: commit old.</sub>")
    found = run("b", "newest", layers=4)
    assert [(row["model"], row["turn"]) for row in found["rows"]] == [("a", 0), ("b", 2), ("c", 3), ("b, 4 layers", 4)]
    found = run("c", "newer", torch="0.1")
    assert [row["model"] for row in found["rows"]] == ["c"]
    assert provenance(found).endswith("; commit newer.</sub>")


def test_loads_that_ran_before_stay_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of some loads replaces what was measured of these, of any provider, and nothing of others."""
    cpu, facts_of_this = torch.device("cpu"), records.environment(torch.device("cpu"))

    def run(commit: str, providers: str, *tokens: int) -> list[tuple[Any, ...]]:
        monkeypatch.setattr(records, "environment", lambda device: facts_of_this | {"commit": commit})
        rows = [{"model": "a", "tokens": n, "provider": provider} for n in tokens for provider in providers.split(",")]
        runs.run_models("train", "by hand", ["a"], str, lambda _: rows, lambda _: Table(), cpu, tmp_path)
        (path,) = tmp_path.glob("*/train.json")
        return [(row["tokens"], row["provider"], row["commit"]) for row in records.read(path)["rows"]]

    run("old", "x,y", 512, 2048)
    assert run("new", "x", 2048, 8192) == [
        (2048, "x", "new"), (8192, "x", "new"), (512, "x", "old"), (512, "y", "old")
    ]  # fmt: skip
