"""`halfbyte bench engine`: tokens a second of vLLM's engine, with halfbyte and with what vLLM has itself.

Models are made of their sizes alone (engine_models.py). halfbyte and vLLM's own bitsandbytes get the same checkpoint of
NF4 weights, and their first tokens are compared before a time is given; the others draw their weights themselves. Each
engine runs in a process of its own (engine_process.py), as users run it, and is ended when its time is over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from halfbyte.bench.engine_models import DENSE_CONFIG, GROUP_SIZE, INT4_CONFIG, MODELS, NF4_WEIGHTS, Checkpoints
from halfbyte.bench.engine_process import Job
from halfbyte.bench.engine_report import COMPARED, TP2
from halfbyte.bench.engine_trace import TOKENS_A_STEP, tokens_of
from halfbyte.bench.servers import end, last_words
from halfbyte.measure import records
from halfbyte.measure.report import BASELINE, DENSE, OURS
from halfbyte.serving.claims import METHOD as HALFBYTE

METHOD = (
    "vLLM's engine, offline: so many requests at once, prompts of random tokens, greedy answers of one length; tokens "
    "of all answers over the time until the last is there"
)
REQUESTS = (1, 8, 32, 64, 256)
# vLLM's kernels for INT4 weights, by which it is told to use only one of them. Names that a release lacks do nothing.
KERNELS = (
    "CutlassW4A8LinearKernel", "MacheteLinearKernel", "AllSparkLinearKernel", "MarlinLinearKernel", "ConchLinearKernel",
    "ExllamaLinearKernel", "TritonW4A16LinearKernel", "HummingLinearKernel",
)  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True)
class Provider:
    """holds: of its checkpoint, what engine_models.py knows. arguments: of vllm.LLM. kernel: of KERNELS, the only one.
    plugins: of vLLM's."""

    holds: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kernel: str = ""
    plugins: str = "none"

    @property
    def gpus(self) -> int:
        return int(self.arguments.get("tensor_parallel_size", 1))


INT4_OPTIONS = {"quantization_config_dict_json": json.dumps({"format": "int4", "group_size": GROUP_SIZE})}
DUMMY = {"load_format": "dummy"}
# In the order in which they run: what others are compared with comes first.
PROVIDERS = {
    BASELINE: Provider(NF4_WEIGHTS),
    OURS: Provider(NF4_WEIGHTS, plugins=HALFBYTE),
    DENSE: Provider(DENSE_CONFIG, DUMMY),
    "marlin": Provider(INT4_CONFIG, DUMMY, "MarlinLinearKernel"),
    "machete": Provider(INT4_CONFIG, DUMMY, "MacheteLinearKernel"),
    f"{OURS}-int4": Provider(
        DENSE_CONFIG, DUMMY | {"quantization": HALFBYTE, "hf_overrides": INT4_OPTIONS}, plugins=HALFBYTE
    ),
    TP2: Provider(NF4_WEIGHTS, {"tensor_parallel_size": 2}, plugins=HALFBYTE),
}


@dataclass(frozen=True)
class Settings:
    """requests: at once, each number a cell. limit: seconds of an engine, from its start on. layers: of so many only, 0
    for all. nested: scales of the NF4 checkpoint. dtype: of activations. eager: no torch.compile, no CUDA graphs. logs:
    the folder for what engines say. trace: the file for the kernels of a few steps of the first number of requests."""

    requests: Sequence[int] = REQUESTS
    prompt_tokens: int = 128
    new_tokens: int = 128
    limit: float = 600.0
    layers: int = 0
    nested: bool = True
    dtype: str = "bfloat16"
    eager: bool = False
    logs: Path | None = None
    trace: Path | None = None

    @property
    def length(self) -> int:
        """Of a request, at most."""
        new = self.new_tokens
        if self.trace:
            new = max(new, tokens_of(self.requests[0], self.prompt_tokens))
        return self.prompt_tokens + new + 32

    def label(self, model: str) -> str:
        """What a record calls a model."""
        scales, how = "" if self.nested else "flat scales", "eager" if self.eager else ""
        return records.label(model, self.layers, scales, "" if self.dtype == Settings.dtype else self.dtype, how)


