"""What the command line prints of a machine, of one number and of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.formats.spec import FORMATS
from halfbyte.terminal import Table, styled

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from halfbyte.checkpoints import Summary
    from halfbyte.explain import Explanation
    from halfbyte.info import Info


def info(console: Console, info: Info) -> None:
    """Devices, packages, and what to install."""
    console.print(
        styled((f"halfbyte {info.halfbyte}", "bold"), f"   Python {info.python}   {info.system}\n"), soft_wrap=True
    )
    devices = Table("device", "what it is", "kernels")
    for device in info.devices:
        note = (f"\n{device.note}" if device.note else "", "yellow")
        devices.add_row(device.name, styled(device.description, note), device.backend)
    console.print(devices)
    packages = Table("package", "version", "used for", "to get it")
    for package in info.packages:
        missing = package.version is None
        version = styled(("missing", "red" if package.required else "yellow")) if missing else package.version
        packages.add_row(package.name, version, package.purpose, package.install if missing else "")
    console.print(packages)
    if not info.missing:
        console.print("Nothing is missing.")


def explanation(console: Console, e: Explanation, *, assumed: bool) -> None:
    """The steps of one number. assumed: nested scale's tensor-wide numbers were made up, and that is said."""
    spec = FORMATS[e.format]
    line = console.print
    where = spec.size_name.partition("_")[0]
    line(
        styled(
            (f"{e.value:.7g}", "bold"), " as ", (e.format, "bold"),
            f", in a {where} whose largest magnitude is {e.absmax:.7g}\n",
        )
    )  # fmt: skip
    if spec.largest != 1:
        line(f"1  scale      {e.absmax:.7g} / {spec.largest:g} = {e.scale:.7g}")
    else:
        line(f"1  scale      absmax = {e.scale:.7g}, fp32, bytes {e.scale_bytes.hex(' ')}")
    line(_result(f"2  divide     {e.value:.7g} / {e.scale:.7g} = ", e.scaled))
    line("3  round      to the nearest value; between neighbours, the midpoint decides\n")
    table = Table("nibble", "bits", "value", "takes", "")
    for column in (0, 2):
        table.columns[column].justify = "right"
    near = range(max(0, e.chosen - 2), min(len(e.candidates), e.chosen + 3))
    for i in near:
        c = e.candidates[i]
        style, mark = ("bold green", f"<- {e.scaled:.7g}") if i == e.chosen else ("", "")
        table.add_row(
            f"{c.nibble}", f"{c.nibble:04b}", f"{c.value:.7g}", f"{c.low:.7g} to {c.high:.7g}", mark, style=style
        )
    line(table)
    line(f"4  store      nibble {e.nibble} = {e.nibble:04b}, {_placement(e)}")
    line(_result(f"5  read back  {e.code_value:.7g} x {e.scale:.7g} = ", e.result, f", {_error(e.error, e.value)}"))
    if e.nested:
        _nested(console, e, assumed)


def _nested(console: Console, e: Explanation, assumed: bool) -> None:
    n = e.nested
    assert n is not None
    line = console.print
    line(styled("\n", ("The scale, nested", "bold"), ": one byte instead of four (0.127 bits a weight instead of 0.5)"))
    line(styled(("offset and absmax2 are assumed; give --offset and --absmax2\n" if assumed else "", "dim")))
    line(f"6  centre     {e.absmax:.7g} - offset {n.offset:.7g} = {n.centred:.7g}")
    line(_result(f"7  divide     {n.centred:.7g} / absmax2 {n.absmax2:.7g} = ", n.scaled))
    line(f"8  round      nearest of 256 values: {n.code_value:.7g}, code {n.byte} = 0x{n.byte:02x} = {n.byte:08b}")
    line(_result(f"9  read back  {n.code_value:.7g} x {n.absmax2:.7g} + {n.offset:.7g} = absmax ", n.absmax))
    line(_result(f"10 the weight {e.code_value:.7g} x {n.absmax:.7g} = ", n.result, f", {_error(n.error, e.value)}"))


def _result(way: str, number: float, then: str = "") -> Text:
    return styled(way, (f"{number:.7g}", "bold"), then)


def _placement(e: Explanation) -> str:
    spec = FORMATS[e.format]
    if spec.words:
        bias = -int(spec.codebook[0])
        return f"{e.nibble} - {bias} = {e.nibble - bias}; eight share an int32, low bits first"
    return f"in byte 0x{e.nibble:x}? if first of a pair, 0x?{e.nibble:x} if second"


def _error(error: float, value: float) -> str:
    return f"error {error:+.3g}" + (f" ({100 * abs(error / value):.3g} %)" if value else "")


def summary(console: Console, summary: Summary) -> None:
    """A converted checkpoint: every layer, then the sizes."""
    measured = any(layer.relative_error is not None for layer in summary.layers)
    table = Table("layer", "shape", *(("error", "largest") if measured else ()), "MB")
    for column in table.columns[1:]:
        column.justify = "right"
    for layer in summary.layers:
        errors = (f"{layer.relative_error:.4f}", f"{layer.max_error:.2g}") if layer.relative_error is not None else ()
        table.add_row(
            layer.name.removesuffix(".weight"),
            "x".join(map(str, layer.shape)),
            *errors,
            f"{layer.bytes_after / 1e6:.2f}",
        )
    console.print(table)
    if measured:
        console.print("error: norm of the difference over norm of the weight; largest: of all weights\n")
    for name in summary.skipped:
        console.print(styled(("left as it was", "yellow"), f": {name}, whose K is no multiple of the group size"))
    if summary.experts:
        size = f"{_count(len(summary.experts), 'weight')} of experts, {_bytes(summary.experts_bytes)}"
        why = "transformers keeps the experts of a layer in one stack, which it does not load in 4 bits yet"
        console.print(styled(("left dense", "yellow"), f": {size}; {why}"), highlight=False)
    would, about = ("would be ", "about ") if summary.dry_run else ("", "")
    ratio = summary.bytes_before / max(summary.bytes_after, 1)
    change = f"{ratio:.2f} times smaller" if ratio >= 1 else f"{1 / ratio:.2f} times larger"
    console.print(
        styled(
            f"{_count(len(summary.layers), 'weight')} {would}converted, ",
            f"{_count(summary.copied, 'tensor')} {would}copied as before\n{_bytes(summary.bytes_before)} -> {about}",
            (_bytes(summary.bytes_after), "bold"),
            f", {change}",
        ),
        highlight=False,
    )
    if measured:
        worst = max(summary.layers, key=lambda layer: layer.relative_error or 0.0)
        console.print(
            f"largest error {worst.relative_error:.4f}, in {worst.name.removesuffix('.weight')}", highlight=False
        )
    if summary.dry_run:
        console.print(f"files: {', '.join(summary.files)}", highlight=False)
        console.print(f"nothing was written to {summary.destination}: --dry-run", soft_wrap=True, highlight=False)
    else:
        console.print(f"written to {summary.destination}", soft_wrap=True, highlight=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
