"""Main function of a forked rank, which becomes ``python -u script args`` or ``python -u -m module args``.

It runs in ranks only. _processes/child_bootstrap.py has set the environment, the directory, argv and the standard files
before.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import multiprocessing.process
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Collection, Sequence
from types import CodeType
from typing import Any, TextIO, cast

from monarch_backend import _autoload

__all__ = ["run"]


def run(words: Sequence[str], handled: Collection[int] = ()) -> None:
    """Act as the interpreter that was given ``words``: "-u", a script or "-m" and a module, then their arguments.

    ``handled`` are the signals that the launcher handles. As after execve, they have their default action here. All
    others stay as inherited: a shell ignores SIGINT for the commands that it starts with ``&``.
    """
    __tracebackhide__ = True
    sys.orig_argv[:] = [sys.executable, *words]
    # Libraries check whether multiprocessing has started their process; it has not started this one.
    multiprocessing.process.current_process().name = "MainProcess"
    for number in handled:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _unbuffer()
    _autoload.take_names()  # torch was imported in the launcher, perhaps without MONARCH_AS
    if words[1] == "-m":
        _run_module(words[2])
    else:
        _run_script(words[1])


def _unbuffer() -> None:
    """Do what -u does, as far as a running interpreter can; sys.flags.unbuffered stays 0."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        old: TextIO | None = getattr(sys, name)
        if old is None:
            continue
        raw = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115 # for the life of the process
        new = io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, newline="\n", write_through=True)
        vars(new)["mode"] = "w"  # as CPython does
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _first_on_path(entry: str) -> None:
    """Insert the entry unless the environment forbids it, which a new interpreter would obey."""
    if not (hasattr(sys.flags, "safe_path") and os.environ.get("PYTHONSAFEPATH")):
        sys.path.insert(0, entry)


def _run_module(name: str) -> None:
    __tracebackhide__ = True
    _first_on_path(os.getcwd())
    sys.argv[0] = "-m"  # until it is found
    _run_module_as_main(name, True)


def _run_script(path: str) -> None:
    __tracebackhide__ = True
    if pkgutil.get_importer(path) is not None:  # a directory or an archive with a __main__.py
        sys.path.insert(0, path)
        _run_module_as_main("__main__", False)
        return
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    exec(_code(path), _main_namespace(path))


def _run_module_as_main(name: str, alter_argv: bool) -> None:
    """Run a module as the interpreter does for -m, directories and archives."""
    __tracebackhide__ = True
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _code(path: str) -> CodeType:
    __tracebackhide__ = True
    whole = os.path.abspath(path)
    try:
        with io.open_code(whole) as file:
            if path.endswith(".pyc") and (code := pkgutil.read_code(file)) is not None:
                return cast(CodeType, code)
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {whole!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    return compile(source, whole, "exec", dont_inherit=True)


def _main_namespace(path: str) -> dict[str, Any]:
    whole = os.path.abspath(path)
    namespace = vars(sys.modules["__main__"])
    loader = importlib.machinery.SourceFileLoader("__main__", whole)
    namespace |= {"__builtins__": builtins, "__cached__": None, "__file__": whole, "__loader__": loader}
    return namespace
