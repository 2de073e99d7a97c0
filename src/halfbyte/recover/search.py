"""recover_tokens: the prompt back from its hidden states (SipIt, arXiv 2510.15511)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats.weight import FLOAT_DTYPES
from halfbyte.recover.blocks import Blocks, depth_of, device_of, evaluating
from halfbyte.recover.calibrate import calibrate
from halfbyte.recover.policies import POLICIES
from halfbyte.recover.result import Calibration, Position, Recovery
from halfbyte.recover.state import State, fingerprint
from halfbyte.recover.walk import Walk

BYTES = 1 << 21  # of a batch of states, about: enough rows to keep a device busy


def recover_tokens(
    model: Any,
    hidden_states: Tensor,
    layer: int = -1,
    *,
    policy: str = "gradient",
    final_norm: bool | None = None,
    epsilon: float | None = None,
    whole: bool | None = None,
    batch_size: int | None = None,
    batch_invariant: bool = False,
    graphs: bool | None = None,
    seed: int = 0,
    state_file: str | Path | None = None,
    progress: bool | None = None,
) -> Recovery:
    """Find the tokens whose hidden states these are, one position after the other.

    model: a causal LM of transformers whose attention can be chosen (Llama, Mistral, Qwen, Gemma, Phi, GPT-2, ...),
        dense or in 4 bits, accelerated or not. It is put back as it was, training mode included.
    hidden_states: [T, D] or [1, T, D], fp16, bf16 or fp32, on the device of the model's embeddings: the states of the
        text's first T tokens, as `output_hidden_states=True` gives them. fewer tokens are a shorter text.
    layer: their index in `hidden_states`, which is the number of blocks before them; 0 are the embeddings, and a
        negative one counts from the last.
    policy: "gradient" tries tokens near a continuous embedding that descends towards the state, and what is left if
        none fits; "exhaustive" tries all, in the vocabulary's order.
    final_norm: whether the model's final norm came after the blocks. By default as transformers has it: after the
        last block and no other.
    epsilon: the largest ‖state - wanted‖ / ‖wanted‖ that counts as equal; by default measured on the model.
    whole: try the whole vocabulary at each position, so that a second token within epsilon is always found. By default
        for "exhaustive" only; "gradient" stops at a token that fits, having tried its neighbours and its twins.
    batch_size: candidates at once.
    batch_invariant: always that many, the last batch filled up, so that a token's state has the same bits whatever it
        is tried with; CUDA graphs do so in any case. In an accelerated model the products with 4-bit weights then do
        not depend on `batch_size` either.
    graphs: replay CUDA graphs; by default on a GPU.
    seed: of what is drawn at random: texts for epsilon, restarts.
    state_file: where to keep what was found, after each position; a file that is there is gone on from.
    progress: a bar on stderr; by default where that is a terminal.

    Returns a Recovery; a position that has no token within epsilon ends it, since later ones depend on it. Raises
    ValueError or TypeError for arguments that do not fit.
    """
    index, normed = layer_of(model, layer, final_norm)
    states = _check_states(hidden_states, device_of(model))
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; there are {' and '.join(map(repr, POLICIES))}")
    if epsilon is not None and not epsilon >= 0:
        raise ValueError(f"epsilon is {epsilon}; it is a distance relative to the state's norm, such as 0.01")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it takes 1 or more candidates")
    with torch.inference_mode(False), torch.no_grad(), evaluating(model):
        on_gpu = states.device.type == "cuda"
        blocks = Blocks(model, index, normed, len(states), on_gpu if graphs is None else graphs, batch_invariant)
        _check_fit(states, blocks)
        batch = min(batch_size or _batch_size(blocks), blocks.vocabulary)
        whole = policy == "exhaustive" if whole is None else whole
        padded = batch_invariant or blocks.graphs
        walk = Walk(blocks, policy, whole, batch, padded, seed)
        state = None
        if state_file is not None:
            options = {
                "layer": index, "normed": normed, "policy": policy, "epsilon": epsilon, "whole": whole,
                "batch": batch, "padded": padded, "batch_invariant": batch_invariant, "seed": seed,
            }  # fmt: skip
            state = State(state_file, fingerprint(blocks.shell, states, options))
        kept = state.load() if state else None
        calibration, positions = kept or (_calibration(walk, states, epsilon), [])
        walk.resume([position.token for position in positions if position.token is not None])
        with _bar(len(states), progress) as step:
            for number, wanted in enumerate(states):
                if number >= len(positions):
                    lost = bool(positions) and positions[-1].token is None
                    found = Position("not reached") if lost else walk.find(wanted, number, calibration.epsilon)
                    positions.append(found)
                    if state is not None:
                        state.save(calibration, positions)
                step(positions[number])
    return Recovery(
        tokens=tuple(position.token for position in positions if position.token is not None),
        positions=tuple(positions),
        calibration=calibration,
        policy=policy,
        layer=index,
        final_norm=normed,
        vocabulary=blocks.vocabulary,
        seconds=sum(position.seconds for position in positions),
    )


def layer_of(model: Any, layer: int, final_norm: bool | None = None) -> tuple[int, bool]:
    """The number of blocks, and whether the final norm comes after them."""
    depth = depth_of(model)
    if not isinstance(layer, int) or not -depth - 1 <= layer <= depth:
        raise ValueError(
            f"layer is {layer!r}; this model has {depth} blocks, so its states have the indices 0 (the embeddings) to "
            f"{depth}, or {-depth - 1} to -1"
        )
    index = layer % (depth + 1)
    return index, index == depth if final_norm is None else final_norm


def _check_states(states: Tensor, device: torch.device) -> Tensor:
    """The states as [T, D]."""
    if not isinstance(states, Tensor):
        raise TypeError(
            f"hidden_states is a {type(states).__name__}; recovery takes one tensor [T, D], such as "
            "model(ids, output_hidden_states=True).hidden_states[layer]"
        )
    if states.dtype not in FLOAT_DTYPES:
        raise TypeError(f"hidden_states has dtype {states.dtype}; it takes float16, bfloat16 or float32")
    given = list(states.shape)
    if states.dim() == 3 and len(states) == 1:
        states = states[0]
    if states.dim() != 2 or 0 in states.shape:
        raise ValueError(
            f"hidden_states has shape {given}; recovery takes [T, D] or [1, T, D], one text at a time and at least one "
            "token long"
        )
    if states.device != device:
        raise ValueError(
            f"hidden_states is on {states.device} and the model on {device}; pass hidden_states.to({str(device)!r})"
        )
    finite = states.isfinite().all(-1)
    if not finite.all():
        raise ValueError(f"hidden_states is not finite at position {int((~finite).nonzero()[0])}; pass what is before")
    return states.detach()


def _calibration(walk: Walk, states: Tensor, epsilon: float | None) -> Calibration:
    if epsilon is not None:
        return Calibration(epsilon, True)
    generator = torch.Generator().manual_seed(walk.seed)
    return calibrate(walk.blocks, len(states), walk.batch, states.dtype, generator)


def _check_fit(states: Tensor, blocks: Blocks) -> None:
    width = blocks.whole(torch.zeros(1, dtype=torch.int64, device="cpu")).shape[-1]
    if states.shape[1] != width:
        raise ValueError(
            f"hidden_states has {states.shape[1]} numbers a position; this model's states have {width}: pass them "
            "whole, and with the model that they are of"
        )


def _batch_size(blocks: Blocks) -> int:
    """Rows of 2 MB at 16 bits: 256 for a hidden size of 4096, and a few on a CPU, where rows are not free."""
    if blocks.device.type == "cpu":
        return 64
    return min(max(1 << (BYTES // (2 * blocks.table.shape[1])).bit_length() - 1, 64), 1024)


@contextmanager
def _bar(total: int, wanted: bool | None) -> Iterator[Callable[[Position], None]]:
    from halfbyte.terminal import progress

    with progress(wanted) as bar:
        task = bar.add_task("", total=total)

        def step(position: Position) -> None:
            told = position.status if position.token is None else f"token {position.token}"
            bar.update(task, advance=1, description=f"{told}, {position.tried} tried")

        yield step
