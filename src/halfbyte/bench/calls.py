"""`halfbyte bench generate`: what calls of `generate` cost beside the tokens they make, and what speculation gains.

**Calls.** The first of a process, whose caches on disk are warm; then the first that needs a larger cache, one with a
new prompt length that an earlier cache is long enough for, and one like another before. What a call takes beyond its
prompt, computed by itself, and its steps is its overhead.

**Speculation.** Random weights write no text that repeats. So the head is made a permutation of the embedding, and the
embedding so large that layers hardly change what follows: each token is followed by the one that the permutation has
for it, at the cost of the whole model. In cycles of 61 tokens the text repeats, and a look-up in it is always right; in
a cycle of the whole vocabulary it never does. Tokens are compared with the permutation's before any time is given.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from halfbyte.measure import models, records
from halfbyte.measure.ab_run import ABRun, clock, empty_cache, random_ids, written
from halfbyte.measure.kept import prompt_ms
from halfbyte.measure.report import OURS, line, provenance, title
from halfbyte.models.accelerate import accelerate, release
from halfbyte.models.steps import SHARE, pool_of
from halfbyte.terminal import Table, styled

PROCESSES = 3  # whose first calls are timed
CYCLE = 61  # tokens after which a text repeats
LOUD = 200.0  # times its size, the embedding drowns what layers add
GUESSES = 7  # tokens guessed at once: with the one that is known, as many rows as cost no more than one
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "prompt look-up": {"prompt_lookup_num_tokens": GUESSES}}
TEXTS = {"repeats": CYCLE, "does not repeat": 0}


@dataclass(frozen=True)
class Settings:
    """prompt: its tokens; new lengths are shorter. tokens: that a call makes. layers: of a named shape, 0 for all.
    rounds: calls of each kind, fewer than a prompt has tokens. first: whether processes are started for the first
    call."""

    prompt: int = 256
    tokens: int = 64
    layers: int = 0
    rounds: int = 5
    first: bool = True

    def label(self, name: str) -> str:
        """What a record calls a model."""
        prompt = "" if self.prompt == Settings.prompt else f"{self.prompt} prompt tokens"
        tokens = "" if self.tokens == Settings.tokens else f"{self.tokens} new tokens"
        return records.label(name, self.layers, prompt, tokens)


METHOD = (
    "wall clock of whole calls, batch 1; overhead is what a call takes beyond its prompt and its steps; "
    f"a prompt of {Settings.prompt} tokens and {Settings.tokens} new ones unless the model's name says otherwise"
)


def call_rows(name: str, device: torch.device, settings: Settings, say: Callable[[str], None]) -> Iterator[Any]:
    """Rows of a record for one model. Raises ValueError where a token is wrong."""
    say(f"{name}: loading")
    model = models.load(name, device, torch.bfloat16, layers=settings.layers)
    facts = {"model": settings.label(name), "layers": model.config.num_hidden_layers}
    say(f"{name}: calls")
    with ABRun(model, OURS).providers[OURS]() as running:
        for row in _calls(running, device, settings):
            yield facts | row
    del running
    say(f"{name}: speculation")
    for row in _speculation(model, device, settings):
        yield facts | row
    del model
    empty_cache(device)
    if settings.first:
        say(f"{name}: first calls, in processes of their own")
        taken = [_first_call(name, device, settings) for _ in range(PROCESSES)]
        yield facts | {"call": "first of a process", "overhead_ms": round(median(taken), 1), "samples": len(taken)}


def _calls(model: Any, device: torch.device, settings: Settings) -> Iterator[dict[str, Any]]:
    """Of an accelerated model: the step, each kind of call's overhead, and the memory that is kept in the end."""
    few, tokens, length = settings.tokens // 4, settings.tokens, settings.prompt
    _timed(model, length, tokens, device)  # whatever is compiled once
    _timed(model, length, few, device)
    again = [_timed(model, length, tokens, device) for _ in range(settings.rounds)]
    short = [_timed(model, length, few, device) for _ in range(settings.rounds)]
    step = (median(again) - median(short)) / (tokens - few)
    yield {"call": "step of a running call", "median_ms": round(step, 3), "samples": settings.rounds}
    decoding = step * (tokens - 1)
    made = []
    for _ in range(settings.rounds):
        release(model)
        made.append(_overhead(model, length, tokens, decoding, device))
    new = [_overhead(model, length - i, tokens, decoding, device) for i in range(1, settings.rounds + 1)]
    same = [_overhead(model, length, tokens, decoding, device) for _ in range(settings.rounds)]
    for call, taken in (("a cache's first", made), ("a new prompt length", new), ("a repeated one", same)):
        yield {"call": call, "overhead_ms": round(median(taken), 1), "samples": len(taken)}
    pool = pool_of(model)
    if pool is not None:
        most = SHARE * torch.cuda.mem_get_info(device)[1] / 1e9 if device.type == "cuda" else None
        kept = {"kept_gb": round(pool.nbytes / 1e9, 3), "most_gb": most and round(most, 1)}
        yield {"call": "memory between calls"} | kept


def _timed(model: Any, length: int, tokens: int, device: torch.device) -> float:
    ids = random_ids(model, 1, length, seed=length)
    return clock(lambda: written(model, ids, tokens), device)


