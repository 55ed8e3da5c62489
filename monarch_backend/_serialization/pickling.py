"""Serialization of objects: pickle protocol 5, with large buffers beside the pickle.

This module decides how an object is pickled. Tensors and arrays have their own modules (`tensors`, `ndarrays`), which
are imported only once the process has torch or NumPy. It does no framing and uses no sockets or shared memory.

Objects are pickled as Python does it, with these exceptions.

- Functions and classes that the receiver can import go by name. Those of ``__main__``, of a notebook, nested ones,
  lambdas and modules registered with ``cloudpickle.register_pickle_by_value`` go by value, through cloudpickle.
- Code that goes by value keeps the name of its file, which cloudpickle leaves out.
- Buffers of at least `OUT_OF_BAND` bytes are passed on without a copy, beside the pickle.
- ``bytes`` objects of 64 KiB and more become chunks of the body, without a copy; ``bytearray`` objects are copied.
"""

from __future__ import annotations

import copyreg
import importlib
import os
import pickle
import socket
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]
from cloudpickle import cloudpickle as _by_value

from monarch_backend._core.errors import MonarchError, public
from monarch_backend._serialization import unpicklable

if TYPE_CHECKING:
    from typing_extensions import Buffer

OUT_OF_BAND = 8192
"""Bytes from which a buffer is sent beside the pickle. Measured: below 4 to 16 KiB a copy costs less."""


@public("monarch_backend.actor")
class SerializationError(MonarchError, TypeError):
    """An object cannot be sent. ``path`` is the part of it that cannot be pickled, as in ``args[1]['lock']``.

    Calls of endpoints, `Port.send` and ``spawn`` raise it in the sender; nothing was sent.

    >>> import threading
    >>> from monarch_backend.actor import Channel, SerializationError
    >>> port, receiver = Channel.open()
    >>> try:
    ...     port.send({"lock": threading.Lock()})
    ... except SerializationError as error:
    ...     print(error.path)
    the object['lock']
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


@public("monarch_backend.actor")
class DeserializationError(MonarchError, RuntimeError):
    """A message has arrived, but its object cannot be constructed here. ``__cause__`` is the error of unpickling.

    The future of a call raises it for a reply. In the other direction it is the cause of an `ActorError`.

    >>> from monarch_backend.actor import DeserializationError
    >>> issubclass(DeserializationError, RuntimeError)
    True
    """


_SCALARS = frozenset({NoneType, bool, int, float, str})
_FEW = 16  # members of a container that the short way looks at
_SHORT = 4096  # bytes of a `bytes` object that may be copied


def dumps(obj: object) -> tuple[bytes | list[Buffer], list[memoryview] | None]:
    """The body of a message (its chunks, where large ``bytes`` are among them) and its buffers, None if it has none.

    The buffers are views of the caller's own memory, one-dimensional and of format "B": copy or send them before the
    caller may change it. Raises SerializationError, with the original error as cause.

    >>> body, buffers = dumps(((1, "x"), {}))
    >>> loads(body, buffers)
    ((1, 'x'), {})
    >>> dumps(memoryview(bytes(10_000)))[1][0].nbytes
    10000
    """
    if _is_short((obj,), 3):
        return pickle.dumps(obj, 5), None
    chunks, buffers = _Chunks(), _Buffers()
    _dump(obj, _Pickler(chunks, 5, buffer_callback=buffers.take))
    return bytes(chunks[0]) if len(chunks) == 1 else chunks, buffers or None


def dumps_by(reduce: Callable[[Any], Any], obj: object) -> tuple[bytes, list[memoryview]]:
    """As `dumps`, for objects with parts that travel as only the caller knows.

    ``reduce`` gives for such a part what ``__reduce__`` does, and NotImplemented for any other. It is asked about
    everything but Python's built-in values.
    """
    chunks, buffers = _Chunks(), _Buffers()
    pickler = _PicklerBy(chunks, 5, buffer_callback=buffers.take)
    pickler.reduce = reduce
    _dump(obj, pickler, reduce)
    return b"".join(chunks), buffers


def dumps_in_band(obj: object) -> bytes:
    """Like `dumps` with everything in one ``bytes``, which copies every buffer; ``loads(body, None)`` reads it.

    >>> loads(dumps_in_band([1, 2]), None)
    [1, 2]
    """
    chunks = _Chunks()
    _dump(obj, _Pickler(chunks, 5))
    return b"".join(chunks)


def loads(body: Buffer, buffers: Iterable[Buffer] | None) -> Any:
    """The object in ``body``; tensors and arrays stand on ``buffers`` without a copy and keep them alive.

    A read-only buffer is copied, because a tensor can't be read-only. Raises DeserializationError, with the original
    error as cause.
    """
    try:
        if buffers is None:
            return pickle.loads(body)
        return pickle.loads(body, buffers=map(_writable, buffers))
    except Exception as error:
        raise _not_rebuilt(error) from error


def _is_short(values: Iterable[object], depth: int) -> bool:
    """Return whether it has only scalars and short bytes in small tuples, lists and dicts, which pickle handles
    fastest.
    """
    for value in values:
        kind = type(value)
        if kind in _SCALARS:
            continue
        if kind is tuple or kind is list:
            if not value or (depth and len(value) <= _FEW and _is_short(value, depth - 1)):  # type: ignore[arg-type]
                continue
        elif kind is dict:
            if not value:
                continue
            keys_are_short = depth and len(value) <= _FEW and _SCALARS.issuperset(map(type, value))  # type: ignore[arg-type, call-overload]
            if keys_are_short and _is_short(value.values(), depth - 1):  # type: ignore[attr-defined]
                continue
        elif kind is bytes and len(value) <= _SHORT:  # type: ignore[arg-type]
            continue
        return False
    return True


class _Chunks(list["Buffer"]):
    """File for the pickler's output, in pieces. Large bytes are passed through without a copy."""

    write = list.append


