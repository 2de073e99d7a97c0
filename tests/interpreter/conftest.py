"""Triton kernels on the CPU, in Triton's interpreter. It replaces the whole of Triton when that is imported, so these
tests have a process of their own: kernels/test_interpreted.py runs them with TRITON_INTERPRET=1, as anyone may."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from halfbyte import eager
from halfbyte.kernels.common import slow

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _interpreter_is_faster() -> Iterator[None]:
    """It would patch Triton's language for every call of one function by another, which is half of its time; once a
    launch is enough. Sums of integers are not made a second time in 64 bits: they are small here. And numpy's dtype is
    not looked up in a table that is made anew each time."""
    if not IS_INTERPRETED:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    patch, at_work = interpreter._patch_lang, set[int]()

    @cache
    def modules_of(function: Any) -> set[int]:
        return {id(each) for each in function.__globals__.values() if each in (language, language.core)}

    def patch_once(function: Any) -> Any:
        modules = modules_of(function)
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

    look_up, found = interpreter._get_np_dtype, dict[str, Any]()

    def looked_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", patch_once)
        patched.setattr(interpreter, "_get_np_dtype", looked_up)
        patched.setattr(
            interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)
        )
        yield


@pytest.fixture(autouse=True, scope="session")
def _plain_torch_is_the_reference() -> Iterator[None]:
    """The definition itself is what kernels are compared with here, and each process compiles nothing with numba."""
    if not IS_INTERPRETED:
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slow, "has_numba", lambda: False)
        patched.setattr(slow, "_told", {*slow._told, "kernels for cpu"})
        slow.no_kernels.cache_clear()
        eager.backend.cache_clear()
        yield
        slow.no_kernels.cache_clear()
        eager.backend.cache_clear()
