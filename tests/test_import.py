"""Imports point down; what `import halfbyte` and the quick commands cost; names looked up late are as good as any."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from importlinter.cli import lint_imports

import halfbyte as hb
from halfbyte import recover

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "numba", "triton", "transformers", "safetensors", "pydantic")
QUICK = (["--version"], ["--help"], ["explain", "0.347"], ["explain", "--help"], ["quantize", "--help"])


def fresh(code: str, *arguments: object) -> str:
    """What a new process prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_imports_point_down(capsys: pytest.CaptureFixture[str]) -> None:
    """The contracts in pyproject.toml, which `make lint` checks too."""
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0, capsys.readouterr().out


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_quick_commands_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, halfbyte.cli as cli\n"
        "try: cli.app(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    assert fresh(code, *arguments).splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", QUICK[:3], ids=" ".join)
def test_quick_commands_are_quick(arguments: list[str]) -> None:
    """0.2 to 0.3 s on an idle machine. One that is busy may take five times as long; with torch it would be more."""

    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "halfbyte", *arguments], capture_output=True, check=True)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 1.6


@pytest.mark.parametrize("module", [hb, recover], ids=lambda module: module.__name__)
def test_every_name_is_there(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    for name in names:
        found = getattr(module, name)
        assert vars(module)[name] is found  # so that the next access is that of any other global
        assert getattr(found, "__name__", name).endswith(name)
    assert set(names) <= set(dir(module))
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'"):
        _ = module.nothing  # type: ignore[attr-defined]
    assert "HalfbyteConfig" in dir(hb)


@pytest.mark.slow
def test_from_import_star() -> None:
    """It brings what __all__ says, and needs no transformers."""
    code = (
        "import sys\nfrom halfbyte import *\n"
        "print(len(quantize.__doc__) > 0, 'transformers' in sys.modules, nn.__name__)"
    )
    assert fresh(code) == "True False halfbyte.nn\n"


TOUCHES = {
    "torch first": "import torch, halfbyte",
    "torch later, then a name": "import halfbyte, torch; halfbyte.restore",
    "from halfbyte": "from halfbyte import dequantize",
    "nn": "import halfbyte.nn",
    "recover": "from halfbyte.recover import Recovery",
    "models": "from halfbyte.models.accelerate import accelerate",
}


@pytest.mark.slow
@pytest.mark.parametrize("touch", TOUCHES)
def test_operators_are_registered(touch: str) -> None:
    """By whatever public name a program comes to halfbyte, and with their gradients."""
    code = (
        f"{TOUCHES[touch]}\nimport torch\nfrom torch._C import _dispatch_has_kernel_for_dispatch_key as has\n"
        "print(torch.ops.halfbyte.linear.default.name(), has('halfbyte::linear', 'Autograd'))"
    )
    assert fresh(code) == "halfbyte::linear True\n"


@pytest.mark.slow
def test_first_access_inside_compile() -> None:
    code = (
        "import halfbyte, torch\n"
        "q = halfbyte.quantize(torch.randn(16, 64))\n"
        "f = torch.compile(lambda x: halfbyte.linear(x, q), backend='eager', fullgraph=True)\n"
        "x = torch.randn(2, 64)\n"
        "assert 'linear' not in vars(halfbyte)\n"
        "print(torch.equal(f(x), halfbyte.linear(x, q)))"
    )
    assert fresh(code) == "True\n"


@pytest.mark.slow
def test_an_exported_program_is_loaded(tmp_path: Path) -> None:
    """By a process that imports torch and halfbyte, and no more."""

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, q_packed: torch.Tensor, q_scale: torch.Tensor) -> torch.Tensor:
            q = hb.QuantizedWeight("nf4", q_packed, q_scale, (16, 64), torch.float32, 64)
            return hb.linear(x, q)

    q, x = hb.quantize(torch.randn(16, 64), nested=False), torch.randn(2, 64)
    torch.export.save(torch.export.export(Layer(), (x, q.packed, q.scale)), tmp_path / "layer.pt2")
    torch.save((x, q.packed, q.scale, hb.linear(x, q)), tmp_path / "tensors.pt")
    code = (
        "import sys, torch, halfbyte\n"
        "*inputs, result = torch.load(sys.argv[2])\n"
        "print(torch.equal(torch.export.load(sys.argv[1]).module()(*inputs), result))"
    )
    assert fresh(code, tmp_path / "layer.pt2", tmp_path / "tensors.pt") == "True\n"


def test_pickle() -> None:
    """By the names of where they are, from one process to another."""
    data = pickle.dumps((hb.quantize, hb.QuantizedWeight, hb.nn.Linear4bit, hb.accelerate))
    code = f"import pickle\nprint([found.__name__ for found in pickle.loads({data!r})])"
    assert fresh(code) == "['quantize', 'QuantizedWeight', 'Linear4bit', 'accelerate']\n"