def by_default() -> list[str]:
    """The providers for whose engines this machine has the GPUs."""
    there = max(1, torch.cuda.device_count())
    return [name for name, provider in PROVIDERS.items() if provider.gpus <= there]


def check(names: Sequence[str], providers: Sequence[str], settings: Settings) -> None:
    """Raise ValueError for names that are none, and for a trace of several engines."""
    for kind, given, known in (("model", names, MODELS), ("provider", providers, tuple(PROVIDERS))):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"{kind} {unknown[0]!r} is none of {', '.join(known)}")
    if settings.trace and not len(names) == len(providers) == len(settings.requests) == 1:
        raise ValueError("a trace is of one model, one provider and one number of requests")


class Bench:
    """Engines, one after the other. first: how answers began, by model, provider and number of requests."""

    def __init__(self, checkpoints: Checkpoints, settings: Settings, say: Callable[[str], None]) -> None:
        self.checkpoints, self.settings, self.say = checkpoints, settings, say
        self.first: dict[tuple[str, str, int], list[list[int]]] = {}

    def rows(self, model: str, provider: str) -> Iterator[Row]:
        """One for each number of requests; for what could not be measured one that says why."""
        settings = self.settings
        facts: Row = {
            "model": settings.label(model), "layers": self.checkpoints.sizes(model).config.num_hidden_layers,
            "provider": provider, "prompt_tokens": settings.prompt_tokens, "new_tokens": settings.new_tokens,
        }  # fmt: skip
        self.say(f"{model}: {provider}")
        after = ""
        try:
            for told in self._told(model, provider):
                if "requests" not in told:
                    facts |= told
                    if error := _not_ours(provider, told["methods"]):
                        yield facts | {"error": error}
                        return
                    continue
                requests = told["requests"]
                self.first[model, provider, requests] = told.pop("first")
                compared = self._compared(model, provider, requests)
                if "error" in compared:  # and so no time is given, nor any taken
                    yield facts | {"requests": requests} | compared
                    return
                self.say(f"{requests} requests: {told['tokens_per_s']:,.1f} tokens/s")
                yield facts | told | compared
                after = f"; measured up to {requests} at once"
        except TimeoutError as error:
            yield facts | {"left_out": f"{error}{after}"}
        except (RuntimeError, OSError) as error:
            yield facts | {"error" if provider.startswith(OURS) else "left_out": str(error)}

    def _told(self, model: str, provider: str) -> Iterator[Row]:
        """What the process of one engine says, as it says it."""
        path = self.checkpoints.get(model, PROVIDERS[provider].holds)
        folder, name = path.parent, f"{model}-{provider}"
        told, job = folder / f"{name}.told", folder / f"{name}.job"
        told.touch()
        arguments = self._arguments(model, provider) | {"model": path.name}
        trace = str(self.settings.trace.resolve()) if self.settings.trace else ""
        facts = Job(
            arguments, self.checkpoints.sizes(model).config.vocab_size, self.settings.requests,
            self.settings.prompt_tokens, self.settings.new_tokens, str(told), trace,
        )  # fmt: skip
        job.write_text(json.dumps(asdict(facts)), encoding="utf-8")
        code = "import sys; from halfbyte.bench.engine_process import run; run(sys.argv[1])"
        log = (self.settings.logs or folder).resolve() / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = environment(provider, in_process=bool(trace))
        return lines_of([sys.executable, "-c", code, str(job)], variables, folder, told, log, self.settings.limit)

    def _arguments(self, model: str, provider: str) -> dict[str, Any]:
        """Of vllm.LLM: a text model without its texts, greedy, no prompt cached from call to call."""
        settings, most = self.settings, max(self.settings.requests)
        arguments: dict[str, Any] = {
            "skip_tokenizer_init": True, "generation_config": "vllm", "dtype": settings.dtype,
            "seed": 0, "max_model_len": settings.length, "max_num_seqs": most, "enable_prefix_caching": False,
            "max_num_batched_tokens": max(TOKENS_A_STEP, settings.length), "disable_log_stats": True,
            "enforce_eager": settings.eager, "worker_extension_cls": "halfbyte.bench.engine_worker.EngineFacts",
        }  # fmt: skip
        if torch.cuda.is_available():
            config = self.checkpoints.sizes(model).config
            heads, size = config.num_key_value_heads, config.head_dim
            token = 2 * getattr(torch, settings.dtype).itemsize * config.num_hidden_layers * heads * size
            # All requests at once, and a tenth more: without it vLLM runs the largest batch first, to see what is left.
            arguments["kv_cache_memory_bytes"] = int(1.1 * most * settings.length * token) + (64 << 20)
            if not settings.eager:
                arguments["compilation_config"] = {"cudagraph_capture_sizes": sorted(set(settings.requests))}
        return {**arguments, **PROVIDERS[provider].arguments}

    def _compared(self, model: str, provider: str, requests: int) -> Row:
        """same_first: the share of answers that begin as the baseline's do; where both are there.

        In 16 bits two tokens that are nearly as likely may change places, and all that follow are others. That most
        answers begin with another token is no such chance: then there is an error.
        """
        theirs = self.first.get((model, COMPARED.get(provider, ""), requests))
        if theirs is None:
            return {}
        pairs = list(zip(self.first[model, provider, requests], theirs, strict=True))
        if 2 * sum(a[0] != b[0] for a, b in pairs) > len(pairs):
            return {"error": f"most answers begin with another token than those of {COMPARED[provider]}"}
        return {"same_first": round(sum(a == b for a, b in pairs) / len(pairs), 4)}


