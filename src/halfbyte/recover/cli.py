"""`halfbyte recover`. What takes long to import is imported when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.options import Device, device_of

if TYPE_CHECKING:
    from torch import Tensor

    from halfbyte.recover.result import Recovery
    from halfbyte.terminal import Table

KEY = "hidden_states"  # of the tensor in a file of states
DTYPES = ("auto", "float16", "bfloat16", "float32")


def recover(
    model: Annotated[str, typer.Option(help="A folder with a causal LM, or a name on the Hugging Face hub.")],
    text: Annotated[str | None, typer.Option(help="Compute its states, forget it, recover it and compare.")] = None,
    states: Annotated[
        Path | None, typer.Option(help=f"A .safetensors, .pt or .npy file with {KEY} [T, D], in place of --text.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Index of the states; by default as the file says, or -1.")] = None,
    policy: Annotated[str, typer.Option(help="gradient or exhaustive.")] = "gradient",
    whole: Annotated[bool, typer.Option("--whole", help="Try the whole vocabulary at each position.")] = False,
    epsilon: Annotated[float | None, typer.Option(help="Largest relative distance; measured by default.")] = None,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="Of the model: auto, float16, bfloat16 or float32.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    save_states: Annotated[Path | None, typer.Option(help="Keep the states of --text as .safetensors.")] = None,
    state: Annotated[Path | None, typer.Option(help="Keep what was found here, and go on from it.")] = None,
) -> None:
    """Recover a prompt from its hidden states, token by token (SipIt, arXiv 2510.15511).

    Ends with 1 where a position was not recovered, or is not what --text said.
    """
    if (text is None) == (states is None):
        raise typer.BadParameter("give --text, or --states with the states of a text; one of them")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if save_states is not None and text is None:
        raise typer.BadParameter("--save-states keeps the states of --text; these are in a file already")
    import torch

    from halfbyte.recover.blocks import Blocks, device_of, evaluating
    from halfbyte.recover.search import layer_of, recover_tokens
    from halfbyte.terminal import console as terminal

    kept = None if states is None else _read(states)
    loaded, tokenizer = _load(model, device, dtype, needs_tokenizer=text is not None)
    truth, index = None, -1 if layer is None else layer
    if text is not None:
        truth = tokenizer(text, return_tensors="pt").input_ids[0]
        if not len(truth):
            raise ValueError("the text has no tokens, so there is nothing to recover; give a longer one")
        with torch.no_grad(), evaluating(loaded):
            wanted = Blocks(loaded, *layer_of(loaded, index), length=len(truth)).whole(truth)
        if save_states is not None:
            _save(save_states, wanted, index)
    elif kept is not None:
        wanted, index = kept[0].to(device_of(loaded)), kept[1] if layer is None else layer
    found = recover_tokens(
        loaded, wanted, index, policy=policy, epsilon=epsilon, whole=whole or None, seed=seed, state_file=state
    )
    console = terminal()
    console.print(table(found, tokenizer))
    console.print(str(found), highlight=False)
    if tokenizer is not None and found.tokens:
        console.print(f"text: {found.text(tokenizer)!r}", highlight=False)
    if truth is not None:
        same = found.tokens == tuple(truth.tolist())
        console.print(f"the same as --text: {'yes' if same else 'no'}", highlight=False)
        if not same:
            raise typer.Exit(1)
    if not found.ok:
        raise typer.Exit(1)


def table(found: Recovery, tokenizer: Any = None) -> Table:
    """A row a position: token, distances, how many were tried, milliseconds, status."""
    from halfbyte.terminal import Table

    result = Table()
    result.add_column("", justify="right")
    result.add_column("token")
    for name in ("distance", "next", "tried", "ms"):
        result.add_column(name, justify="right")
    result.add_column("")
    for number, position in enumerate(found.positions):
        piece = "" if position.token is None else str(position.token)
        if tokenizer is not None and position.token is not None:
            piece += f" {tokenizer.decode([position.token])!r}"
        distances = [
            "" if value is None else f"{value:.1e}" for value in (position.distance, position.runner_up_distance)
        ]
        reached = position.status != "not reached"
        result.add_row(
            str(number),
            piece,
            *distances,
            f"{position.tried:,}" if reached else "",
            f"{1e3 * position.seconds:.1f}" if reached else "",
            position.status,
        )
    return result


def _load(name: str, device: str | None, dtype: str, needs_tokenizer: bool) -> tuple[Any, Any]:
    """The model, accelerated if it is in 4 bits, and its tokenizer if it has one."""
    import torch

    from halfbyte.models.accelerate import accelerate

    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ImportError("recover needs transformers; pip install 'halfbyte[transformers]'") from error
    where = device_of(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        if needs_tokenizer:
            raise ValueError(f"{name} has no tokenizer that transformers can load ({error}); give --states") from error
        tokenizer = None
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype="auto" if dtype == "auto" else getattr(torch, dtype), device_map={"": where}
    ).eval()
    if getattr(model, "is_quantized", False):
        accelerate(model)
    return model, tokenizer


def _save(path: Path, states: Tensor, layer: int) -> None:
    from safetensors.torch import save_file

    from halfbyte.atomic import atomic_output

    with atomic_output(path, directory=False, overwrite=True) as output:
        save_file({KEY: states.contiguous().cpu()}, output, metadata={"layer": str(layer)})


def _read(path: Path) -> tuple[Tensor, int]:
    """The states of a file, and their layer: -1 where the file does not say."""
    import torch

    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    if path.suffix == ".npy":
        import numpy

        return torch.from_numpy(numpy.load(path, allow_pickle=False)), -1
    if path.suffix in (".pt", ".pth"):
        found = torch.load(path, map_location="cpu", weights_only=True)
        found = found.get(KEY) if isinstance(found, dict) else found
        if found is None:
            raise ValueError(f"{path} has no tensor {KEY!r}; save one with torch.save({{{KEY!r}: states}}, path)")
        return found, -1
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            if KEY not in file.keys():  # noqa: SIM118 - it is no mapping
                raise ValueError(f"{path} has no tensor {KEY!r} but {', '.join(file.keys()) or 'none'}")
            return file.get_tensor(KEY), int((file.metadata() or {}).get("layer", -1))
    except ValueError:
        raise
    except Exception as error:  # SafetensorError, which is no class of its own everywhere
        raise ValueError(f"{path} is not a .safetensors, .pt or .npy file of states ({error})") from error
