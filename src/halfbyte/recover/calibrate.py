"""epsilon: how far apart two states of one token may be, since they are computed in two ways.

The search computes one position of many candidates, and whoever recorded the states computed all positions of one
text. Roundings differ, by kernel and by batch. So tokens drawn at random, which are known, are computed both ways. The
largest difference seen is the noise, and the other candidates say how far apart the states of two tokens are. epsilon
is many times the noise, for another text may have more, but stays as far below the separation as it is above the noise.
Where there is no such room recovery cannot tell tokens apart, and says so.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from halfbyte.recover.blocks import Blocks
from halfbyte.recover.result import Calibration
from halfbyte.search import distances

LEAST, MOST = 4.0, 32.0  # times the noise that epsilon is
POSITIONS = 16  # at most; noise does not grow with the length of a text
UNSEEN = 0.5  # a difference that no rounding makes: the model computes positions in a way of its own


def relative(states: Tensor, wanted: Tensor) -> Tensor:
    """‖state - wanted‖ / ‖wanted‖ of states [C, D] and a state [D], fp32 [C]."""
    norm = torch.linalg.vector_norm(wanted.float()).clamp_min(1e-30)
    apart: Tensor = distances(wanted, states) / norm
    return apart


def calibrate(blocks: Blocks, length: int, batch: int, dtype: torch.dtype, generator: torch.Generator) -> Calibration:
    """Measure noise and separation over up to `length` positions of a random text, with `batch` candidates each.

    dtype: of the states that are wanted; epsilon is never below what it can hold. Raises ValueError where the two ways
    to compute a state do not agree at all, and warns where noise and separation are not far apart.
    """
    count = min(length, POSITIONS)
    tokens = _random_tokens(blocks, count, generator)
    whole = blocks.whole(tokens)
    noise, separation = 0.0, float("inf")
    blocks.reset()
    for position, wanted in enumerate(whole):
        others = _random_tokens(blocks, batch, generator)
        others[0] = tokens[position]
        apart = relative(blocks.states(others), wanted)
        noise = max(noise, float(apart[0]))
        different = apart[others != tokens[position]]
        if len(different):
            separation = min(separation, float(different.min()))
        blocks.append(0)
    blocks.reset()
    if not noise < UNSEEN:
        raise ValueError(
            f"one position of this model after its prefix comes out {noise:.2g} of its norm away from what the whole "
            "text gives; a model whose positions do not depend on tokens before them alone cannot be recovered from"
        )
    between = (noise * separation) ** 0.5 if separation < float("inf") else MOST * noise
    epsilon = max(LEAST * noise, min(MOST * noise, between), torch.finfo(dtype).eps)
    if 2 * epsilon > separation:
        warnings.warn(
            f"states of different tokens came as near as {separation:.2g} to each other, and epsilon is "
            f"{epsilon:.2g}: some tokens cannot be told apart; states of an earlier layer or in fp32 can be",
            stacklevel=4,
        )
    return Calibration(epsilon, False, noise, separation if separation < float("inf") else None)


def _random_tokens(blocks: Blocks, count: int, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that they are the same on every device."""
    tokens = torch.randint(blocks.vocabulary, (count,), generator=generator, dtype=torch.int64, device="cpu")
    return tokens.to(blocks.device)