class _Buffers(list[memoryview]):
    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether the pickler must copy the buffer into the pickle."""
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND:
            return True
        self.append(_without_export(view))
        return False


def _without_export(view: memoryview) -> memoryview:
    """The same bytes, but no export of another memoryview, which may be the caller's.

    Python before 3.12.4 crashes when it collects a cycle with a memoryview that has exports (an exception that holds
    the frames of an interrupted send is such a cycle). Two views of one object are no export of each other.
    """
    viewed = view.obj
    try:
        return viewed.cast("B") if isinstance(viewed, memoryview) else view
    except (TypeError, ValueError):  # of another order or format: the bytes are right in the view alone
        return view


_OWN_MODULES = "monarch_backend."
"""Exceptions have the path of the facade that exports them, which a worker need not have imported."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Pickle's compiled pickler that asks `reducer_override` about every object that is no built-in value.

    It is cloudpickle's for what must go by value, without the Python code around each pickler's start and end.
    """

    __init__ = pickle.Pickler.__init__
    dump = pickle.Pickler.dump
    dispatch_table = copyreg.dispatch_table  # as if there was none: what cloudpickle has in its own stands in _REDUCERS
    globals_ref: dict[int, dict[str, Any]] | None = None  # cloudpickle's: the globals that functions by value share

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduction of ``obj``, or NotImplemented for Python's own."""
        kind = type(obj)
        reduce = _REDUCERS.get(kind)
        if reduce is not None:
            return reduce(obj)
        if kind is FunctionType or issubclass(kind, type):
            return self._definition(obj)
        return NotImplemented

    def _definition(self, obj: Any) -> Any:
        """Reduce a function or class: by name if the receiver can import it, else by value."""
        home = sys.modules.get(obj.__module__)
        if home is None and obj.__module__.startswith(_OWN_MODULES):
            home = importlib.import_module(obj.__module__)  # an exception of a facade that nothing has imported yet
        is_main = home is not None and home is sys.modules["__main__"]  # also as __mp_main__ or under an alias
        by_name = not is_main and getattr(home, obj.__qualname__, None) is obj
        if by_name and not cloudpickle.list_registry_pickle_by_value():
            return NotImplemented
        if self.globals_ref is None:
            self.globals_ref = {}
        if not is_main:
            reduced = super().reducer_override(obj)
        elif isinstance(obj, FunctionType):
            reduced = self._dynamic_function_reduce(obj)
        else:
            reduced = _by_value._dynamic_class_reduce(obj)
        if reduced is not NotImplemented and reduced[0] in _SKELETONS:
            if obj not in _COPIES:
                _ORIGINALS.add(obj)
            return _make_class, reduced[:2], *reduced[2:5], _fill_class
        if is_main and reduced is not NotImplemented and reduced[5:] == (_by_value._function_setstate,):
            return *reduced[:5], _fill_function
        return reduced


class _PicklerBy(_Pickler):
    """Pickler that calls the caller's function first."""

    reduce: Callable[[Any], Any]

    def reducer_override(self, obj: Any) -> Any:
        reduced = self.reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


# cloudpickle recognises a class that comes back to where it was defined, and then fills it anew from what came: its
# methods become copies with other globals. A class that was defined here is not to be touched.
_SKELETONS = (_by_value._make_skeleton_class, _by_value._make_skeleton_enum)
_ORIGINALS: weakref.WeakSet[type] = weakref.WeakSet()
_COPIES: weakref.WeakSet[type] = weakref.WeakSet()


