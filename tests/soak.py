"""Many calls of `generate` on captured steps, of mixed lengths, batches and options: `make soak CALLS=1000 SEED=0`.

Small random models of several families take turns. A call is drawn from the seed and its number alone. Checked are:

- the tokens are those of transformers' own loop without graphs, up to where two tokens' scores differ in their last
  digits alone, which happens now and then;
- what a model keeps between calls stays within its share, and `release` frees it;
- memory does not grow from the middle of the run to its end.

On a CPU a captured step runs as it is.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.models import steps
from halfbyte.models import transformers as host

from .models.families import DEVICE, WINDOW, captures, generate, hooked, make, plainly, prompt

FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"eos_token_id": [5, 17, 40]},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 9, "eos_token_id": list(range(3, 40))},
    {"no_repeat_ngram_size": 2},
    {"num_beams": 2},
    {"prompt_lookup_num_tokens": 3},
)
FORGETS = 60  # a model is restored, and taken again, once in so many calls; released, twice as often
TIE = 1e-6  # of the highest score
GROWTH = 48 << 20  # bytes that allocators of the host may need and a leak of a tensor a call would soon pass


@dataclass(frozen=True)
class Call:
    """texts, tokens, padding: of the prompt. new: tokens to make. options: number of OPTIONS."""

    family: str
    texts: int
    tokens: int
    padding: int
    new: int
    options: int
    before: str  # "release", "restore" or ""


def draw(seed: int, number: int, longest: int = 200) -> Call:
    """Lengths around windows and the sizes of caches, and any others."""
    r = random.Random(f"soak {seed} {number}")
    tokens = min(longest, r.choice((r.randint(1, 12), WINDOW + r.randint(-2, 2), r.randint(1, longest), 120, 128)))
    options = r.randrange(len(OPTIONS))
    lookup = "prompt_lookup_num_tokens" in OPTIONS[options]
    texts = 1 if lookup else r.choice((1, 1, 2, 3, 4, 7, 8))
    padding = 0 if texts == 1 else r.randint(0, tokens - 1)
    before = r.choices(("release", "restore", ""), (2, 1, FORGETS - 3))[0]
    new = max(r.randint(1, 40), OPTIONS[options].get("min_new_tokens", 0))
    return Call(r.choice(FAMILIES), texts, tokens, padding, new, options, before)


def check(call: Call, model: Any) -> Iterator[str]:
    """What is wrong with a call, in words."""
    if call.before == "release":
        host.release(model)
        if kept_by(model):
            yield f"{kept_by(model)} bytes are kept behind release"
    elif call.before == "restore":
        host.undo(model)
        hooked(model)
    inputs, options = prompt(call.texts, call.tokens, call.padding), OPTIONS[call.options]
    found = generate(model, inputs, max_new_tokens=call.new, **options)
    right = plainly(model, inputs, max_new_tokens=call.new, **options)
    if not torch.equal(found, right) and not parts_at_ties(found, model, inputs, max_new_tokens=call.new, **options):
        yield f"tokens differ: {found.tolist()} instead of {right.tolist()}"
    limit = steps.SHARE * steps.total_bytes(DEVICE)
    if kept_by(model) > limit:
        yield f"{kept_by(model)} bytes are kept, the share is {limit:.0f}"


def parts_at_ties(found: torch.Tensor, model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> bool:
    """Whether each text's first token that differs has the score of the right one, but for the last digits."""
    if "num_beams" in options:
        return False
    plain = plainly(model, inputs, **options, return_dict_in_generate=True, output_scores=True)
    width, begin = min(found.shape[1], plain.sequences.shape[1]), inputs["input_ids"].shape[1]
    differs = found[:, :width] != plain.sequences[:, :width]
    ties = []
    for text in differs.any(1).nonzero().view(-1).tolist():
        first = int(differs[text].int().argmax())
        scores = plain.scores[first - begin][text] if first >= begin else None
        chosen = [sequences[text, first] for sequences in (found, plain.sequences)]
        ties.append(
            scores is not None and bool((scores[chosen[0]] - scores[chosen[1]]).abs() < TIE * scores.max().abs())
        )
    return bool(ties) and all(ties)


def kept_by(model: Any) -> int:
    pool = steps.pool_of(model)
    return 0 if pool is None else pool.nbytes


def used() -> int:
    """Bytes of memory in use: the GPU's, or those that this process has of the host's."""
    gc.collect()
    if DEVICE.type == "cuda":
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def run(seed: int, numbers: list[int], tell: Callable[[str], None], longest: int = 200) -> int:
    """Make the calls; returns how many had something wrong, growth being one more."""
    models = {family: hooked(make(family)) for family in FAMILIES}
    failures, told, middle = 0, time.monotonic(), 0
    try:
        for count, number in enumerate(numbers):
            call = draw(seed, number, longest)
            if count == len(numbers) // 2:
                middle = used()
            try:
                wrong = list(check(call, models[call.family]))
            except Exception as error:
                wrong = [f"{type(error).__name__}: {error}"]
            if wrong:
                failures += 1
                tell(f"{call}\n  " + "\n  ".join(wrong) + f"\n  again: --seed {seed} --only {number}")
            if time.monotonic() - told > 10:
                told = time.monotonic()
                tell(f"{count + 1} calls, {failures} failures, {used() / 1e6:.0f} MB")
        grown = used() - middle
        if len(numbers) >= 200 and grown > GROWTH:
            failures += 1
            tell(f"memory grew by {grown / 1e6:.0f} MB in the second half")
    finally:
        for model in models.values():
            host.undo(model)
        host.undo_in_library()
    tell(f"{len(numbers)} calls on {DEVICE.type}, seed {seed}: {failures} failures")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, action="append", help="the number of a call; can be given again")
    given = parser.parse_args()
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)  # small operators on several threads wait for each other longer than they work
    with captures():
        sys.exit(bool(run(given.seed, given.only or list(range(given.calls)), lambda text: print(text, flush=True))))


if __name__ == "__main__":
    main()
