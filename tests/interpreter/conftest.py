"""Triton kernels on the CPU, in Triton's interpreter. It replaces the whole of Triton when that is imported, so these
tests have a process of their own: kernels/test_interpreted.py runs them with TRITON_INTERPRET=1, as anyone may."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _interpreter_is_faster() -> Iterator[None]:
    """It would patch Triton's language for every call of one function by another, which is half of its time; once a
    launch is enough. And sums of integers are not made a second time in 64 bits: they are small here."""
    if not IS_INTERPRETED:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    patch, at_work = interpreter._patch_lang, set[int]()

    def patch_once(function: Any) -> Any:
        modules = {id(each) for each in function.__globals__.values() if each in (language, language.core)}
        if modules <= at_work:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not at_work:  # a launch begins, and ends when this is restored

            def restore() -> None:
                at_work.clear()
                type(scope).restore(scope)

            scope.restore = restore
        at_work.update(modules)
        return scope

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", patch_once)
        patched.setattr(
            interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)
        )
        yield
