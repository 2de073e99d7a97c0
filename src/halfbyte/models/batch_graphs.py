"""Batches of continuous batching with prompts in them run on a CUDA graph once it pays.

transformers captures every batch whose size it has not seen, and each size twice where it prepares one batch while
another is computed. A batch of decoding requests is padded to a power of two, so there are few sizes and each comes
again. One with prompts is padded to 64 tokens: a server whose prompts have many lengths would capture, 100 ms and more
each time, what saves a third of that when it comes again. So such a size is computed as it is until it has come often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch

TIMES = 3  # that a size is computed without a graph: what these lose is about what a capture costs


def capture_once_it_pays(manager: Any) -> None:
    """For all steps of a manager of transformers', which makes its runner of steps later. Neither is held in a circle
    of references: with them go the graphs and the cache, most of a GPU's memory."""
    manager._create_batch_processor = partial(_create_batch_processor, ref(manager))


def _create_batch_processor(of: ref[Any]) -> Any:
    manager: Any = of()  # alive, as it calls this
    processor = type(manager)._create_batch_processor(manager)
    runner = getattr(processor, "model_runner", None)
    if runner is not None and hasattr(type(runner), "_capture_graph"):
        runner._capture_graph = partial(_capture_graph, ref(runner), Counter())
    return processor


def _capture_graph(
    of: ref[Any], seen: Counter[Any], forward: Callable[..., None], stream: Any, *arguments: Any
) -> None:
    """Instead of a runner's own, which computes a batch, captures it, and keeps the graph for its size."""
    runner: Any = of()
    ahead = runner.inputs_and_outputs
    size = _size_of(ahead)
    seen[size] += 1
    if ahead.use_block_table or size is None or seen[size] > TIMES:
        type(runner)._capture_graph(runner, forward, stream, *arguments)
        return
    with torch.cuda.stream(stream):
        forward(*arguments)


def _size_of(inputs: Any) -> Any:
    """Of the batch that is to be computed, and which of the two it is; None if this transformers does not say it."""
    pairs = getattr(inputs, "io_pairs", None)
    device = inputs if pairs is None else pairs[inputs.current_pair].device_io
    key = getattr(device, "_get_graph_key", None)
    return None if key is None else (id(device), key())
