"""The base class of the package's exceptions, and the decorator that gives them their public path."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def public(module: str) -> Callable[[type[E]], type[E]]:
    """Set ``module``, a public module that exports the decorated exception, as its ``__module__``.

    A traceback then shows the path that an ``except`` clause needs, and pickle finds the class there.
    """

    def name(kind: type[E]) -> type[E]:
        kind.__module__ = module
        return kind

    return name


@public("monarch_backend")
class MonarchError(Exception):
    """Base class of the exceptions of monarch_backend. Most of them derive from a built-in exception, too.

    It is never raised itself. The only exception without this base is `monarch_backend.actor.CancelledError`, which
    ``except Exception`` must not catch.

    >>> from monarch_backend.errors import CancelledError, JobError, MonarchError
    >>> issubclass(JobError, MonarchError), issubclass(CancelledError, MonarchError)
    (True, False)
    """


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class if it has none.

    >>> first_line(ValueError("wrong\\nand more")), first_line(ValueError())
    ('wrong', 'ValueError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]
