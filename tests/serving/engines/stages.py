"""The stages of a pipeline, built and loaded by vLLM one after the other: python stages.py JOB.json RESULT.json

vLLM's CPU build cannot run a pipeline, but its models ask a group which stage they are, and here the answers are ours.
A job has the arguments of vLLM's engine for some models, and how many stages there are. The result has, for each model,
of the whole and then of each stage, the layers that a quantization method was asked for, those that are left out, and a
digest of each parameter.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main(job: dict[str, Any], folder: Path) -> list[list[dict[str, Any]]]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs

    torch.accelerator.empty_cache = lambda: None  # as vLLM has it where there is no accelerator
    found, kept = [], []  # vLLM remembers by the address of a model what it has left out of it
    for engine in job["engines"]:
        config = EngineArgs(**engine).create_engine_config()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                parallel_state.init_distributed_environment(1, 0, f"file://{folder / 'rendezvous'}", 0, "gloo")
                parallel_state.ensure_model_parallel_initialized(1, 1)
            found.append([])
            for rank, stages in [(0, 1), *((rank, job["stages"]) for rank in range(job["stages"]))]:
                stage, model = stage_of(config, rank, stages)
                found[-1].append(stage)
                kept.append(model)
    return found


def stage_of(config: Any, rank: int, stages: int) -> tuple[dict[str, Any], Any]:
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models.utils import PPMissingLayer

    parallel_state._PP = SimpleNamespace(
        rank_in_group=rank, world_size=stages, is_first_rank=rank == 0, is_last_rank=rank == stages - 1
    )
    config.compilation_config.static_forward_context.clear()  # each stage is a process of its own
    asked, method = [], type(config.quant_config).get_quant_method

    def recorded(self: Any, layer: Any, prefix: str) -> Any:
        asked.append((prefix, type(layer).__name__))
        return method(self, layer, prefix)

    type(config.quant_config).get_quant_method = recorded
    try:
        model = get_model(vllm_config=config)
    finally:
        type(config.quant_config).get_quant_method = method
    found = {
        "asked": asked,
        "left out": [name for name, module in model.named_modules() if isinstance(module, PPMissingLayer)],
        "digests": {
            name: hashlib.sha256(parameter.data.contiguous().view(-1).numpy().tobytes()).hexdigest()
            for name, parameter in model.named_parameters()
        },
    }
    return found, model


if __name__ == "__main__":
    done = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]).parent)
    Path(sys.argv[2]).write_text(json.dumps(done), encoding="utf-8")
