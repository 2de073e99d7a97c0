"""Guesses looked up in the text itself (`prompt_lookup_num_tokens`), with the loop over tokens in captured steps.

A step looks for the newest place where the last tokens stood before, feeds what followed there behind the last token,
and keeps those guesses that the model makes itself, with one token more. Our products take little longer for eight rows
than for one, so guesses cost little, and those that are wrong are written over by the next step. Where guesses keep
being wrong a step feeds the last token alone, and only looks whether a guess would have been right. The host launches
steps ahead and reads late how many tokens each has made.

transformers looks on the host, between steps that wait for it; which guesses are tried makes no difference to the text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfbyte.models.driven import DrivenStep
from halfbyte.models.loop import AHEAD, Reports, TokenBuffers
from halfbyte.models.store import CacheStore

WIDTH = 8  # tokens of a step: the last one and the guesses
NGRAM = 2  # the longest end of the text that is looked for, unless the caller says otherwise
# How often the first guess is right, the newest steps counting most. A wide step takes about a fifth longer.
FIRST_RATE, NEWEST, WORTH = 0.5, 0.25, 0.2


def look_up(ids: Tensor, length: Tensor, ngram: int, count: int) -> Tensor:
    """`count` guesses at what follows the first `length` of ids: what followed the newest earlier place of its last
    `ngram` tokens, or of fewer, of as many as stand anywhere; again and again if the text ends before there are enough.
    The last token, where not even that stands elsewhere.

    ids: int64 [tokens], of which those from `length` on are not looked at. length: int64, without dimensions.
    """
    device, tokens = ids.device, len(ids)
    last = (length - torch.arange(1, ngram + 1, dtype=torch.int64, device=device)).clamp(min=0)  # the newest first
    equals = ids == ids.index_select(0, last)[:, None]
    places = torch.arange(tokens, dtype=torch.int64, device=device)
    same = places < length - 1  # of each place, whether it ends as many tokens like the last ones as were looked at
    rank = places
    for i in range(ngram):
        same = torch.nn.functional.pad(equals[i, : max(0, tokens - i)], (min(i, tokens), 0)) & same
        rank = rank + same * tokens  # more tokens before later places
    best = rank.max()
    begin = torch.where(best < tokens, length - 1, best % tokens + 1)
    ahead = torch.arange(count, dtype=torch.int64, device=device)
    return ids.index_select(0, begin + ahead % (length - begin))


class Guessing:
    """Makes the tokens of one text after the other, greedily, in wide and in narrow steps.

    ngram: as for `look_up`. ends: the tokens that end a text. left: how many tokens may still be made. report: int64
    [WIDTH + 3], a step's tokens, how many of them count, whether its first guess was right, and whether it goes on.
    """

    def __init__(
        self, model: Any, store: CacheStore, buffers: TokenBuffers, ends: tuple[int, ...], ngram: int, retried: Any
    ) -> None:
        self.buffers, self.ngram, device = buffers, ngram, model.device
        with torch.inference_mode(False), torch.no_grad():
            self.left = torch.zeros((), dtype=torch.int64, device=device)
            self.report = torch.zeros(WIDTH + 3, dtype=torch.int64, device=device)
            self.ends = torch.tensor(ends, dtype=torch.int64, device=device) if ends else None
        self.wide, self.narrow = (GuessingStep(model, store, self, width, retried) for width in (WIDTH, 1))

    @property
    def nbytes(self) -> int:
        return self.wide.nbytes + self.narrow.nbytes

    def close(self) -> None:
        """Let go of what the steps keep."""
        self.wide.close()
        self.narrow.close()

    def try_again(self) -> None:
        """In a new call of `generate`, steps that could not be captured are tried once more."""
        self.wide.try_again()
        self.narrow.try_again()

    def begin(self, rules: object) -> None:
        """As of other steps that make tokens. There are no rules."""
        self.try_again()

    def start(self, most: int) -> None:
        """Go on behind the first of at most so many tokens, which the buffers have."""
        buffers = self.buffers
        torch.mul(buffers.unfinished[0], most - 1, out=self.left)
        self.report.zero_()
        self.report[0].copy_(buffers.ids[0].index_select(0, buffers.length[None] - 1)[0])
        self.report[-3].fill_(1)
        self.report[-1].copy_(self.left > 0)

    def run(self, most: int, streamer: Any) -> int:
        """Make tokens until the text has ended or has `most` new ones, the first of which is there already. Returns how
        many there are."""
        reports = Reports(self.report, AHEAD)
        reports.send()  # of the prompt
        rate, made, count, goes_on = FIRST_RATE, 0, 1, True
        while goes_on:
            # None is launched too many, if those on their way make as many tokens each as the newest that is known.
            while len(reports.sent) <= AHEAD and (not reports.sent or made + count * len(reports.sent) < most):
                (self.wide if rate >= WORTH else self.narrow).advance()
                reports.send()
            report = reports.read()
            count, right, more = report[-3:].tolist()
            if made:
                rate += NEWEST * (right - rate)
            made, goes_on = made + count, bool(more)
            if streamer is not None and count:
                streamer.put(report[None, :count].clone())
        return made


class GuessingStep(DrivenStep):
    """Feeds the last token and as many guesses as there is room for; adds the tokens that are right to the text."""

    def __init__(self, model: Any, store: CacheStore, guessing: Guessing, width: int, retried: Any) -> None:
        super().__init__(model, store, width, retried)
        self.buffers, self.guessing = guessing.buffers, guessing

    def step(self) -> Tensor:
        guessing, buffers, text = self.guessing, self.buffers, self.buffers.ids[0]
        place = buffers.length - 1
        guesses = look_up(text, buffers.length, guessing.ngram, max(1, self.width - 1))
        self.ids[0, :1].copy_(text.index_select(0, place[None]))
        self.ids[0, 1:].copy_(guesses[: self.width - 1])
        self.positions.copy_(buffers.positions + self.steps)
        self.place.tensor.copy_(place)
        self.visible.copy_(buffers.visible)
        logits = super().step()
        tokens = logits[0].to(torch.float32).argmax(-1)
        are_right = (tokens[: len(guesses)] == guesses).long().cumprod(0)
        count = torch.minimum(are_right[: self.width - 1].sum() + 1, guessing.left)
        left = guessing.left - count
        if guessing.ends is not None:
            is_end = (tokens[:, None] == guessing.ends).any(1)
            until = torch.where(is_end, self.steps + 1, WIDTH + 1).min()  # as many tokens, the one that ends included
            left = torch.where(until <= count, 0, left)
            count = torch.minimum(count, until)
        guessing.left.copy_(left)
        text.index_copy_(0, buffers.length + self.steps, tokens)  # those that do not count are written over
        buffers.length.add_(count)
        buffers.positions.add_(count)
        guessing.report[: self.width].copy_(tokens)
        guessing.report[-3:].copy_(torch.stack((count, are_right[0], (left > 0).long())))
        return logits
