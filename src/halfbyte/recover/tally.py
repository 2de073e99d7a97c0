"""What is known of one position: which tokens were tried, and how far the state of each was from the one wanted."""

from __future__ import annotations

import torch
from torch import Tensor


class Tally:
    """distances: fp32 [V], relative to the norm of the state wanted, infinite where a token was not tried."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.distances = torch.full((vocabulary,), torch.inf, dtype=torch.float32, device=device)
        self.tried = torch.zeros(vocabulary, dtype=torch.bool, device=device)

    def __len__(self) -> int:
        return int(self.tried.sum())

    def fresh(self, tokens: Tensor) -> Tensor:
        """Those of `tokens` that were not tried, each once, in their order."""
        places = torch.arange(len(tokens), dtype=torch.int64, device=tokens.device)
        first = tokens.new_full(self.tried.shape, len(tokens)).scatter_reduce_(0, tokens, places, "amin")
        return tokens[(first[tokens] == places) & ~self.tried[tokens]]

    def rest(self) -> Tensor:
        """All tokens that were not tried, in the vocabulary's order."""
        return (~self.tried).nonzero().view(-1)

    def add(self, tokens: Tensor, distances: Tensor) -> None:
        """A state that is not finite is no match: its distance counts as infinite."""
        self.distances[tokens] = distances.nan_to_num(nan=torch.inf)
        self.tried[tokens] = True

    def nearest(self) -> list[tuple[int, float]]:
        """The nearest token tried and the one after it, with their distances; the lower token first where equal."""
        # torch.topk promises no order among equals, and there may be equals: tokens of one embedding.
        count = min(2, len(self))
        found = []
        distances = self.distances
        for _ in range(count):
            token = int(distances.argmin())
            found.append((token, float(distances[token])))
            taken = torch.tensor([token], dtype=torch.int64, device=distances.device)
            distances = distances.index_fill(0, taken, torch.inf)
        return found

    def within(self, epsilon: float) -> list[int]:
        """Tokens tried whose distance is at most `epsilon`, nearest first."""
        tokens = (self.distances <= epsilon).nonzero().view(-1)
        return [int(token) for token in tokens[self.distances[tokens].argsort(stable=True)]]
