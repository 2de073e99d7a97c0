"""What runs in a process of its own in `halfbyte bench engine`: one engine of vLLM, timed with more and more requests.

It tells what it finds line by line, as JSON in a file, so that nothing is lost when it is ended. Prompts are random
tokens, the same for every engine; answers are greedy and have one length, whatever their tokens are.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from halfbyte.bench import engine_trace

FIRST = 8  # tokens of an answer that are compared
FEW, CALLS = 8, 3  # up to so many requests, so many calls: a few long ones vary more than many short ones

Answers = list[list[int]]


@dataclass(frozen=True)
class Job:
    """arguments: of vllm.LLM. vocabulary: tokens to draw prompts from. requests: at once, one cell each. told: the file
    that lines are added to. trace: where kernels of the first number of requests go; "" for nothing."""

    arguments: dict[str, Any]
    vocabulary: int
    requests: Sequence[int]
    prompt_tokens: int
    new_tokens: int
    told: str
    trace: str = ""


def run(path: str) -> None:
    """path: of a Job, as JSON. The first line is facts about the engine, then there is one for each cell."""
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    with Path(job.told).open("a", encoding="utf-8") as told:

        def tell(facts: dict[str, Any]) -> None:
            told.write(json.dumps(facts) + "\n")
            told.flush()

        begun = time.perf_counter()
        from vllm import LLM

        llm = LLM(**job.arguments)
        seconds = round(time.perf_counter() - begun, 1)
        tell({"start_s": seconds} | llm.collective_rpc("engine_facts")[0])
        ask(llm, job, 3, min(4, job.new_tokens), seed=0)  # whatever is left to compile
        for requests in job.requests:
            tell(cell(llm, job, requests))
        if job.trace:
            some, prompt = job.requests[0], job.prompt_tokens
            new = engine_trace.tokens_of(some, prompt)
            first = engine_trace.first_step(some, prompt)
            engine_trace.trace(llm, job.trace, first, lambda: ask(llm, job, some, new, seed=77))
    os._exit(0)  # how long an engine takes to end is of no interest


def cell(llm: Any, job: Job, requests: int) -> dict[str, Any]:
    """Times of so many requests at once. prefill_s: of the same number of prompts with one new token each. first: the
    tokens that answers begin with."""
    ask(llm, job, requests, min(FIRST, job.new_tokens), seed=1)
    prefill = min(ask(llm, job, requests, 1, seed=2 + call)[0] for call in range(2))
    calls = [ask(llm, job, requests, job.new_tokens, seed=10 + call) for call in range(CALLS if requests <= FEW else 1)]
    taken, answers = median(seconds for seconds, _ in calls), [answer for _, made in calls for answer in made]
    decoding = taken - prefill
    return {
        "requests": requests, "calls": len(calls), "seconds": round(taken, 4), "prefill_s": round(prefill, 4),
        "tokens_per_s": round(requests * job.new_tokens / taken, 1),
        "decode_tokens_per_s": round(requests * (job.new_tokens - 1) / decoding, 1) if decoding > 0 else None,
        "step_ms": round(1e3 * decoding / max(1, job.new_tokens - 1), 3),
        # Requests that all go on with one token ask few experts, and are too fast.
        "different_tokens": round(mean(len(set(step)) for step in zip(*calls[0][1], strict=True)), 1),
        "first": [answer[:FIRST] for answer in answers],
    }  # fmt: skip


def ask(llm: Any, job: Job, requests: int, new: int, seed: int) -> tuple[float, Answers]:
    """Seconds until all requests have `new` tokens, and these."""
    from vllm import SamplingParams

    draw = random.Random(seed)
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, job.vocabulary) for _ in range(job.prompt_tokens)]}  # none is special
        for _ in range(requests)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begun
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    if any(len(answer) != new for answer in answers):
        raise RuntimeError(f"answers have {sorted(map(len, answers))} tokens; {new} each were asked for")
    return seconds, answers
