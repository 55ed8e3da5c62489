"""Exceptions as bytes: with type, arguments, attributes, notes, causes, contexts and the members of groups.

Every exception can be sent. Each one of the chain is packed in the forms that, tried here, restore the same type and
text. The first form is its own pickle. The second is its parts, without its ``__init__``, and with text for values that
cannot be pickled. The receiver uses the first form that works there. Otherwise it makes a stand-in of the nearest base
that it can import, with the same name and text.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

from monarch_backend._core.package_folder import PACKAGE_FOLDER
from monarch_backend._serialization.pickling import DeserializationError, loads, try_dumps_in_band

_LONGEST = 200  # limit of causes and contexts that are sent, the nearest ones
_Group: Any = getattr(sys.modules["builtins"], "BaseExceptionGroup", ())  # none in Python 3.10
_Chain = traceback.TracebackException


class _Packed(NamedTuple):
    """One exception; the links are indices, -1 for none."""

    ways: list[bytes]  # pickles of the exception, or of arguments of `_rebuild`, to be tried in this order
    bases: list[bytes]  # the classes a stand-in may derive from, nearest first
    module: str
    name: str
    text: str
    notes: list[str]
    members: list[int]
    cause: int
    context: int
    suppress_context: bool


def pack_exception(exc: BaseException) -> bytes:
    """Return ``exc`` and its chain as bytes. It never fails. The traceback is not included: see `remote_traceback`.

    >>> error = unpack_exception(pack_exception(KeyError("rank")))
    >>> type(error), error.args
    (<class 'KeyError'>, ('rank',))
    """
    found = _reachable(exc, _LONGEST)
    index = {id(one): i for i, one in enumerate(found)}
    return pickle.dumps([_pack(one, index) for one in found], 5)


def unpack_exception(data: bytes) -> BaseException:
    """Return the exception in ``data``. Raises DeserializationError if `pack_exception` did not make it."""
    try:
        packed: list[_Packed] = pickle.loads(data)
        built: dict[int, BaseException] = {}
        for i, one in enumerate(packed):
            exc = _build(packed, i, built)
            exc.__cause__ = _build(packed, one.cause, built) if one.cause >= 0 else None
            exc.__context__ = _build(packed, one.context, built) if one.context >= 0 else None
            exc.__suppress_context__ = one.suppress_context
        return built[0]
    except Exception as error:
        raise DeserializationError(f"these {len(data)} bytes are no packed exception: {error!r}") from error


def remote_traceback(exc: BaseException) -> str:
    """Return the traceback of ``exc`` and its chain as Python prints it, without this package's frames at the top.

    >>> def work():
    ...     raise ValueError("no")
    >>> try:
    ...     work()
    ... except ValueError as error:
    ...     print(remote_traceback(error).splitlines()[-1])
    ValueError: no
    """
    whole = _Chain.from_exception(exc)
    for one in _reachable(whole, sys.maxsize):
        ours = 0
        while ours < len(one.stack) and os.path.abspath(one.stack[ours].filename).startswith(PACKAGE_FOLDER):
            ours += 1
        if ours < len(one.stack):  # raised by this package itself: then its frames are what there is to see
            del one.stack[:ours]
    return "".join(whole.format())


def _members(one: Any) -> list[Any]:
    return list(getattr(one, "exceptions", None) or ()) if isinstance(one, (_Group, _Chain)) else []


def _reachable(first: Any, most: int) -> list[Any]:
    """Return ``first`` and linked ones, nearest first: all members of groups, and links up to a number of ``most``."""
    found = [first]
    seen = {id(first)}
    for one in found:  # grows while it is walked
        links = (one.__cause__, one.__context__) if len(found) < most else ()
        for other in (*_members(one), *links):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                found.append(other)
    return found


def _pack(exc: BaseException, index: dict[int, int]) -> _Packed:
    members = _members(exc)
    text = _text(exc)
    return _Packed(
        ways=[way for way in _ways(exc, members) if _gives(way, exc, text, members)],
        bases=[data for data in map(try_dumps_in_band, _bases(type(exc))) if data is not None],
        module=type(exc).__module__,
        name=type(exc).__qualname__,
        text=text,
        notes=[note for note in getattr(exc, "__notes__", None) or () if isinstance(note, str)],
        members=[index[id(member)] for member in members],
        cause=-1 if exc.__cause__ is None else index.get(id(exc.__cause__), -1),
        context=-1 if exc.__context__ is None else index.get(id(exc.__context__), -1),
        suppress_context=exc.__suppress_context__,
    )


def _ways(exc: BaseException, members: list[BaseException]) -> Iterator[bytes]:
    """Yield the pickles that may restore ``exc``, best first. A member is not pickled with its group."""
    fields = {} if members else {name: _or_text(value) for name, value in _fields(exc)}
    attributes = {name: _or_text(value) for name, value in vars(exc).items()}
    args = (exc.message,) if members else tuple(map(_or_text, exc.args))  # type: ignore[attr-defined]
    parts = (type(exc), args, fields, attributes)
    ways = [parts] if members else [exc, parts]
    yield from (data for data in map(try_dumps_in_band, ways) if data is not None)


def _gives(way: bytes, exc: BaseException, text: str, members: list[BaseException]) -> bool:
    """Return whether this form restores an equal exception. A class with its own ``__reduce__`` is trusted."""
    try:
        made = _follow(way, members)
        kind = type(exc)
        own_way = isinstance(kind.__reduce__, FunctionType) or isinstance(kind.__reduce_ex__, FunctionType)
        return own_way or (type(made) is kind and _text(made) == text)
    except Exception:
        return False


def _follow(way: bytes, members: list[BaseException]) -> BaseException:
    made = loads(way, None)
    if isinstance(made, tuple):
        made = _rebuild(members, *made)
    if not isinstance(made, BaseException):
        raise TypeError(f"{made!r} is no exception")
    return made


def _rebuild(
    members: list[BaseException],
    kind: type[BaseException],
    args: tuple[Any, ...],
    fields: dict[str, Any],
    attributes: dict[str, Any],
) -> BaseException:
    args = (*args, members) if members else args
    exc = kind.__new__(kind, *args)  # its __init__ wants other arguments, or would change them again
    exc.args = args
    for name, value in fields.items():
        setattr(exc, name, value)
    vars(exc).update(attributes)
    return exc


def _fields(exc: BaseException) -> Iterator[tuple[str, Any]]:
    """Return the state that built-in bases keep outside of ``args`` and ``__dict__``: errno, filename, code and
    others.
    """
    for base in type(exc).__mro__:
        for name, member in vars(base).items():
            is_field = isinstance(member, (MemberDescriptorType, GetSetDescriptorType)) and not name.startswith("__")
            if is_field and name not in ("args", "characters_written") and getattr(exc, name, None) is not None:
                yield name, getattr(exc, name)


def _bases(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    """Return the possible bases of a stand-in, up to the nearest built-in one."""
    for base in kind.__mro__:
        if issubclass(base, BaseException) and base is not kind:
            yield base
            if base.__module__ == "builtins":
                return


def _build(packed: list[_Packed], i: int, built: dict[int, BaseException]) -> BaseException:
    if i not in built:
        one = packed[i]
        members = [_build(packed, member, built) for member in one.members]
        exc = _first(one, members)
        if one.notes and getattr(exc, "__notes__", None) != one.notes:
            exc.__notes__ = one.notes  # type: ignore[attr-defined] # Python 3.10 has no add_note
        built[i] = exc
    return built[i]


def _first(one: _Packed, members: list[BaseException]) -> BaseException:
    """Return the result of the first form that works here."""
    for way in one.ways:
        with contextlib.suppress(Exception):
            return _follow(way, members)
    for base in one.bases:
        with contextlib.suppress(Exception):
            return _stand_in(loads(base, None), one.module, one.name, one.text, members)
    return _stand_in(Exception, one.module, one.name, one.text, [])


class _StandIn:
    """Replacement of an exception whose class cannot be imported here: same name and text."""

    _base: type[BaseException]
    _text: str

    def __str__(self) -> str:
        return self._text

    def __reduce__(self) -> Any:
        kind = type(self)
        members = list(getattr(self, "exceptions", ()))
        return _stand_in, (self._base, kind.__module__, kind.__qualname__, self._text, members)


def _stand_in(
    base: type[BaseException], module: str, name: str, text: str, members: list[BaseException]
) -> BaseException:
    namespace = {"__module__": module, "__qualname__": name, "_base": base, "_text": text}
    kind: Any = type(name.rpartition(".")[2], (_StandIn, base), namespace)
    exc: BaseException = kind.__new__(kind, text, members) if members else kind.__new__(kind, text)
    if not members:
        exc.args = (text,)
    return exc


class _Text:
    """Replacement of a value that cannot be pickled, with the same repr."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _or_text(value: object) -> object:
    """Return ``value``, or its text if it cannot be pickled and unpickled."""
    data = try_dumps_in_band(value)
    if data is not None:
        with contextlib.suppress(Exception):
            loads(data, None)
            return value
    with contextlib.suppress(Exception):
        return _Text(repr(value))
    return _Text(f"<{type(value).__name__}>")


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except (Exception, SystemExit) as error:
        return f"<its text can't be made: {type(error).__name__}>"
