"""From one position to the next: propose, compute, accept, append."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from halfbyte.recover.blocks import Blocks
from halfbyte.recover.calibrate import relative
from halfbyte.recover.policies import POLICIES, Spread, Wanted
from halfbyte.recover.result import STANDS_OUT, Position, Status
from halfbyte.recover.tally import Tally
from halfbyte.search import nearest

TWINS = 8  # neighbours of an accepted token that are looked at, and tried where they are twins:
TWIN = 1e-2  # times the radius of all embeddings away, or nearer
SEEDS = 1_000_003  # from one position's seed to the next


@dataclass(frozen=True)
class Walk:
    """A search through one text.

    whole: try the whole vocabulary at each position. batch: candidates at once. padded: always that many.
    """

    blocks: Blocks
    policy: str
    whole: bool
    batch: int
    padded: bool
    seed: int

    def resume(self, tokens: Sequence[int]) -> None:
        """Stand behind tokens that were found before."""
        self.blocks.reset()
        for token in tokens:
            self._append(token, torch.empty(0, dtype=torch.float32, device="cpu"))

    def find(self, wanted: Tensor, number: int, epsilon: float) -> Position:
        """Search position `number` for the state [D], and step over its token if there is one."""
        start = time.perf_counter()
        blocks, tally = self.blocks, Tally(self.blocks.vocabulary, self.blocks.device)
        generator = torch.Generator().manual_seed(self.seed + SEEDS * (number + 1))
        policy = POLICIES[self.policy](Wanted(wanted, blocks, tally, self._spread, generator, self.batch))
        last = torch.empty(0, dtype=torch.int64, device="cpu")
        for last in self._batches(policy, tally):
            tally.add(last, relative(self._states(last), wanted))
            if not self.whole and (fitting := tally.within(epsilon)):
                twins = tally.fresh(self._twins(fitting[0]))
                if len(twins):
                    last = twins
                    tally.add(last, relative(self._states(last), wanted))
                break
        fitting = tally.within(epsilon)
        if fitting:
            self._append(fitting[0], last)
        first, second = [*tally.nearest(), (None, None), (None, None)][:2]
        return Position(
            _verdict(fitting, first[1], second[1]),
            fitting[0] if fitting else None,
            *first,
            *second,
            alternatives=tuple(fitting[1:]),
            tried=len(tally),
            seconds=time.perf_counter() - start,
        )

    @cached_property
    def _spread(self) -> Spread:
        return Spread.of(self.blocks.table)

    def _batches(self, policy: Iterable[Tensor], tally: Tally) -> Iterator[Tensor]:
        """What a policy proposes, and then all the rest, without repeats and `batch` at a time."""
        for proposals in policy:
            yield from _split(tally.fresh(proposals), self.batch)
        yield from _split(tally.rest(), self.batch)

    def _states(self, tokens: Tensor) -> Tensor:
        count = len(tokens)
        if self.padded:
            tokens = torch.cat((tokens, tokens[:1].expand(self.batch - count)))
        return self.blocks.states(tokens)[:count]

    def _append(self, token: int, last: Tensor) -> None:
        """Step over a token, which the last batch may have had."""
        places = (last == token).nonzero().view(-1)
        if not len(places):
            self._states(torch.tensor([token], dtype=torch.int64, device=self.blocks.device))
        self.blocks.append(int(places[0]) if len(places) else 0)

    def _twins(self, token: int) -> Tensor:
        """Tokens whose embeddings are those of `token`, or nearly: their states may be, too."""
        table = self.blocks.table
        distances, tokens = nearest(table[token], table, min(TWINS, len(table)))
        twins: Tensor = tokens[distances <= TWIN * self._spread.radius]
        return twins


def _split(tokens: Tensor, size: int) -> Iterator[Tensor]:
    if len(tokens):
        yield from tokens.split(size)


def _verdict(fitting: Sequence[int], distance: float | None, next_distance: float | None) -> Status:
    if fitting:
        return "recovered" if len(fitting) == 1 else "ambiguous"
    stands_out = distance is not None and next_distance is not None and distance < STANDS_OUT * next_distance
    return "near miss" if stands_out else "no match"
