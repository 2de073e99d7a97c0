"""`halfbyte bench serve`: throughput and latency of a served model, beside the same engine without halfbyte.

Before a load is timed, every prompt is asked for once, alone: an answer that fails, or that repeats differently, makes
an error and no time. Then each number of clients asks the same seeded requests of each server, after a short load that
is not timed: what a server compiles and captures for so many, it does once. Loads go to this machine only, and are
bounded in requests and seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halfbyte.bench import load as loads
from halfbyte.bench import servers
from halfbyte.bench.load import Load
from halfbyte.measure.report import OURS, line, provenance, title
from halfbyte.serving.choice import VLLM
from halfbyte.terminal import Table

METHOD = (
    "clients on 127.0.0.1, one request at a time each, streamed and greedy, after a short load that is not timed; "
    "tokens of all answers over the time of the load; ms from a request to its first token and from token to token, as "
    "clients see them"
)
CLIENTS = (1, 8, 32, 64)
PROMPTS = 16  # different ones
UNTIMED_TOKENS = 8  # of each answer before a load is timed
WITHOUT = "without halfbyte"


@dataclass(frozen=True)
class Settings:
    """engine: of serving.choice.ENGINES. clients: at once, each a load of its own. requests: of each client.
    prompt_tokens: the mean; prompts have from half to one and a half times as many. baseline: the checkpoint that the
    engine gets without halfbyte; "" leaves that out. more: arguments of the engine. name: of the model, in rows; by
    default that of its folder."""

    engine: str
    clients: Sequence[int] = CLIENTS
    requests: int = 4
    prompt_tokens: int = 128
    new_tokens: int = 64
    seconds: float = 600.0
    dtype: str = "auto"
    seed: int = 0
    baseline: str = ""
    more: Sequence[str] = ()
    name: str = ""

    def label(self, model: str) -> str:
        return self.name or Path(model).name


def providers_of(settings: Settings) -> tuple[str, ...]:
    """What serves, one after the other."""
    return (OURS, WITHOUT) if settings.baseline else (OURS,)


def serve_rows(
    model: str, provider: str, prompts: Sequence[str], settings: Settings, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Rows of a record: of one of `providers_of`, each number of clients."""
    path, command_of = (model, servers.with_halfbyte) if provider == OURS else (settings.baseline, servers.without)
    facts: dict[str, Any] = {
        "model": settings.label(model), "engine": settings.engine, "provider": provider,
        "prompt_tokens": settings.prompt_tokens, "new_tokens": settings.new_tokens, "seed": settings.seed,
    }  # fmt: skip
    if path != model:
        facts["checkpoint"] = Path(path).name
    port = servers.free_port()
    command, variables = command_of(settings.engine, path, port, settings.dtype, settings.more)
    say(f"{model}: {settings.engine}, {provider}")
    try:
        with servers.running(command, variables, port):
            load = Load(path, prompts, 0, settings.new_tokens, settings.seconds, settings.seed, settings.engine == VLLM)
            for row in _loads(port, load, settings, say):
                yield facts | row
    except RuntimeError as error:
        if provider == OURS:
            raise ValueError(f"the server did not start: {error}") from error
        yield facts | {"left_out": str(error)}


def _loads(port: int, load: Load, settings: Settings, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    alone = [loads.ask(port, load, prompt) for prompt in load.prompts]
    again = loads.ask(port, load, load.prompts[0])
    if failed := [answer.error for answer in (*alone, again) if answer.error]:
        yield {"clients": 1, "error": failed[0]}
        return
    if again.text != alone[0].text:
        yield {"clients": 1, "error": "the same request had two answers"}
        return
    right = {answer.prompt: answer.text for answer in alone}
    for clients in settings.clients:
        say(f"{clients} clients")
        loads.run(port, replace(load, requests=clients, new_tokens=min(UNTIMED_TOKENS, load.new_tokens)), clients)
        answers = loads.run(port, replace(load, requests=clients * settings.requests), clients)
        # In 16 bits a sum may round otherwise in a fuller batch, and two tokens that are as likely change places.
        same = sum(answer.text == right[answer.prompt] for answer in answers)
        yield {"clients": clients, "same_as_alone": same} | loads.summary(answers)


def make_prompts(model: str, settings: Settings) -> list[str]:
    """Texts of random tokens of the model's tokenizer. They are near, not exactly, the lengths that were drawn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    draw = random.Random(settings.seed)
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(len(tokenizer)) if token not in special]
    lengths = [max(1, round(settings.prompt_tokens * draw.uniform(0.5, 1.5))) for _ in range(PROMPTS)]
    return [tokenizer.decode([draw.choice(ids) for _ in range(length)]) or "." for length in lengths]


HEADS = ("", "clients", "tokens/s", "ratio", "first token ms, p50", "p99", "between tokens ms, p50", "p99")


def cells(record: Mapping[str, Any]) -> Iterator[list[str]]:
    """The rows of a table. ratio: of tokens a second, to the engine without halfbyte."""
    rows = record["rows"]
    plain = {_load_of(row): row.get("tokens_per_s") for row in rows if row["provider"] == WITHOUT}
    for row in rows:
        name = f"{row['model']}, {row['engine']}, {row['provider']}"
        if "tokens_per_s" not in row:
            yield [name, str(row.get("clients", "")), row.get("error") or row.get("left_out", ""), *[""] * 5]
            continue
        speed, other = row["tokens_per_s"], plain.get(_load_of(row))
        ratio = f"{speed / other:.2f}" if other and row["provider"] == OURS else ""
        times = [row[f"{kind}_ms_{rank}"] for kind in ("first", "between") for rank in ("p50", "p99")]
        failed = f", {row['failed']} failed" if row["failed"] else ""
        yield [
            name,
            str(row["clients"]),
            f"{speed:,.1f}{failed}",
            ratio,
            *("" if t is None else f"{t:.2f}" for t in times),
        ]


def _load_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What engines with and without halfbyte are both asked."""
    return row["model"], row["engine"], row.get("clients")


def terminal_table(record: Mapping[str, Any]) -> Table:
    table = Table(*HEADS, title=title(record))
    for row in cells(record):
        table.add_row(*row)
    return table


def markdown(record: Mapping[str, Any]) -> str:
    lines = [line(HEADS), line(["---", *["---:"] * (len(HEADS) - 1)]), *map(line, cells(record))]
    return "\n".join([*lines, "", provenance(record)])
