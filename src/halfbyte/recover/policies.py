"""Which tokens to try, in which order: the two policies of SipIt (arXiv 2510.15511), made for batches.

A policy is a generator of proposals, int64 [n], for one position. Between two of them it looks at the tally, and so
knows what came of the last. Tokens that were tried are dropped by the search, and when a policy ends, the search tries
what is left: no policy misses a token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.recover.blocks import Blocks
from halfbyte.recover.tally import Tally
from halfbyte.search import nearest

LENGTHS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # of the steps that are tried at once, in units of the last one's
RESTARTS = 2  # rows beside them: embeddings of tokens whose states came nearest, or of any
ROWS = len(LENGTHS) + RESTARTS
STEPS = 16  # at most; then what is left is tried
NEIGHBOURS = 128  # of a row, the most that `nearest` gives
LEAST_GAIN = 0.999  # of a step, times the distance before it
SHORTER = 0.25  # after a step without gain
SAMPLE = 4096  # embeddings that stand for all where their spread is measured


class Wanted(NamedTuple):
    """A state [D] to find a token for, and what there is to find it with."""

    state: Tensor
    blocks: Blocks
    tally: Tally
    spread: Spread
    generator: torch.Generator
    batch: int  # the most candidates that are tried at once


class Spread(NamedTuple):
    """Of the embeddings of a vocabulary: their mean [E], their mean norm, their root mean square distance from the
    mean."""

    mean: Tensor
    norm: float
    radius: float

    @classmethod
    def of(cls, table: Tensor) -> Spread:
        sample = table[:: -(-len(table) // SAMPLE)].float()
        mean = sample.mean(0)
        radius = (sample - mean).square().sum(-1).mean().sqrt()
        return cls(mean, float(sample.norm(dim=-1).mean()), float(radius.clamp_min(1e-30)))


def exhaustive(wanted: Wanted) -> Iterator[Tensor]:
    """Every token, in the vocabulary's order."""
    yield torch.arange(wanted.blocks.vocabulary, dtype=torch.int64, device=wanted.blocks.device)


def gradient(wanted: Wanted) -> Iterator[Tensor]:
    """Tokens near a continuous embedding that goes down the gradient of its state's squared distance.

    A row of the model's matrices is read once for all embeddings, so several are pulled at the price of one: steps of
    several lengths along one direction, conjugate to the last one, and tokens to start anew from. What is nearest to
    e - η·g has the smallest distance in a model of first order, if all directions are bent alike by 1/η.
    """
    blocks, tally, spread = wanted.blocks, wanted.tally, wanted.spread
    rows = _starts(wanted)
    yield tally.fresh(_neighbours(rows[:2], wanted))[: wanted.batch]
    lengths = torch.tensor(LENGTHS, dtype=torch.float32, device=blocks.device)[:, None]
    used: set[int] = set()
    length, distance = spread.radius, float("inf")
    here = slope = direction = rows[0]
    for _ in range(STEPS):
        distances, slopes = blocks.pull(rows, wanted.state)
        slopes = slopes * distances[:, None]  # of one scale again, so that rows can be compared
        best = int(distances.nan_to_num(nan=torch.inf).argmin())
        if float(distances[best]) < LEAST_GAIN * distance:
            went_on = distance < float("inf") and best < len(LENGTHS)
            steeper = -slopes[best]
            if went_on:  # Polak and Ribière's conjugate direction
                share = torch.dot(slopes[best], slopes[best] - slope) / slope.square().sum().clamp_min(1e-30)
                steeper = steeper + share.clamp_min(0) * direction
            length = length * LENGTHS[best] if went_on else spread.radius
            length = min(max(length, 0.01 * spread.radius), 8 * spread.radius)
            here, slope, direction, distance = rows[best].clone(), slopes[best].clone(), steeper, float(distances[best])
        else:
            length, direction = SHORTER * length, -slope
        steps = here + length * lengths * direction / direction.norm().clamp_min(1e-30)
        proposals = tally.fresh(_neighbours(steps, wanted))[: wanted.batch]
        if len(proposals):
            yield proposals
        else:  # every neighbour was tried: somewhere else, then
            distance = float("inf")
            steps = blocks.table[_any_tokens(len(LENGTHS), wanted)].float()
        rows = torch.cat((steps, blocks.table[_restarts(used, wanted)].float()))


POLICIES: Mapping[str, Callable[[Wanted], Iterator[Tensor]]] = {"gradient": gradient, "exhaustive": exhaustive}


def _starts(wanted: Wanted) -> Tensor:
    """Where the descent begins, fp32 [ROWS, E]: the mean embedding; the state itself at the size of an embedding,
    since the residual stream began as one; and embeddings of any tokens."""
    state, spread = wanted.state.float(), wanted.spread
    rows = [spread.mean]
    if state.shape == spread.mean.shape:
        rows.append(state * (spread.norm / state.norm().clamp_min(1e-30)))
    others = wanted.blocks.table[_any_tokens(ROWS - len(rows), wanted)].float()
    return torch.cat((torch.stack(rows), others))


def _neighbours(rows: Tensor, wanted: Wanted) -> Tensor:
    """Tokens by the distance of their embeddings to rows [R, E]: the nearest of each row, then the next of each."""
    table = wanted.blocks.table
    _, tokens = nearest(rows.to(table.dtype), table, min(NEIGHBOURS, len(table)))
    ranked: Tensor = tokens.T.reshape(-1)
    return ranked


def _restarts(used: set[int], wanted: Wanted) -> Tensor:
    """Tokens whose states came nearest and whose embeddings the descent has not seen, [RESTARTS]."""
    ranked = wanted.tally.distances.topk(min(len(used) + RESTARTS, wanted.blocks.vocabulary), largest=False).indices
    tokens = [token for token in ranked.tolist() if token not in used][:RESTARTS]
    used.update(tokens)
    missing = _any_tokens(RESTARTS - len(tokens), wanted)
    return torch.cat((torch.tensor(tokens, dtype=torch.int64, device=missing.device), missing))


def _any_tokens(count: int, wanted: Wanted) -> Tensor:
    tokens = torch.randint(
        wanted.blocks.vocabulary, (count,), generator=wanted.generator, dtype=torch.int64, device="cpu"
    )
    return tokens.to(wanted.blocks.device)
