"""Identity of the program's main module, so that children of workers can import it as the program's children do."""

from __future__ import annotations

import importlib.machinery
import multiprocessing.process
import os
import sys
import types


def main_module() -> tuple[str, str]:
    """Return name (of ``python -m``, else empty) and path (empty without a file) of the main module of this process."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None) or ""
    path = getattr(main, "__file__", None) or ""
    if path and not os.path.isabs(path):
        path = os.path.join(multiprocessing.process.ORIGINAL_DIR or os.getcwd(), path)  # type: ignore[attr-defined]
    return name, os.path.normpath(path) if path else ""


def empty_main_module(name: str, path: str) -> types.ModuleType:
    """Return a module ``__main__`` that runs nothing. `multiprocessing` reads from it what its children have to
    import.
    """
    made = types.ModuleType("__main__")
    if path:
        made.__file__ = path
    if name:
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=path or None)
        made.__package__ = made.__spec__.parent
    return made


def refuse_import_of_main() -> None:
    """Raise RuntimeError while a child of `multiprocessing` imports the main module, as `multiprocessing` does.

    A script that spawns processes when it is imported would do so again in each of its children.
    """
    process = multiprocessing.process.current_process()
    if getattr(process, "_inheriting", False):
        raise RuntimeError(
            f"process {process.name!r} (pid {os.getpid()}) imports the main module of its parent, and this spawns "
            "processes at import: each child would spawn them again. Put what the script runs under "
            "`if __name__ == '__main__':`"
        )
