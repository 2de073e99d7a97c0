"""The token loop of `generate` inside a captured step: from one token to the next nothing waits for the host.

A step feeds the last token, computes masks and logits, applies the logits processors, chooses a token, writes it
behind the others and notes which texts have ended. The host launches steps and reads what they report a few steps
late; what came after the end is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.common import slow
from halfbyte.models.captured import Captured
from halfbyte.models.rotation import Rotation
from halfbyte.models.rules import Numbers, Rule
from halfbyte.models.stepping import Stepper

AHEAD = 2  # steps that are launched before the report of an earlier one is read: one runs while the next one waits
BROKEN = -1  # in a report: probabilities that are no numbers


class TokenBuffers:
    """What the steps of one bucket read and write: rows beyond the texts of a call are computed and never looked at.

    ids: int64 [rows, tokens + 1], the prompt and what came after it. length: how many of them there are. fed and
    positions: int64 [rows, 1], the token to be fed and its position. visible: bool [rows, tokens], false for padding.
    report: int64 [rows + 1], the newest tokens, and whether any text goes on.
    """

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        with torch.inference_mode(False), torch.no_grad():
            self.ids, self.length = zeros(rows, tokens + 1), zeros()
            self.positions, self.fed = zeros(rows, 1), zeros(rows, 1)
            self.visible = zeros(rows, tokens, dtype=torch.bool)
            self.real, self.unfinished = zeros(rows, dtype=torch.bool), zeros(rows, dtype=torch.bool)
            self.pad, self.report = zeros(), zeros(rows + 1)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())

    def begin(self, ids: Tensor, mask: Tensor | None, positions: Tensor, pad: int | Tensor) -> None:
        """ids: the prompt [texts, tokens]. mask: its padding, or None. positions: int64 [texts or 1, tokens]."""
        texts, tokens = ids.shape
        self.ids[:texts, :tokens].copy_(ids)
        self.length.fill_(tokens)
        self.positions.zero_()
        self.positions[:texts].copy_(positions[:, -1:]).add_(1)
        self.visible.fill_(True)
        if mask is not None:
            self.visible[:texts, :tokens].copy_(mask)
        self.real.zero_()[:texts].fill_(True)
        self.unfinished.copy_(self.real)
        self.pad.copy_(pad) if isinstance(pad, Tensor) else self.pad.fill_(pad)

    def put(self, tokens: Tensor, broken: Tensor | None, ends: Tensor | None) -> None:
        """Write the next token of each row. ends: int64, the tokens that end a text. broken: bool [rows]."""
        if ends is not None:
            tokens = torch.where(self.unfinished, tokens, self.pad)
            self.unfinished.logical_and_((tokens[:, None] != ends).all(1))
        self.ids.index_copy_(1, self.length[None], tokens[:, None])
        self.length.add_(1)
        self.fed.copy_(tokens[:, None])
        self.report[:-1].copy_(tokens)
        self.report[-1:].copy_(self.unfinished.any())
        if broken is not None:
            self.report[-1:].masked_fill_((broken & self.real).any(), BROKEN)

    def go_on(self, scores: Tensor, samples: bool, ends: Tensor | None) -> None:
        """Choose the next token of each row by its scores [rows, tokens], write it, and let it be fed at the next
        position."""
        if scores.is_cuda and slow.has_triton():
            from halfbyte.kernels.token.triton import put_argmax, supports

            if supports(scores):
                chances, noise, broken = drawn(scores) if samples else (scores, None, None)
                put_argmax(chances, self, ends, noise, None if broken is None else (broken, BROKEN))
                return
        self.put(*choose(scores, samples), ends)
        self.positions.add_(1)


def drawn(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities and noise [rows, tokens], whose largest quotient is what torch.multinomial draws, which would wait
    for the GPU to look at the probabilities first; and of which rows these are no numbers."""
    probabilities = torch.softmax(scores, dim=-1)
    noise = torch.empty_like(probabilities).exponential_(1)
    return probabilities, noise, probabilities[:, 0].isnan()  # one that is no number spoils its row


def choose(scores: Tensor, samples: bool) -> tuple[Tensor, Tensor | None]:
    """The next token of each row, and where there is none since its probabilities are no numbers."""
    if not samples:
        return scores.argmax(-1), None
    probabilities, noise, broken = drawn(scores)
    return (probabilities / noise).argmax(-1), broken


