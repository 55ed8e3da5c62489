"""Public paths of exceptions, for tracebacks and pickles: the modules that export them call `name_exceptions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def name_exceptions(module: str, exported: Mapping[str, Any]) -> None:
    """Give each exception class of this package in ``exported`` the public ``module`` as its ``__module__``.

    A traceback then shows the path that an ``except`` clause needs. ``module`` exports the same names, so that pickle
    finds the classes there. A class that has a public path already keeps it.
    """
    for found in exported.values():
        if isinstance(found, type) and issubclass(found, BaseException) and _is_private(found.__module__):
            found.__module__ = module


def _is_private(module: str) -> bool:
    package, *rest = module.split(".")
    return package == "monarch_backend" and any(part.startswith("_") for part in rest)
