"""What `accelerate` says of a whole model: what is 4-bit and which kernel serves it, what stayed dense, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from halfbyte.models.experts import facts_of

PATHS = 3  # that a line names
MEND = "accelerate(model, experts='nf4') quantizes them here, HalfbyteConfig while a model loads"
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Report:
    """What `accelerate` did, and what the model is made of.

    modules: paths of those that halfbyte computes now. skipped: path to the reason why a 4-bit module was left alone.
    generation: how `generate` decodes from now on; where there are several models, which of them go on as before, and
    why. packed_bytes: of all 4-bit weights, scales included, whoever computes them. dense: everything else, what it is
    and why it is not 4-bit to its bytes. kernels: of each of `modules` what multiplies one row of x. rounded: paths of
    the experts that this call has quantized in place, and the bytes that their dense weights took; rounded_to: the
    format that they have since then.
    """

    modules: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    generation: str = ""
    packed_bytes: int = 0
    dense: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    kernels: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    rounded: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    rounded_to: str | None = None

    def __str__(self) -> str:
        lines = [f"halfbyte computes {len(self.modules)} of {len(self.modules) + len(self.skipped)} 4-bit modules"]
        counts = Counter(self.kernels.values())
        lines += table([(str(count), kernel) for kernel, count in counts.most_common()])
        if self.rounded:
            lines.append(
                f"{len(self.rounded)} modules of dense experts ({size(sum(self.rounded.values()))}) were quantized to "
                f"{self.rounded_to}: only loading the model again brings their weights back"
            )
        if self.skipped:
            lines += ["left as they were", *table(told(self.skipped))]
        if self.packed_bytes or self.dense:
            lines.append(f"4-bit weights take {size(self.packed_bytes)}, all else {size(sum(self.dense.values()))}")
        largest = sorted(self.dense.items(), key=lambda item: -item[1])
        lines += table([(size(nbytes), reason) for reason, nbytes in largest])
        return "\n".join([*lines, f"generate decodes {self.generation}"])


def table(rows: list[tuple[str, str]]) -> list[str]:
    """Lines of two columns, the first one flush right."""
    width = max((len(first) for first, _ in rows), default=0)
    return [f"  {first:>{width}}  {second}" for first, second in rows]


def told(skipped: Mapping[str, str]) -> list[tuple[str, str]]:
    """(how many, reason and a few paths), the most common reason first."""
    paths: dict[str, list[str]] = {}
    for path, reason in skipped.items():
        paths.setdefault(reason, []).append(path or "the model itself")
    return [
        (str(len(those)), f"{reason}: {', '.join(those[:PATHS])}{', ...' if len(those) > PATHS else ''}")
        for reason, those in sorted(paths.items(), key=lambda item: -len(item[1]))
    ]


def size(nbytes: int) -> str:
    """Three digits of decimal units: "4.21 GB"."""
    number = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5 or unit == "GB":
            break
        number /= 1000
    return f"{nbytes} B" if unit == "B" else f"{number:.{max(0, 3 - len(str(int(number))))}f} {unit}"


def weigh(model: nn.Module, stored: Callable[[nn.Module], tuple[Tensor, ...]]) -> tuple[int, dict[str, int]]:
    """Bytes of all 4-bit weights, and of everything else by what it is; a tensor that is shared counts once.

    stored: the tensors of a module's 4-bit weight, or none.
    """
    seen: set[int] = set()
    packed = 0
    for module in model.modules():
        for tensor in stored(module):
            packed += 0 if id(tensor) in seen else tensor.nbytes
            seen.add(id(tensor))
    heads = set(map(id, _heads(model)))
    dense: Counter[str] = Counter()
    experts: dict[str, tuple[list[nn.Module], Counter[str]]] = {}
    for path, module in model.named_modules():
        for name, tensor in _tensors(module):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if tensor.dim() == 3 and tensor.is_floating_point() and not isinstance(module, nn.modules.conv._ConvNd):
                modules, counts = experts.setdefault(type(module).__name__, ([], Counter()))
                if module not in modules:
                    modules.append(module)
                counts.update({"weights": 1, "bytes": tensor.nbytes})
            else:
                dense[_kind(path, module, name, tensor, heads)] += tensor.nbytes
    for kind, (modules, counts) in experts.items():
        whose = f"{len(modules)} {kind} keep {counts['weights']} 3-D parameters"
        facts = facts_of(modules[0])
        mend = f"halfbyte cannot compute them: {facts}" if isinstance(facts, str) else MEND
        dense[f"experts are dense: {whose}, which bitsandbytes does not quantize; {mend}"] = counts["bytes"]
    return packed, dict(dense)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for own in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in own.items() if tensor is not None)


def _heads(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        with suppress(AttributeError, NotImplementedError):
            yield module.get_output_embeddings()  # type: ignore[operator]


def _kind(path: str, module: nn.Module, name: str, tensor: Tensor, heads: set[int]) -> str:
    """What a tensor is, and why it is dense where that is not plain."""
    kind = type(module).__name__
    if "lora_" in path:
        return "adapters"
    if name in module._buffers:
        return "buffers"
    if not tensor.is_floating_point():
        return f"weights in another format ({kind})"
    if name.endswith("bias"):
        return "biases"
    if isinstance(module, nn.Embedding) or "Embedding" in kind:
        return "embeddings"
    if id(module) in heads:
        return "output layer, which is not loaded in 4 bits"
    if "Norm" in kind or tensor.dim() < 2:
        return "norms and other vectors"
    if isinstance(module, nn.Linear) or kind == "Conv1D":
        return "linear layers that were not loaded in 4 bits"
    return f"other weights ({kind})"