@dataclass(frozen=True)
class Kind:
    """What a captured step takes for granted besides its model and its rules.

    ends: the tokens that end a text. logits, scores: whether the caller wants them, before and after the processors.
    extras: what else the model is called with.
    """

    samples: bool
    ends: tuple[int, ...]
    logits: bool
    scores: bool
    extras: tuple[tuple[str, Any], ...]


class TokenStep(Stepper):
    """Makes one token of each row after the other. `outputs` are what the caller wants of each: logits and scores."""

    def __init__(
        self,
        model: Any,
        rotation: Rotation,
        buffers: TokenBuffers,
        rules: list[Rule],
        kind: Kind,
        vocabulary: int,
        retried: Callable[[Callable[[], Captured]], Captured],
    ) -> None:
        super().__init__(model, buffers.ids.device, retried)
        self.rotation, self.buffers, self.rules, self.kind = rotation, buffers, rules, kind
        # The largest of 16 bits is the largest of their fp32 copies.
        self.needs_floats = bool(kind.samples or kind.logits or kind.scores or rules)
        with torch.inference_mode(False), torch.no_grad():
            self.numbers = Numbers(rules, len(buffers.ids), self.device)
            self.ends = torch.tensor(kind.ends, dtype=torch.int64, device=self.device) if kind.ends else None
            for rule in rules:
                rule.prepare(vocabulary, self.device)

    def begin(self, rules: list[Rule]) -> None:
        """Take the numbers of a call. rules: of the same keys as this step's own."""
        self.numbers.fill(rules)
        self.try_again()

    def step(self) -> dict[str, Tensor]:
        buffers = self.buffers
        outputs = self.model(
            input_ids=buffers.fed,
            position_ids=buffers.positions,
            attention_mask=self.rotation.turn(buffers.length, buffers.visible),
            past_key_values=self.rotation.cache,
            use_cache=True,
            return_dict=True,
            **dict(self.kind.extras),
        )
        logits = scores = outputs.logits[:, -1]
        if self.needs_floats:
            logits = scores = scores.to(copy=True, dtype=torch.float32)
        for rule, numbers in zip(self.rules, self.numbers.of, strict=True):
            scores = rule(scores, buffers.ids, buffers.length, numbers)
        buffers.go_on(scores, self.kind.samples, self.ends)
        wanted = {"logits": logits} if self.kind.logits else {}
        return wanted | ({"scores": scores} if self.kind.scores else {})


class Reports:
    """Copies of a report on the host, of the last steps, each with the moment from which on it is there."""

    def __init__(self, report: Tensor, ahead: int) -> None:
        self.report, on_gpu = report, report.is_cuda
        self.unused = deque(
            (torch.empty_like(report, device="cpu", pin_memory=on_gpu), torch.cuda.Event() if on_gpu else None)
            for _ in range(ahead + 1)
        )
        self.sent: deque[tuple[Tensor, Any]] = deque()

    def send(self) -> None:
        there, event = slot = self.unused.popleft()
        there.copy_(self.report, non_blocking=True)
        if event is not None:
            event.record()
        self.sent.append(slot)

    def read(self) -> Tensor:
        """The oldest that was not read yet, once it is there. The next `send` may overwrite it."""
        there, event = slot = self.sent.popleft()
        if event is not None:
            event.synchronize()
        self.unused.append(slot)
        return there


def run(step: TokenStep, most: int, texts: int, ahead: int, streamer: Any, keep: Callable[[], None]) -> int:
    """Make tokens until all texts have ended or have `most` new ones, the first of which is there already.

    keep: called after each step, while its outputs are there. Returns how many tokens there are, without those that
    were made before the host knew of the end. Raises what torch.multinomial does for probabilities that are no numbers.
    """
    reports = Reports(step.buffers.report, ahead)
    made = read = 0
    while read < most:
        if made < most:
            if made:
                step.advance()
                keep()
            reports.send()
            made += 1
            if made - read <= ahead and made < most:  # launch the next one before the oldest report is read
                continue
        report = reports.read()
        read += 1
        goes_on = int(report[-1])
        if goes_on == BROKEN:
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if streamer is not None:
            streamer.put(report[:texts].clone())
        if not goes_on and step.ends is not None:
            break
    return read
