"""transformers' logits processors inside a captured step.

Most are captured as they are. Those that look at the tokens so far index by a length that grows, so here they look at
a buffer of all tokens and at its length on the device. What differs from call to call, such as the length of the
prompt, is a number in memory that the graph reads; what rarely does, such as a temperature, is a constant of the graph
and part of its key.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

HOME = "transformers.generation.logits_process"


class Rule:
    """A processor that needs no more than scores [rows, vocabulary].

    key: what the graph takes for granted. numbers: ints, or int64 tensors [texts], of this call. `prepare` is called
    once before all else.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    @property
    def key(self) -> Hashable:
        return tuple(sorted(vars(self.processor).items()))

    @property
    def numbers(self) -> tuple[int | Tensor, ...]:
        return ()

    def prepare(self, vocabulary: int, device: torch.device) -> None:
        """Make the constants of the graph."""

    def __call__(self, scores: Tensor, ids: Tensor, length: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        """ids: int64 [rows, tokens], of which `length`, an int64 without dimensions, are there. numbers: int64
        [rows, 1] each."""
        result: Tensor = self.processor(None, scores)
        return result


class OnTokens(Rule):
    """A rule for some tokens, `self.chosen`: bool [vocabulary]."""

    @property
    def tokens(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def key(self) -> Hashable:
        return self.tokens

    def prepare(self, vocabulary: int, device: torch.device) -> None:
        self.chosen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        inside = [token for token in self.tokens if token < vocabulary]
        self.chosen[torch.tensor(inside, dtype=torch.int64, device=device)] = True


class Suppressed(OnTokens):
    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.processor.suppress_tokens.tolist())

    def __call__(self, scores: Tensor, ids: Tensor, length: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        return scores.masked_fill(self.chosen, -float("inf"))


class SuppressedAtBegin(OnTokens):
    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.processor.begin_suppress_tokens.tolist())

    @property
    def numbers(self) -> tuple[int | Tensor, ...]:
        return (self.processor.begin_index,)

    def __call__(self, scores: Tensor, ids: Tensor, length: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        return scores.masked_fill(self.chosen & (length == numbers[0]), -float("inf"))


class NotYetTheEnd(OnTokens):
    """min_length and min_new_tokens"""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.processor.eos_token_id.tolist())

    @property
    def numbers(self) -> tuple[int | Tensor, ...]:
        of = self.processor
        least = of.min_length if hasattr(of, "min_length") else of.prompt_length_to_skip + of.min_new_tokens
        return (int(least),)

    def __call__(self, scores: Tensor, ids: Tensor, length: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        return scores.masked_fill(self.chosen & (length < numbers[0]), -float("inf"))


class ForcedEnd(OnTokens):
    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.processor.eos_token_id.flatten().tolist())

    @property
    def numbers(self) -> tuple[int | Tensor, ...]:
        return (int(self.processor.max_length) - 1,)

    def __call__(self, scores: Tensor, ids: Tensor, length: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        now = length == numbers[0]
        return scores.masked_fill(~self.chosen & now, -float("inf")).masked_fill(self.chosen & now, 0.0)


class OnlyAtFirst(Rule):
    """A forced first token follows a text of one token, so it is never chosen in a captured step."""

    @property
    def key(self) -> Hashable:
        return None

    def __call__(self, scores: Tensor, ids: Tensor, length: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        return scores


class RepetitionPenalty(Rule):
    @property
    def key(self) -> Hashable:
        return float(self.processor.penalty)

    @property
    def numbers(self) -> tuple[int | Tensor, ...]:
        ignored: int | Tensor | None = self.processor.prompt_ignore_length
        return (0 if ignored is None else ignored,)

    def __call__(self, scores: Tensor, ids: Tensor, length: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        vocabulary, penalty = scores.shape[-1], self.processor.penalty
        places = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
        counts = (places < length) & (places >= numbers[0])
        index = torch.where(counts, ids, vocabulary).clamp(max=vocabulary)  # the last column takes what does not count
        padded = torch.nn.functional.pad(scores, (0, 1))
        score = padded.gather(1, index)
        score = torch.where(score < 0, score * penalty, score / penalty)
        return padded.scatter(1, index, score)[:, :vocabulary]


class NoRepeatedNGram(Rule):
    @property
    def key(self) -> Hashable:
        return int(self.processor.ngram_size)

    def __call__(self, scores: Tensor, ids: Tensor, length: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        size, vocabulary = self.processor.ngram_size, scores.shape[-1]
        if ids.shape[1] < size:
            return scores
        last = last_tokens(ids, length, size - 1)
        windows = ids.unfold(1, size, 1)
        ends = torch.arange(size, ids.shape[1] + 1, dtype=torch.int64, device=ids.device)
        banned = (windows[..., :-1] == last[:, None]).all(-1) & (ends <= length)
        index = torch.where(banned, windows[..., -1].clamp(max=vocabulary), vocabulary)
        mask = torch.zeros((len(scores), vocabulary + 1), dtype=torch.bool, device=ids.device)
        return scores.masked_fill(mask.scatter_(1, index, True)[:, :vocabulary], -float("inf"))


class SequenceBias(Rule):
    """sequence_bias and bad_words_ids"""

    @property
    def key(self) -> Hashable:
        return tuple(self.processor.sequence_bias.items())

    def prepare(self, vocabulary: int, device: torch.device) -> None:
        self.alone = torch.zeros(vocabulary, dtype=torch.float32, device=device)
        longer: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for sequence, bias in self.processor.sequence_bias.items():
            if len(sequence) == 1:
                self.alone[sequence[0]] = bias
            else:
                longer.setdefault(len(sequence) - 1, []).append((sequence, bias))
        self.longer = [
            (
                torch.tensor([sequence[:-1] for sequence, _ in group], dtype=torch.int64, device=device),
                torch.tensor([sequence[-1] for sequence, _ in group], dtype=torch.int64, device=device),
                torch.tensor([bias for _, bias in group], dtype=torch.float32, device=device),
            )
            for group in longer.values()
        ]
        # Up to transformers 5.17 a text as long as what comes before the last token was too short to be looked at.
        self.more = 0 if hasattr(self.processor, "multi_token_biases") else 1

    def __call__(self, scores: Tensor, ids: Tensor, length: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        bias = torch.zeros_like(scores) + self.alone
        for starts, ends, biases in self.longer:
            size = starts.shape[1]
            matches = (last_tokens(ids, length, size)[:, None] == starts).all(-1) & (length >= size + self.more)
            bias.index_add_(1, ends, torch.where(matches, biases, 0.0))
        return scores + bias


def last_tokens(ids: Tensor, length: Tensor, count: int) -> Tensor:
    """The `count` tokens before `length`; the first one again where there are fewer."""
    index = length - count + torch.arange(count, dtype=torch.int64, device=ids.device)
    return ids.index_select(1, index.clamp(min=0))


RULES: dict[str, type[Rule]] = {
    "TemperatureLogitsWarper": Rule,
    "TopKLogitsWarper": Rule,
    "TopPLogitsWarper": Rule,
    "MinPLogitsWarper": Rule,
    "TypicalLogitsWarper": Rule,
    "EpsilonLogitsWarper": Rule,
    "InfNanRemoveLogitsProcessor": Rule,
    "LogitNormalization": Rule,
    "SuppressTokensLogitsProcessor": Suppressed,
    "SuppressTokensAtBeginLogitsProcessor": SuppressedAtBegin,
    "MinLengthLogitsProcessor": NotYetTheEnd,
    "MinNewTokensLengthLogitsProcessor": NotYetTheEnd,
    "ForcedBOSTokenLogitsProcessor": OnlyAtFirst,
    "ForcedEOSTokenLogitsProcessor": ForcedEnd,
    "RepetitionPenaltyLogitsProcessor": RepetitionPenalty,
    "NoRepeatNGramLogitsProcessor": NoRepeatedNGram,
    "SequenceBiasLogitsProcessor": SequenceBias,
    "NoBadWordsLogitsProcessor": SequenceBias,
}


def rules_of(processors: Iterable[Any]) -> list[Rule] | None:
    """A rule for each, in their order; None where one is not transformers' own, or not for a captured step."""
    rules = []
    for processor in processors:
        kind = type(processor)
        if kind.__module__ != HOME or kind.__name__ not in RULES:
            return None
        rules.append(RULES[kind.__name__](processor))
    return rules


class Numbers:
    """The numbers of all rules, in memory that a graph reads: int64 [rows, 1] each."""

    def __init__(self, rules: list[Rule], rows: int, device: torch.device) -> None:
        self.of = [tuple(torch.zeros((rows, 1), dtype=torch.int64, device=device) for _ in r.numbers) for r in rules]

    def fill(self, rules: list[Rule]) -> None:
        for rule, mine in zip(rules, self.of, strict=True):
            for number, tensor in zip(rule.numbers, mine, strict=True):
                if isinstance(number, Tensor):
                    tensor[: len(number), 0] = number.to(tensor.device)
                else:
                    tensor.fill_(number)
