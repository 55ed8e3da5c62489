"""Search for the part of an object that cannot be pickled. It runs only after a failure, so it may be slow, but is
bounded.

It takes objects apart and names the path to a part. It pickles nothing itself.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

_DEEPEST = 50
_TRIES = 20_000  # parts that are tried before the answer is the best one so far

_MACHINERY = ("__dict__", "__weakref__", "__slots__", "_abc_impl")  # of a class

_Part = tuple[str, Any]  # what to write behind the path of the whole; the part


def find(obj: object, error: Exception, trouble: Callable[[object], Exception | None]) -> tuple[str, object, Exception]:
    """The path to the innermost part that fails alone, the part, and its error.

    ``error`` is the whole object's; ``trouble(part)`` pickles a part and returns what it raised. The path starts with
    "args" and "kwargs" where ``obj`` is the arguments of a call, a tuple and a dict, else with "the object".

    >>> import pickle, threading
    >>> def trouble(part):
    ...     try:
    ...         pickle.dumps(part)
    ...     except Exception as error:
    ...         return error
    >>> arguments = ((1, {"lock": threading.Lock()}), {})
    >>> find(arguments, TypeError(), trouble)[0]
    "args[1]['lock']"
    """
    is_call = type(obj) is tuple and [type(member) for member in obj] == [tuple, dict]
    path = "" if is_call else "the object"
    parts: Iterable[_Part] = zip(("args", "kwargs"), obj, strict=True) if is_call else _parts(obj)  # type: ignore[call-overload]
    tries = itertools.count()
    for _ in range(_DEEPEST):
        failing = ((step, part, trouble(part)) for step, part in parts if next(tries) < _TRIES)
        try:
            step, part, failed = next((found for found in failing if found[2] is not None), ("", None, None))
        except Exception:  # an object that can't even be looked into
            break
        if failed is None:
            break
        path, obj, error = path + step, part, failed
        parts = _parts(obj)
    return path or "the arguments", obj, error


def article(kind: type) -> str:
    """Return a type's name with its article: ``"a _thread.lock"``, ``"an int"``.

    >>> article(int), article(Iterator)
    ('an int', 'a collections.abc.Iterator')
    """
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _parts(whole: Any) -> Iterator[_Part]:
    """Yield the contents of ``whole``'s pickle; nothing where they are not known."""
    if isinstance(whole, tuple) and hasattr(whole, "_fields"):
        yield from ((f".{name}", value) for name, value in zip(whole._fields, whole, strict=False))
    elif isinstance(whole, (tuple, list)) and type(whole) in (tuple, list):
        yield from ((f"[{i}]", value) for i, value in enumerate(whole))
    elif type(whole) is dict:
        yield from ((f"[{_short(key)}]", value) for key, value in whole.items())
        yield from ((f" key {_short(key)}", key) for key in whole)
    elif type(whole) in (set, frozenset):
        yield from ((f" member {_short(value)}", value) for value in whole)
    elif isinstance(whole, FunctionType):
        yield from _parts_of_function(whole)
    elif isinstance(whole, MethodType):
        yield from ((".__self__", whole.__self__), (".__func__", whole.__func__))
    elif isinstance(whole, type):
        yield from ((f".{name}", value) for name, value in vars(whole).items() if name not in _MACHINERY)
    else:
        yield from _parts_of_reduced(whole)


def _parts_of_function(function: FunctionType) -> Iterator[_Part]:
    """Yield the variables that are pickled with a function by value."""
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # an empty cell
        return
    yield from ((f" closure variable {name!r}", value) for name, value in variables.nonlocals.items())
    yield from ((f" global variable {name!r}", value) for name, value in variables.globals.items())
    yield from ((f" default {value!r}", value) for value in function.__defaults__ or ())
    yield from ((f".{name}", value) for name, value in vars(function).items())


def _parts_of_reduced(whole: Any) -> Iterator[_Part]:
    """Yield the parts that the object returns from ``__reduce_ex__``."""
    try:
        reduced = whole.__reduce_ex__(5)
    except Exception:
        return  # its own doing: the object is the culprit
    if not isinstance(reduced, tuple):
        return
    function, arguments, state, members, items = (*reduced, None, None, None)[:5]
    for attributes in state if isinstance(state, tuple) else (state,):
        if isinstance(attributes, dict):
            yield from ((f".{name}", value) for name, value in attributes.items())
        else:
            yield " state", attributes
    yield from ((f"[{i}]", value) for i, value in enumerate(members or ()))
    yield from ((f"[{_short(key)}]", value) for key, value in items or ())
    yield " constructor", function
    yield from ((f" argument {i} of its constructor", value) for i, value in enumerate(arguments))


def _short(key: object) -> str:
    try:
        text = repr(key)
    except Exception:
        text = f"<{type(key).__name__}>"
    return text if len(text) <= 40 else text[:37] + "..."
