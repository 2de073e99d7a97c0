"""Many requests of mixed kinds and lengths to `halfbyte serve`: `make soak-serving REQUESTS=2000 SEED=0`.

A small random model in 4 bits is served on this machine. Clients ask for completions and chats, streamed and whole.
Some go away in the middle of an answer, and some ask for what there is not. A request is drawn from the seed and its
number alone. Checked are:

- an answer's tokens are those of `generate` with the same weights, dequantized;
- a wrong request is told so;
- the server's memory does not grow from the middle of the run to its end;
- it ends when it is told to.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from processes import end, environment, free_port, wait_for
from served_models import VOCABULARY, dense, dequantized, quantized

PROMPTS, LONGEST, NEW_TOKENS = 48, 260, 40
KINDS = {"streamed": 10, "whole": 5, "chat": 3, "left": 3, "wrong": 1}  # with their weights
WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": "no list"}),
    ("/v1/completions", {}),
    ("/v1/completions", {"prompt": "t5", "max_tokens": "many"}),
)
START, ANSWER = 400, 120  # seconds until the server answers, until the next piece of an answer
FAREWELL = 60  # seconds from SIGTERM to its end
GROWTH = 48 << 20  # bytes that allocators may need and a leak of a cache a request would soon pass


@dataclass(frozen=True)
class Request:
    """prompt: its number. new: tokens to make. pieces: after which a client leaves. wrong: number of WRONG."""

    kind: str
    prompt: int
    new: int
    pieces: int
    wrong: int


def draw(seed: int, number: int) -> Request:
    r = random.Random(f"serving {seed} {number}")
    (kind,) = r.choices(tuple(KINDS), tuple(KINDS.values()))
    new = NEW_TOKENS if kind == "left" else r.choice((1, 2, r.randint(1, NEW_TOKENS), NEW_TOKENS))
    return Request(kind, r.randrange(PROMPTS), new, r.randint(0, 4), r.randrange(len(WRONG)))


def make_prompts(seed: int) -> list[list[int]]:
    """Short ones more often, of words that stay whole: in "t17" the tokenizer finds the special "t1"."""
    r = random.Random(f"prompts {seed}")
    lengths = [r.choice((r.randint(1, 12), r.randint(1, 80), r.randint(1, LONGEST))) for _ in range(PROMPTS)]
    return [[r.randrange(200, VOCABULARY) for _ in range(length)] for length in lengths]


def right_answers(path: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What a dense model in fp32 makes of each prompt, its end included where it comes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 2}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]


def words(tokens: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def ask(port: int, model: str, request: Request, prompts: Sequence[Sequence[int]], right: Sequence[list[int]]) -> str:
    """What is wrong with the answer to a request, or ""."""
    if request.kind == "wrong":
        path, body = WRONG[request.wrong]
        status, text = whole(port, path, {"model": model} | body)
        return "" if status in (400, 404, 422) else f"a wrong request got {status}: {text[:200]}"
    text = words(prompts[request.prompt])
    body = {"model": model, "max_tokens": request.new, "temperature": 0}
    wanted = [token for token in right[request.prompt][: request.new] if token != 1]
    if request.kind == "chat":
        status, text = whole(port, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]})
        found = json.loads(text)["choices"][0]["message"]["content"] if status == 200 else text
    elif request.kind == "whole":
        status, text = whole(port, "/v1/completions", body | {"prompt": text})
        found = json.loads(text)["choices"][0]["text"] if status == 200 else text
    else:
        leaves = request.pieces if request.kind == "left" else None
        status, found = streamed(port, body | {"prompt": text}, leaves)
        if leaves is not None:
            return "" if words(wanted).startswith(" ".join(found.split())) else f"the first tokens are {found!r}"
    if status != 200:
        return f"{status}: {found[:200]}"
    return "" if found.split() == words(wanted).split() else f"{found.split()} instead of {words(wanted).split()}"


@contextmanager
def connected(port: int, path: str, body: dict[str, Any]) -> Iterator[Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


def whole(port: int, path: str, body: dict[str, Any]) -> tuple[int, str]:
    with connected(port, path, body) as response:
        return response.status, response.read().decode()


def streamed(port: int, body: dict[str, Any], leaves: int | None) -> tuple[int, str]:
    """The text of a streamed answer, or of its first pieces, behind which the client closes the connection."""
    text, pieces = "", 0
    with connected(port, "/v1/completions", body | {"stream": True}) as response:
        if response.status != 200:
            return response.status, response.read().decode()
        while pieces != leaves and (line := response.readline()):
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    return 500, str(event["error"])
                piece = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
                text, pieces = text + piece, pieces + bool(piece)
    return 200, text


def run(numbers: Sequence[int], clients: int, answer: Callable[[int], str], tell: Callable[[str], None]) -> int:
    """Requests by their numbers, so many at a time; returns how many were answered wrongly."""
    lock, rest, failures = threading.Lock(), iter(numbers), [0]

    def client() -> None:
        while True:
            with lock:
                number = next(rest, None)
            if number is None:
                return
            try:
                wrong = answer(number)
            except (OSError, HTTPException, ValueError, KeyError) as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                with lock:
                    failures[0] += 1
                    tell(f"request {number}: {wrong}")

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures[0]


def used(process: subprocess.Popen[Any]) -> int:
    """Bytes that the server's processes have of the host's memory, and all programs of the GPUs'."""
    whole = psutil.Process(process.pid)
    found = sum(one.memory_info().rss for one in (whole, *whole.children(recursive=True)))
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found += total - free
    return found


