"""What the command line prints of a machine and of one number."""

from __future__ import annotations

from math import frexp
from typing import TYPE_CHECKING

from halfbyte.formats.spec import FORMATS
from halfbyte.terminal import Table, styled

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

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
    if spec.has_exponents:
        byte = frexp(e.scale)[1] + 126
        rule = f"2 ** (floor(log2({e.absmax:.7g})) - {spec.largest_exponent})"
        line(f"1  scale      {rule} = {e.scale:.7g}, byte {byte}")
    elif spec.largest != 1:
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
    first, second = f"0x{e.nibble:x}?", f"0x?{e.nibble:x}"
    if spec.low_first:
        first, second = second, first
    return f"in byte {first} if first of a pair, {second} if second"


def _error(error: float, value: float) -> str:
    return f"error {error:+.3g}" + (f" ({100 * abs(error / value):.3g} %)" if value else "")
