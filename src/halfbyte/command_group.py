"""How `halfbyte` behaves as a command, whatever the subcommand: errors in one line, exit codes, a quick start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup


class Group(TyperGroup):
    """Turns every error that is the user's to mend into one line and an exit code."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except (KeyboardInterrupt, typer.Abort):
            _fail("interrupted", 130)
        except (ValueError, TypeError, ImportError, MemoryError) as error:
            _fail(str(error) or type(error).__name__, 1)
        except OSError as error:
            _fail(": ".join(filter(None, (error.strerror or str(error), error.filename))), 1)
        except Exception as error:
            if hasattr(error, "format_message"):  # click's own: a wrong option, a missing argument
                _fail(error.format_message(), getattr(error, "exit_code", 2))
            if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
                _fail(f"out of GPU memory ({str(error).partition('. ')[0]}); try --device cpu", 1)
            raise
        if code == 130:
            _fail("interrupted", 130)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code

    def get_params(self, ctx: Any) -> Any:
        return _without_pydantic(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_pydantic(command.get_params(ctx))
        return command


def _fail(message: str, code: int) -> NoReturn:
    print(f"halfbyte: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _without_pydantic(parameters: Any) -> Any:
    """Have plain values converted without pydantic, whose import supports typer longer than all the rest.

    Whatever is not plain, or wrong, goes typer's own way, so that nothing but the time differs. A typer that knows no
    pydantic is left as it is.
    """
    for parameter in parameters:
        if hasattr(parameter, "get_runtime_param") and "get_runtime_param" not in vars(parameter):
            parameter.get_runtime_param = partial(_Plain, parameter.get_runtime_param, parameter.type_descriptor)
    return parameters


@dataclass(frozen=True)
class _Plain:
    """What converts the values of a parameter. theirs: makes typer's own converter. descriptor: of the parameter."""

    theirs: Callable[[], Any]
    descriptor: Any

    def coerce(self, value: Any, *, param: Any, ctx: Any) -> Any:
        kind = self.descriptor.annotation
        if not (param.multiple or param.nargs != 1 or self.descriptor.is_ranged or self.descriptor.is_path):
            if value is None or (kind in (str, float) and type(value) is kind):
                return value
            if kind is float and value.replace(".", "", 1).removeprefix("-").isdecimal():
                return float(value)
            if isinstance(kind, type) and issubclass(kind, Enum) and value in [member.value for member in kind]:
                return kind(value)
        try:
            return self.theirs().coerce(value, param=param, ctx=ctx)
        except typer.BadParameter as error:
            if str(value) not in error.message:  # pydantic says what is accepted, and not what was given
                error.message = f"{value!r}: {error.message}"
            raise