def soak(engine: str, requests: int, clients: int, seed: int, tell: Callable[[str], None]) -> int:
    """Serve, ask, end; returns the number of failures."""
    prompts = make_prompts(seed)
    with TemporaryDirectory() as made:
        folder = Path(made)
        path = quantized(folder / "nf4", dense(folder / "dense"), "nf4", nested=True)
        right = right_answers(dequantized(folder / "right", path), prompts)
        port, log, name = free_port(), folder / "log", "soak"
        command = [sys.executable, "-m", "halfbyte", "serve", str(path), "--engine", engine, "--port", str(port)]
        command += ["--name", name, "--dtype", "float32"]
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, env=environment(folder / "cache", 2), stdout=output, stderr=output, text=True,
                start_new_session=True,
            )  # fmt: skip
        try:
            wait_for(port, process, log, START)
            started = time.monotonic()
            answer = partial(_answer, port, name, seed, prompts, right)
            half = requests // 2
            failures = run(range(half), clients, answer, tell)
            middle = used(process)
            tell(f"{half} requests, {failures} failures, {middle / 1e6:,.0f} MB, {time.monotonic() - started:.0f} s")
            failures += run(range(half, requests), clients, answer, tell)
            grown = used(process) - middle
            took = time.monotonic() - started
            tell(f"{requests} requests, {failures} failures, {grown / 1e6:+,.0f} MB since then, {took:.0f} s")
            if requests >= 200 and grown > GROWTH:
                failures += 1
                tell("memory grew")
            process.send_signal(signal.SIGTERM)
            process.wait(FAREWELL)
        finally:
            end(process)
            if os.environ.get("KEEP_LOG"):
                tell(log.read_text(encoding="utf-8")[-5000:])
    return failures


def _answer(
    port: int, name: str, seed: int, prompts: Sequence[Sequence[int]], right: Sequence[list[int]], number: int
) -> str:
    request = draw(seed, number)
    wrong = ask(port, name, request, prompts, right)
    return wrong and f"{request}: {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tell = partial(print, flush=True)
    sys.exit(bool(soak(given.engine, given.requests, given.clients, given.seed, tell)))


if __name__ == "__main__":
    main()
