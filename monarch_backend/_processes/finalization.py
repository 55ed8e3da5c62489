"""Graceful end of a process: the steps of an interpreter's exit, for the user's code only.

Py_Finalize would tear down torch, too. Forked processes would then write to all memory that they share: the stop of 8
processes takes 1.1 s instead of 0.2 s. So only namespaces that were created after the fork are cleared.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import sys
import threading
import weakref
from pathlib import PurePath
from types import FunctionType, ModuleType, NoneType
from typing import Any

_preloaded: frozenset[str] = frozenset()
_is_over = False

_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def remember_preloaded() -> None:
    """Treat all packages that are imported so far as the runtime's: they are not torn down."""
    global _preloaded
    _preloaded = frozenset(name.partition(".")[0] for name in (*sys.modules, "torch")) - {"__main__"}
    # torch has one for each of its 134 libraries of operators. Their run at exit took 35 ms of each process.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


def skip() -> None:
    """Let this process end without these steps, as an abort does."""
    global _is_over
    _is_over = True


def finalize_user_code() -> None:
    """Join threads, run atexit hooks, clear the namespaces of the user's modules, flush files. Only the first call
    acts.

    Call it on the main thread. It takes as long as the user's threads and hooks take; the caller sets the limit.
    """
    global _is_over
    if _is_over:
        return
    _is_over = True
    for step in (threading._shutdown, atexit._run_exitfuncs, _clear_namespaces, _flush):  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            step()


def _clear_namespaces() -> None:
    threading.excepthook = lambda _: None  # daemon threads go on without their globals; an interpreter would stop them
    spaces = _user_namespaces()
    # The later a name is cleared, the longer a __del__ can use it. An object was often made from names before its own.
    for names_of in (_finalized, _objects, list):
        for space in spaces:
            for name in reversed(names_of(space)):
                if not name.startswith("__"):
                    space[name] = None
        if names_of is not _finalized:  # objects in reference cycles
            gc.collect()


_DEFINITIONS = (FunctionType, type, ModuleType)
_CONSTANTS = (str, bytes, int, float, complex, tuple, frozenset, PurePath, NoneType)


def _finalized(space: dict[str, Any]) -> list[str]:
    return [name for name, value in space.items() if hasattr(type(value), "__del__")]


def _objects(space: dict[str, Any]) -> list[str]:
    return [name for name, value in space.items() if not issubclass(type(value), (*_DEFINITIONS, *_CONSTANTS))]


def _user_namespaces() -> list[dict[str, Any]]:
    """Yield globals of the user's modules, the last imported first, and of functions that were pickled by value."""
    # The name first: it costs a copied page to touch a module that is shared with the fork server.
    modules = [
        vars(module) for name, module in sys.modules.items() if _is_user(name) and isinstance(module, ModuleType)
    ]
    found = {id(space): space for space in reversed(modules)}
    for function in gc.get_objects():
        # The globals of a by-value function are a copy of its module's names; those of generated code are not.
        if type(function) is FunctionType:
            space = function.__globals__
            if "__package__" in space and _is_user(str(space.get("__name__"))):
                found[id(space)] = space
    return list(found.values())


def _is_user(module: str) -> bool:
    package = module.partition(".")[0]
    return package not in _preloaded and package not in sys.stdlib_module_names


def _flush() -> None:
    files = [thing for thing in gc.get_objects() if issubclass(type(thing), _FILES)]  # isinstance could run user code
    for file in (*files, sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            file.flush()
