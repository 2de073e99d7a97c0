"""What recovery found, position by position, and what it could not tell."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["recovered", "ambiguous", "near miss", "no match", "not reached"]

STANDS_OUT = 0.5  # of the runner-up's distance: a nearest token below it is a near miss, above it no match


@dataclass(frozen=True)
class Position:
    """One position. All distances are ‖state - wanted‖ / ‖wanted‖, among the tokens that were tried.

    status: "recovered": one token lies within epsilon. "ambiguous": several do, and the search went on with the
        nearest. "near miss": none does, but the nearest stands out from all others, as with states of another
        precision, layer or model, or with noise. "no match": none does and none stands out. "not reached": an
        earlier position was not recovered, and this one depends on it.
    token: the nearest token within epsilon, or None: nothing else is ever claimed.
    nearest, distance: the nearest token and how far its state is. runner_up, runner_up_distance: the next.
    alternatives: the other tokens within epsilon. tried: tokens tried. seconds: by the wall clock.
    """

    status: Status
    token: int | None = None
    nearest: int | None = None
    distance: float | None = None
    runner_up: int | None = None
    runner_up_distance: float | None = None
    alternatives: tuple[int, ...] = ()
    tried: int = 0
    seconds: float = 0.0

    @property
    def margin(self) -> float | None:
        """How many times farther away the runner-up is; infinite at distance zero, None where there is none."""
        if self.distance is None or self.runner_up_distance is None:
            return None
        return self.runner_up_distance / self.distance if self.distance else float("inf")


@dataclass(frozen=True)
class Calibration:
    """epsilon: the largest relative distance that counts as equal. given: whether the caller chose it.

    noise: the largest distance seen between one token's state as the search computes it and as the whole model does.
    separation: the smallest distance seen between the states of two tokens at one position. Both None if not measured.
    """

    epsilon: float
    given: bool
    noise: float | None = None
    separation: float | None = None


@dataclass(frozen=True)
class Recovery:
    """tokens: what was claimed, from the first position on. positions: one for each state. calibration: what counted
    as equal. policy, layer, final_norm: as searched. vocabulary: how many tokens there are. seconds: of all positions.
    """

    tokens: tuple[int, ...]
    positions: tuple[Position, ...]
    calibration: Calibration
    policy: str
    layer: int
    final_norm: bool
    vocabulary: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every position has exactly one token within epsilon, of those tried."""
        return all(position.status == "recovered" for position in self.positions)

    @property
    def epsilon(self) -> float:
        return self.calibration.epsilon

    def text(self, tokenizer: Any) -> str:
        """The claimed tokens as text, by a tokenizer of transformers."""
        result: str = tokenizer.decode(list(self.tokens))
        return result

    def __str__(self) -> str:
        counts = Counter(position.status for position in self.positions)
        told = ", ".join(f"{count} {status}" for status, count in counts.items())
        tried = sum(position.tried for position in self.positions)
        reached = sum(position.status != "not reached" for position in self.positions)
        lines = [
            f"{len(self.positions)} positions: {told}; layer {self.layer}, policy {self.policy}, epsilon "
            f"{self.epsilon:.2g}, {tried / max(reached, 1):,.0f} of {self.vocabulary:,} tokens tried a position, "
            f"{self.seconds:.2f} s"
        ]
        for number, position in enumerate(self.positions):
            if position.status == "ambiguous":
                others = ", ".join(map(str, position.alternatives[:8]))
                lines.append(f"position {number}: ambiguous, {position.token} or {others}")
            elif position.status in ("near miss", "no match"):
                lines.append(
                    f"position {number}: {position.status}, nothing is claimed; nearest is token {position.nearest} at "
                    f"{_short(position.distance)}, {_times(position.distance, self.epsilon)} epsilon, then "
                    f"{position.runner_up} at {_short(position.runner_up_distance)}"
                )
        return "\n".join(lines)


def _short(distance: float | None) -> str:
    return "?" if distance is None else f"{distance:.2g}"


def _times(distance: float | None, epsilon: float) -> str:
    return "?" if distance is None else f"{distance / epsilon:,.3g} times" if epsilon else "more than"
