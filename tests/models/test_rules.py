"""Logits processors of a captured step give the scores of transformers' own, whatever lies behind the tokens so far."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfbyte.models.loop import choose
from halfbyte.models.rules import RULES, Numbers, rules_of

from .families import DEVICE

transformers = pytest.importorskip("transformers")
process = transformers.generation.logits_process

ROWS, TEXTS, ROOM, VOCABULARY = 4, 3, 24, 50
LENGTHS = (2, 3, 9, 10, ROOM)
ENDS = torch.tensor([7, 11], device=DEVICE)

PROCESSORS: dict[str, list[Callable[[], Any]]] = {
    "TemperatureLogitsWarper": [lambda: process.TemperatureLogitsWarper(0.7)],
    "TopKLogitsWarper": [lambda: process.TopKLogitsWarper(5), lambda: process.TopKLogitsWarper(500)],
    "TopPLogitsWarper": [lambda: process.TopPLogitsWarper(0.8)],
    "MinPLogitsWarper": [lambda: process.MinPLogitsWarper(0.1)],
    "TypicalLogitsWarper": [lambda: process.TypicalLogitsWarper(0.6)],
    "EpsilonLogitsWarper": [lambda: process.EpsilonLogitsWarper(0.01)],
    "InfNanRemoveLogitsProcessor": [process.InfNanRemoveLogitsProcessor],
    "LogitNormalization": [process.LogitNormalization],
    "SuppressTokensLogitsProcessor": [lambda: process.SuppressTokensLogitsProcessor([3, 8, 49, 60], device=DEVICE)],
    "SuppressTokensAtBeginLogitsProcessor": [
        lambda: process.SuppressTokensAtBeginLogitsProcessor([3, 8], 9, device=DEVICE)
    ],
    "MinLengthLogitsProcessor": [lambda: process.MinLengthLogitsProcessor(10, ENDS)],
    "MinNewTokensLengthLogitsProcessor": [lambda: process.MinNewTokensLengthLogitsProcessor(3, 7, ENDS)],
    "ForcedBOSTokenLogitsProcessor": [lambda: process.ForcedBOSTokenLogitsProcessor(4)],
    "ForcedEOSTokenLogitsProcessor": [lambda: process.ForcedEOSTokenLogitsProcessor(10, ENDS)],
    "RepetitionPenaltyLogitsProcessor": [
        lambda: process.RepetitionPenaltyLogitsProcessor(1.4),
        lambda: process.RepetitionPenaltyLogitsProcessor(0.6, prompt_ignore_length=2),
    ],
    "NoRepeatNGramLogitsProcessor": [
        *(lambda size=size: process.NoRepeatNGramLogitsProcessor(size) for size in (1, 2, 3, 5, 30)),
    ],
    "SequenceBiasLogitsProcessor": [
        lambda: process.SequenceBiasLogitsProcessor({(2,): 3.0, (1, 4): -2.0, (2, 4): 1.5, (0, 1, 2): 9.0})
    ],
    "NoBadWordsLogitsProcessor": [
        lambda: process.NoBadWordsLogitsProcessor([[2], [1, 4], [0, 1, 2], [1, 1, 1, 1, 3]], eos_token_id=ENDS)
    ],
}
CASES = [(name, number) for name, made in PROCESSORS.items() for number in range(len(made))]


def test_every_rule_is_here() -> None:
    assert set(PROCESSORS) == set(RULES)
    for name, made in PROCESSORS.items():
        assert type(made[0]()).__name__ == name


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("name", "number"), CASES)
def test_scores(name: str, number: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(5, (ROWS, ROOM), generator=generator).to(DEVICE)  # of few tokens, so that some repeat
    scores = (5 * torch.randn(ROWS, VOCABULARY, generator=generator)).to(DEVICE)
    scores[0, 3], scores[1, 5] = -torch.inf, -torch.inf
    processor = PROCESSORS[name][number]()
    right = processor(ids[:TEXTS, :length], scores[:TEXTS].clone())
    before = scores.clone()
    found = ruled(processor, ids, scores, length)
    assert torch.equal(scores, before)
    torch.testing.assert_close(found[:TEXTS], right, rtol=1e-6, atol=1e-6)
    assert found.shape == scores.shape


def ruled(processor: Any, ids: torch.Tensor, scores: torch.Tensor, length: int) -> torch.Tensor:
    rules = rules_of([processor])
    assert rules is not None
    assert hash(rules[0].key) == hash(rules[0].key)
    rules[0].prepare(scores.shape[1], DEVICE)
    numbers = Numbers(rules, len(ids), DEVICE)
    numbers.fill(rules)
    return rules[0](scores, ids, torch.tensor(length, device=DEVICE), numbers.of[0])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_penalty_that_ignores_the_padding_of_each_text(length: int) -> None:
    """As transformers asks for from 5.20 on. Tokens beyond the vocabulary do not count either."""
    try:
        processor = process.RepetitionPenaltyLogitsProcessor(1.4, prompt_ignore_length=torch.tensor([0, 2, 1]))
    except ValueError:
        pytest.skip("this version of transformers ignores as much of every text")
    ids = torch.randint(VOCABULARY + 9, (ROWS, ROOM), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scores = torch.randn(ROWS, VOCABULARY, device=DEVICE)
    found = ruled(processor, ids, scores, length)
    torch.testing.assert_close(found[:TEXTS], processor(ids[:TEXTS, :length], scores[:TEXTS]), rtol=1e-6, atol=1e-6)


def test_numbers_of_another_call_go_to_the_same_memory() -> None:
    first, second = (rules_of([process.MinNewTokensLengthLogitsProcessor(n, 4, ENDS)]) for n in (3, 6))
    assert first is not None
    assert second is not None
    assert first[0].key == second[0].key
    numbers = Numbers(first, ROWS, DEVICE)
    numbers.fill(first)
    kept = numbers.of[0][0]
    assert kept.unique().tolist() == [7]
    numbers.fill(second)
    assert kept.unique().tolist() == [10]


def test_what_is_not_transformers_own_has_no_rule() -> None:
    class TopKLogitsWarper(process.TopKLogitsWarper):  # type: ignore[misc,name-defined]
        pass

    assert rules_of([process.TopKLogitsWarper(3), TopKLogitsWarper(3)]) is None
    assert rules_of([process.PrefixConstrainedLogitsProcessor(lambda batch, ids: [1], 1)]) is None
    assert rules_of([]) == []


def test_a_sample_is_that_of_multinomial() -> None:
    scores = 3 * torch.randn(64, VOCABULARY, device=DEVICE)
    scores[scores < -1] = -torch.inf
    torch.manual_seed(3)
    right = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
    torch.manual_seed(3)
    tokens, broken = choose(scores, samples=True)
    assert torch.equal(tokens, right)
    assert broken is not None
    assert not broken.any()
    scores[5, 7], scores[6] = torch.nan, -torch.inf
    assert choose(scores, samples=True)[1].nonzero().flatten().tolist() == [5, 6]  # type: ignore[union-attr]
    assert torch.equal(choose(scores, samples=False)[0], scores.argmax(-1))