def _make_class(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    made = make(*arguments)
    if made not in _ORIGINALS:
        _COPIES.add(made)
    return made


def _fill_class(made: type, state: Any) -> None:
    if made in _COPIES:
        _by_value._class_setstate(made, state)
        _settle(made)


def _fill_function(made: FunctionType, state: Any) -> None:
    _by_value._function_setstate(made, state)
    _settle(made)


_main: ModuleType | None = None


def settle_in(main: ModuleType) -> None:
    """Put the sender's ``__main__`` names into this module, so that pickle, torch.save and forks find them."""
    global _main
    _main = main


def _settle(made: Any) -> None:
    if _main is not None and made.__module__ == "__main__" and made.__qualname__.isidentifier():
        setattr(_main, made.__qualname__, made)


def _reduce_memoryview(view: memoryview) -> Any:
    format_, shape = view.format, view.shape
    try:
        memoryview(b"").cast(format_)  # type: ignore[call-overload]
    except ValueError as error:
        raise TypeError(f"a memoryview of format {format_!r} can't be rebuilt; send view.cast('B')") from error
    data: Buffer = view
    if not view.c_contiguous:
        data = view.tobytes() if view.readonly else bytearray(view.tobytes())
    return _build_memoryview, (pickle.PickleBuffer(data), format_, shape if view.nbytes else None)


def _build_memoryview(buffer: Buffer, format_: Any, shape: tuple[int, ...] | None) -> memoryview:
    flat = memoryview(buffer).cast("B")
    return flat.cast(format_) if shape is None else flat.cast(format_, shape)


_CLOUDPICKLES = cloudpickle.Pickler.dispatch_table.maps[0]


def _reduce_code(code: CodeType) -> Any:
    """Reduce code as cloudpickle does, but keep the file name.

    Since 3.1.3 cloudpickle replaces it by "<dynamic-code>". Tracebacks show the file, and inspect, debuggers and
    torch.jit read the source from it.
    """
    _, arguments = _CLOUDPICKLES[CodeType](code)
    return _build_code, (code.co_filename, *arguments)


def _build_code(file: str, *arguments: Any) -> CodeType:
    return CodeType(*arguments).replace(co_filename=file)


# Exact types with a way of their own: cloudpickle's (cells, modules, methods, properties, ...), ours, and those
# of the modules below once their library is loaded.
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    **_CLOUDPICKLES,
    CodeType: _reduce_code,
    memoryview: _reduce_memoryview,
}
_LATER = {"numpy": "ndarrays", "torch": "tensors"}


def _learn() -> None:
    """Add the reducers of libraries that have been imported since the last call."""
    for library, ours in list(_LATER.items()):
        if library not in sys.modules:
            continue
        module = __import__(f"{__package__}.{ours}", fromlist=["REDUCERS"])
        _REDUCERS.update(module.REDUCERS)
        _LATER.pop(library, None)


def _dump(obj: object, pickler: _Pickler, reduce: Callable[[Any], Any] | None = None) -> None:
    if _LATER:
        _learn()
    try:
        pickler.dump(obj)
    except MemoryError:
        raise
    except Exception as error:
        raise _not_sent(obj, error, reduce) from error


def try_dumps_in_band(obj: object) -> bytes | None:
    """Return the result of `dumps_in_band`, or None, without the search for the cause."""
    chunks = _Chunks()
    try:
        _Pickler(chunks, 5).dump(obj)
    except Exception:
        return None
    return b"".join(chunks)


def _trouble(part: object, reduce: Callable[[Any], Any] | None = None) -> Exception | None:
    pickler = (_Pickler if reduce is None else _PicklerBy)(_Chunks(), 5, buffer_callback=lambda _: False)
    if isinstance(pickler, _PicklerBy) and reduce is not None:
        pickler.reduce = reduce
    try:
        pickler.dump(part)
    except Exception as error:
        return error
    return None


def _not_sent(obj: object, error: Exception, reduce: Callable[[Any], Any] | None) -> SerializationError:
    if isinstance(error, RecursionError):
        depth = f"it is nested more deeply than Python's recursion limit of {sys.getrecursionlimit()} allows"
        return SerializationError(f"can't serialize the object: {depth}. Send it flattened, as a list of its parts.")
    path, culprit, error = unpicklable.find(obj, error, lambda part: _trouble(part, reduce))
    remedy = (
        "Leave it out, make it where it is used, or give its class a __reduce__ or __getstate__ that says what to send."
    )
    what = f"{unpicklable.article(type(culprit))}: {type(error).__name__}: {error}"
    return SerializationError(f"can't serialize {path} ({what}). {remedy}", path)


def _writable(buffer: Buffer) -> Buffer:
    view = memoryview(buffer)
    return bytearray(view) if view.readonly else view


def _not_rebuilt(error: Exception) -> DeserializationError:
    if isinstance(error, ImportError):
        remedy = "Make the module importable here, or send it along with cloudpickle.register_pickle_by_value(module)."
    elif isinstance(error, AttributeError):
        remedy = "Compare the versions of the module at the sender and here."
    elif isinstance(error, MemoryError):
        remedy = (
            "Raise this process's memory limit (RLIMIT_AS, ulimit -v, cgroup), send smaller messages, or read the data "
            "in parts out of an RDMABuffer."
        )
    elif isinstance(error, (pickle.UnpicklingError, EOFError)):
        remedy = "The bytes are damaged, or are not the result of dumps()."
    else:
        remedy = "Look at the __setstate__ or the constructor of its class."
    where = f"host {socket.gethostname()}, pid {os.getpid()}"
    return DeserializationError(f"can't rebuild an object: {type(error).__name__}: {error}. {remedy} [{where}]")