def _not_ours(provider: str, methods: Mapping[str, Any]) -> str:
    """An error where halfbyte is to multiply and does not, else "". vLLM's bitsandbytes loads the same checkpoint, and
    would be timed under our name."""
    if PROVIDERS[provider].plugins != HALFBYTE or any(name.startswith("Halfbyte") for name in methods):
        return ""
    return (
        f"vLLM multiplies by {', '.join(methods)}, for it has not loaded halfbyte's plugin; it finds plugins of"
        " installed packages only, so where halfbyte merely lies on the path, pip install it"
    )


def environment(provider: str, in_process: bool = False) -> dict[str, str]:
    """The variables of an engine's process. What the user has set stays, except what makes a provider what it is.

    Nothing is fetched, and no use is reported. DeepGEMM and FlashInfer's sampler are off by default: vLLM fails where
    it finds one of them and not the compiler that it needs, and no linear layer of these models calls them. The driver
    may keep more of what it compiles than its 1 GB, so that engines after the first start sooner. Of a process that a
    signal ends, Python tells which signal that was.
    """
    asked = {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false", "VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "CUDA_CACHE_MAXSIZE": str(4 << 30), "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    fixed = {"VLLM_PLUGINS": PROVIDERS[provider].plugins}
    if kernel := PROVIDERS[provider].kernel:
        fixed["VLLM_DISABLED_KERNELS"] = ",".join(name for name in KERNELS if name != kernel)
    if in_process:
        fixed["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if paths := os.environ.get("PYTHONPATH"):  # the process has another current folder
        fixed["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
    return asked | dict(os.environ) | fixed


def lines_of(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, told: Path, log: Path, limit: float
) -> Iterator[Row]:
    """The lines of JSON that a process adds to `told`, as they come. folder: its current one. log: for its output.

    Raises TimeoutError where it is over its limit, in seconds, and RuntimeError with its last words where it fails. In
    any case it has ended afterwards, and all that it started.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=dict(variables), cwd=folder, stdout=output, stderr=output, start_new_session=True
        )
    ends, rest = time.monotonic() + limit, ""
    try:
        with told.open(encoding="utf-8") as lines:
            while True:
                is_over = process.poll() is not None  # asked first, so that nothing that it told is missed
                *whole, rest = (rest + lines.read()).split("\n")
                yield from map(json.loads, whole)
                if is_over:
                    break
                if time.monotonic() > ends:
                    raise TimeoutError(f"it was over its limit of {limit:,.0f} s")
                time.sleep(0.2)
    finally:
        end(process)
    if process.returncode != 0:
        raise RuntimeError(last_words(log))
