"""`halfbyte bench recover`: prompts back from their hidden states, beside the plain loop over the vocabulary.

Every prompt is recovered whole and compared, token by token, before any time is given. The plain loop is what published
code does: prefix and candidate through the whole model, `output_hidden_states`, `torch.norm`, token after token in the
vocabulary's order. It would take hours, so a sample of its candidates is timed at several positions, and the record
says so: seconds a candidate, by position, times the candidates that it tries before it comes to the true token. The
same loop with many candidates a call stands beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from halfbyte.measure import models
from halfbyte.measure.ab_run import clock, empty_cache, peak_gb
from halfbyte.measure.report import line, provenance, title
from halfbyte.models.accelerate import accelerate, restore
from halfbyte.recover import Recovery, recover_tokens
from halfbyte.terminal import Table, styled

METHOD = (
    "wall clock of recover_tokens, calibration and captures included, a prompt; the plain loop extrapolated from a "
    "sample of its candidates"
)
PLACES = 5  # positions at which the plain loop is timed
SAMPLES = 8  # its calls at each of them
TOGETHER = 128  # candidates a call of the loop in batches
GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


@dataclass(frozen=True)
class Case:
    """model: "tiny", "gpt2-small" or "mistral-7b". weights: "random", "trained" (briefly, on this package's own text)
    or "nf4" (random, bitsandbytes' Linear4bit, accelerated). prompts, tokens: how many, and how long.
    policies: of recover_tokens. steps: of training."""

    model: str
    weights: str
    prompts: int
    tokens: int
    policies: tuple[str, ...] = ("gradient", "exhaustive")
    steps: int = 400

    @property
    def name(self) -> str:
        return f"{self.model}, {self.weights}"


CASES = {
    "gpt2-small": Case("gpt2-small", "random", 20, 20),
    "gpt2-small-trained": Case("gpt2-small", "trained", 20, 20),
    "mistral-7b": Case("mistral-7b", "random", 1, 100, ("gradient",)),
    "mistral-7b-nf4": Case("mistral-7b", "nf4", 1, 100, ("gradient",)),
}
QUICK = {
    "tiny-gpt2": Case("tiny-gpt2", "trained", 2, 6, steps=20),
    "tiny": Case("tiny", "nf4", 1, 6),
}


def recover_rows(case: Case, device: torch.device, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Rows of a record, one a provider. A wrong token makes an "error" and no time."""
    say(f"{case.name}: model")
    torch.manual_seed(0)
    model, prompts = _model(case, device)
    four_bit = case.weights == "nf4"
    if four_bit:
        accelerate(model)
    states = [_states(model, prompt) for prompt in prompts]
    facts = {
        "case": case.name, "model": case.model, "weights": case.weights, "dtype": str(model.dtype).split(".")[-1],
        "layer": model.config.num_hidden_layers, "prompts": case.prompts, "tokens": case.tokens,
        "vocabulary": model.config.vocab_size,
    }  # fmt: skip
    for policy in case.policies:
        say(f"{case.name}: {policy}")
        empty_cache(device)
        yield facts | {"provider": f"halfbyte, {policy}"} | _ours(model, prompts, states, policy, device)
    if four_bit:
        restore(model)
    for name, together in (("plain loop", 1), (f"plain loop, {TOGETHER} at once", TOGETHER)):
        say(f"{case.name}: {name}")
        yield facts | {"provider": name} | _plain(model, prompts, states, together, device)


def _ours(
    model: Any, prompts: Sequence[Tensor], states: Sequence[Tensor], policy: str, device: torch.device
) -> dict[str, Any]:
    seconds: list[float] = []
    found: list[Recovery] = []
    for prompt, wanted in zip(prompts, states, strict=True):

        def run(wanted: Tensor = wanted) -> None:
            found.append(recover_tokens(model, wanted, policy=policy, progress=False))

        seconds.append(clock(run, device) / 1e3)
        if found[-1].tokens != tuple(prompt.tolist()) or not found[-1].ok:
            return {"error": f"prompt {len(found) - 1}: {found[-1]}"}
    positions = [position for recovery in found for position in recovery.positions]
    return {
        "seconds": _round(sum(seconds) / len(seconds)),
        "median_s": _round(median(seconds)),
        "worst_s": _round(max(seconds)),
        "extrapolated": False,
        "tried": round(sum(position.tried for position in positions) / len(positions), 1),
        "least_margin": _round(min(position.margin or 0.0 for position in positions)),
        "epsilon": _round(max(recovery.epsilon for recovery in found)),
        "peak_gb": peak_gb(device),
    }


@torch.no_grad()
def _plain(
    model: Any, prompts: Sequence[Tensor], states: Sequence[Tensor], together: int, device: torch.device
) -> dict[str, Any]:
    """Seconds a prompt, from the median call at some positions of the first prompt, straight lines between them."""
    prompt, wanted = prompts[0], states[0]
    spread = torch.linspace(0, len(prompt) - 1, PLACES, dtype=torch.float32, device="cpu")
    places = sorted({round(x) for x in spread.tolist()})
    medians = []
    for place in places:
        generator = torch.Generator().manual_seed(place)
        calls = []
        for number in range(SAMPLES + 1):
            candidates = _random(model.config.vocab_size, (together,), generator).to(device)
            elapsed = clock(partial(_plain_call, model, prompt[:place], candidates, wanted[place]), device)
            calls += [elapsed / 1e3] if number else []  # the first one warms up
        medians.append(median(calls))
    total, candidates_tried = 0.0, 0
    for other in prompts:
        for position, token in enumerate(other.tolist()):
            calls_made = -(-(token + 1) // together)
            total += calls_made * _between(position, places, medians)
            candidates_tried += token + 1
    return {
        "seconds": _round(total / len(prompts)),
        "extrapolated": True,
        "sampled": {"positions": places, "calls": SAMPLES, "candidates_a_call": together},
        "call_ms": [_round(1e3 * value) for value in medians],
        "tried": round(candidates_tried / (len(prompts) * len(prompt)), 1),
    }


def _plain_call(model: Any, prefix: Tensor, candidates: Tensor, wanted: Tensor) -> bool:
    """Whether one of the candidates has the state that is wanted, as a loop in plain PyTorch asks it."""
    texts = torch.cat((prefix.expand(len(candidates), -1), candidates[:, None]), 1)
    states = model(texts, output_hidden_states=True).hidden_states[-1][:, -1]
    return bool((torch.norm(states - wanted, dim=-1) < 1e-3).any())


def _between(position: int, places: Sequence[int], values: Sequence[float]) -> float:
    for index in range(len(places) - 1):
        left, right = places[index], places[index + 1]
        if left <= position <= right:
            return values[index] + (values[index + 1] - values[index]) * (position - left) / (right - left)
    return values[-1]


@torch.no_grad()
def _states(model: Any, prompt: Tensor) -> Tensor:
    result: Tensor = model(prompt[None], output_hidden_states=True).hidden_states[-1][0]
    return result.clone()


def _model(case: Case, device: torch.device) -> tuple[Any, list[Tensor]]:
    """The model, and prompts [tokens] on its device."""
    if "gpt2" not in case.model:
        model = models.load(case.model, device, torch.bfloat16, four_bit=case.weights == "nf4")
        return model, _random_prompts(model, case, device)
    from transformers import GPT2Config, GPT2LMHeadModel

    facts = GPT2 if case.model == "gpt2-small" else {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 2000}
    config = GPT2Config(**facts, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).to(device)
    if case.weights != "trained":
        return model.eval(), _random_prompts(model, case, device)
    text = _own_text(config.vocab_size).to(device)
    _train(model, text, case.steps)
    starts = torch.linspace(0, len(text) - case.tokens, case.prompts, dtype=torch.float32, device="cpu").long().tolist()
    return model.eval(), [text[start : start + case.tokens] for start in starts]


def _random_prompts(model: Any, case: Case, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (case.prompts, case.tokens)
    return list(_random(model.config.vocab_size, shape, generator).to(device))


def _random(end: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(end, shape, generator=generator, dtype=torch.int64, device="cpu")


def _own_text(vocabulary: int) -> Tensor:
    """This package's sources as tokens: its words and signs, each with a number of its own, all over the vocabulary."""
    folder = Path(models.__file__).parents[1]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    pieces = re.findall(r"\w+|\s+|[^\w\s]", text)
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randperm(vocabulary, generator=generator, dtype=torch.int64, device="cpu").tolist()
    names: dict[str, int] = {}
    for piece in pieces:
        names.setdefault(piece, numbers[len(names) % vocabulary])
    return torch.tensor([names[piece] for piece in pieces], dtype=torch.int64, device="cpu")


def _train(model: Any, text: Tensor, steps: int, length: int = 128, texts: int = 16) -> None:
    length = min(length, len(text) - 1)
    optimizer = torch.optim.AdamW(model.parameters(), 6e-4)
    generator = torch.Generator().manual_seed(3)
    model.train()
    for _ in range(steps):
        starts = _random(len(text) - length, (texts, 1), generator).to(text.device)
        batch = text[starts + torch.arange(length, dtype=torch.int64, device=text.device)]
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def cases_of(names: str | None, quick: bool, prompts: int, tokens: int) -> list[Case]:
    """The cases of a command line; 0 leaves a number as it is. Raises ValueError for names that there are not."""
    known: Mapping[str, Case] = QUICK if quick else CASES
    chosen = list(known) if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"case {unknown[0]!r} is none; there are {', '.join(known)}")
    cases = [known[name] for name in chosen]
    return [replace(case, prompts=prompts or case.prompts, tokens=tokens or case.tokens) for case in cases]


def terminal_table(record: Mapping[str, Any]) -> Table:
    """Every provider of every case: seconds a prompt, tokens tried a position, times ours."""
    table = Table(title=title(record), caption=METHOD)
    table.add_column("")
    for heading in ("s a prompt", "tried a position", "× gradient"):
        table.add_column(heading, justify="right")
    for rows in _by_case(record):
        table.add_row(styled((f"{_heading(rows[0])}", "bold")))
        for row in rows:
            if "error" in row:
                table.add_row(styled((f"{row['provider']}, wrong: {row['error']}", "red")))
            else:
                table.add_row(row["provider"], _seconds(row), f"{row['tried']:,.0f}", _times(row, rows))
        table.add_section()
    return table


def markdown(record: Mapping[str, Any]) -> str:
    """One line a case and provider."""
    header = ["model", "provider", "s a prompt", "tokens tried a position", "times halfbyte, gradient"]
    lines = [line(header), line(["---", "---", "---:", "---:", "---:"])]
    for rows in _by_case(record):
        for row in rows:
            figures = ["wrong", "", ""]
            if "error" not in row:
                figures = [_seconds(row), f"{row['tried']:,.0f}", _times(row, rows)]
            lines.append(line([_heading(row) if row is rows[0] else "", row["provider"], *figures]))
    note = "≈: extrapolated from a timed sample of candidates."
    return "\n".join([*lines, "", f"{note} {provenance(record)}"])


def _by_case(record: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        cases.setdefault(row["case"], []).append(row)
    return list(cases.values())


def _heading(row: Mapping[str, Any]) -> str:
    return f"{row['case']}, {row['dtype']}, {row['prompts']} × {row['tokens']} tokens"


def _seconds(row: Mapping[str, Any]) -> str:
    digits = 0 if row["seconds"] >= 100 else 2
    return f"{'≈ ' if row['extrapolated'] else ''}{row['seconds']:,.{digits}f}"


def _times(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    ours = next(
        (other["seconds"] for other in rows if other["provider"] == "halfbyte, gradient" and "seconds" in other), 0
    )
    return f"{row['seconds'] / ours:,.1f}" if ours else ""


def _round(value: float) -> float:
    return float(f"{value:.4g}")