def _overhead(model: Any, length: int, tokens: int, decoding: float, device: torch.device) -> float:
    """Milliseconds of a call beyond its prompt and its steps. The prompt is computed by itself afterwards."""
    taken = _timed(model, length, tokens, device)
    ids = random_ids(model, 1, length, seed=length)
    return taken - median(_prompt_ms(model, ids, device) for _ in range(3)) - decoding


def _prompt_ms(model: Any, ids: Tensor, device: torch.device) -> float:
    found = prompt_ms(model, ids)
    if found is not None:
        return found
    with torch.no_grad():
        return clock(lambda: model(ids, use_cache=True, logits_to_keep=1), device)


def _speculation(model: Any, device: torch.device, settings: Settings) -> Iterator[dict[str, Any]]:
    """Tokens a second of every way to write a text, by each provider."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    vocabulary, tokens = len(embedding), 4 * settings.tokens
    if head is embedding:  # tied: a head of its own, for what follows another token
        model.get_output_embeddings().weight = head = torch.nn.Parameter(embedding.detach().clone(), False)
    with torch.no_grad():
        embedding.mul_(LOUD)
    for text, cycle in TEXTS.items():
        follows = _permutation(vocabulary, cycle or vocabulary)
        right = _run(follows, settings.prompt + tokens).to(device)
        ids = right[None, : settings.prompt]
        with torch.no_grad():
            head[follows.to(device)] = embedding / LOUD
        for provider, run_by in ABRun(model).providers.items():
            made = tokens if provider == OURS else settings.tokens
            with run_by() as running:
                for way, options in WAYS.items():
                    write = partial(written, running, ids, made, **options)
                    _check(write(), right[: settings.prompt + made], provider, way)
                    taken = [clock(write, device) for _ in range(3)]
                    speed = round(1e3 * made / median(taken), 1)
                    yield {"text": text, "way": way, "provider": provider, "tokens_per_s": speed, "samples": len(taken)}


def _permutation(size: int, cycle: int) -> Tensor:
    """What follows each token, in cycles of so many; the rest of a vocabulary is a shorter one."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0), dtype=torch.int64, device="cpu")
    follows = torch.empty(size, dtype=torch.int64, device="cpu")
    for part in order.split(cycle):
        follows[part] = part.roll(-1)
    return follows


def _run(follows: Tensor, length: int) -> Tensor:
    token, found = 5, []
    for _ in range(length):
        found.append(token)
        token = int(follows[token])
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def _check(found: Tensor, right: Tensor, provider: str, way: str) -> None:
    if not torch.equal(found[0], right):
        wrong = int((found[0] != right).nonzero()[0]) if found.shape[1] == len(right) else found.shape[1]
        raise ValueError(f"{provider}, {way}: token {wrong} is not what follows the one before; nothing is timed")


def _first_call(name: str, device: torch.device, settings: Settings) -> float:
    """Milliseconds that a process's first call takes beyond its second."""
    code = "import sys; from halfbyte.bench.calls import first_call; first_call(*sys.argv[1:])"
    arguments = [name, str(device), str(settings.layers), str(settings.prompt), str(settings.tokens)]
    result = subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    found: float = json.loads(result.stdout.splitlines()[-1])["ms"]
    return found


def first_call(name: str, device: str, layers: str, length: str, tokens: str) -> None:
    """What such a process does: the time is that of `accelerate` and of the first call, less the second's."""
    where = torch.device(device)
    model = models.load(name, where, torch.bfloat16, layers=int(layers))
    started = time.perf_counter()
    accelerate(model)
    taken = 1e3 * (time.perf_counter() - started) + _timed(model, int(length), int(tokens), where)
    print(json.dumps({"ms": taken - _timed(model, int(length), int(tokens), where)}))


def terminal_table(record: Mapping[str, Any]) -> Table:
    table = Table(title=title(record), caption=record["method"])
    table.add_column("")
    table.add_column("")
    table.add_column("", justify="right")
    for model in dict.fromkeys(row["model"] for row in record["rows"]):
        table.add_row(styled((model, "bold")))
        for cells in _cells(record, model):
            table.add_row(*cells)
        table.add_section()
    return table


def markdown(record: Mapping[str, Any]) -> str:
    """One line a kind of call, then one a way to write a text."""
    lines = [line(["model", "", "", ""]), line(["---", "---", "---", "---:"])]
    for model in dict.fromkeys(row["model"] for row in record["rows"]):
        lines += [line([model, *cells]) for cells in _cells(record, model)]
    return "\n".join([*lines, "", provenance(record)])


def _cells(record: Mapping[str, Any], model: str) -> Iterator[tuple[str, str, str]]:
    for row in record["rows"]:
        if row["model"] != model:
            continue
        if "way" in row:
            yield (
                f"a text that {row['text']}",
                f"{row['provider']}, {row['way']}",
                f"{row['tokens_per_s']:,.0f} tokens/s",
            )
        elif "kept_gb" in row:
            most = f" of at most {row['most_gb']} GB" if row["most_gb"] else ""
            yield row["call"], "", f"{row['kept_gb']} GB{most}"
        elif "median_ms" in row:
            yield row["call"], "", f"{row['median_ms']:.2f} ms"
        else:
            yield row["call"], "beyond its prompt and steps", f"{row['overhead_ms']:,.1f} ms"
