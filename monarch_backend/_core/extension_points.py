"""Registry of functions that higher layers add to lower ones. `_wiring.py` provides most of them by name.

A lower layer asks for an extension by its name, and so imports nothing from a higher layer. The module of an extension
is imported at its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_loaders: dict[str, Callable[[], Any]] = {}


def provide(name: str, load: Callable[[], Any]) -> None:
    """Make ``extension(name)`` return the result of ``load()``."""
    _loaders[name] = load


def has_extension(name: str) -> bool:
    return name in _loaders


def extension(name: str) -> Any:
    """Return the extension of this name. Raises LookupError where `_wiring.py` has not been imported."""
    try:
        load = _loaders[name]
    except KeyError:
        raise LookupError(f"nothing provides {name!r}: import one of the public modules of monarch_backend") from None
    return load()
