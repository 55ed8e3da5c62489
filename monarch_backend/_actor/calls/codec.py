"""Encoding of calls and replies: arguments, values, errors, and the prefix that names an endpoint."""

from __future__ import annotations

import socket
from os import getpid
from typing import Any

import msgspec

from monarch_backend._actor.errors import ActorError, MeshFailure, SupervisionError
from monarch_backend._core import env
from monarch_backend._mesh.extent import Extent
from monarch_backend._serialization.exceptions import pack_exception, remote_traceback, unpack_exception
from monarch_backend._serialization.pickling import dumps, loads
from monarch_backend._transport.local.frames import FrameError, Status, decode

HOST = env.get("MONARCH_HOST_NAME") or socket.gethostname()


Address = tuple[str, int, int]
"""Address of a port (token, number, -1), or of a call's reply (token, number of the call, replying rank)."""


class CallHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Prefix of a call: its endpoint, the mesh or slice that is called, and the port for replies, if any."""

    method: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    port: Address | None = None
    plain: int = 0  # 1: an undecorated method; 2: one with an explicit response port
    trace: str = ""  # W3C header of the caller's span, of a call within `remote_parent`


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CallHeader)
_known: dict[bytes, tuple[CallHeader, Extent]] = {}


def prefix_of(method: str, extent: Extent, port: Address | None = None, plain: int = 0) -> bytes:
    return _encoder.encode(CallHeader(method, tuple(extent.labels), tuple(extent.sizes), port, plain))


def with_trace(prefix: bytes, header: str) -> bytes:
    """Return the prefix of a call that is a part of a trace of another program. ``header``: of the caller's span."""
    return _encoder.encode(msgspec.structs.replace(read_prefix(prefix)[0], trace=header))


def read_prefix(prefix: bytes) -> tuple[CallHeader, Extent]:
    """Decode the prefix of a call: its endpoint and extent. Results are cached. Raises FrameError for other bytes."""
    found = _known.get(prefix)
    if found is None:
        called = decode(_decoder, prefix, "the prefix of a call")
        try:
            found = called, Extent(called.labels, called.sizes)
        except (ValueError, TypeError) as error:
            raise FrameError(f"not the prefix of a call: {error}") from error
        if not called.trace:  # a prefix with one occurs once
            if len(_known) > 4096:
                _known.clear()
            _known[prefix] = found
    return found


def pack_error(error: BaseException) -> Any:
    return dumps((pack_exception(error), remote_traceback(error), HOST, getpid()))[0]


def pack_failure(failure: MeshFailure) -> bytes:
    return pack_exception(failure)


def text_of(error: BaseException) -> str:
    """Return type and message of an exception, also if its ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except (Exception, SystemExit) as again:
        return f"{type(error).__name__} (its text is unknown, because __str__ raised {type(again).__name__})"


def read_error(status: bytes, body: Any, actor: str, endpoint: str, where: str, rank: int) -> BaseException:
    """Return the caller's exception for a reply that is not a value."""
    if status == Status.ERROR:
        packed, trace, host, pid = loads(body, None)
        cause = unpack_exception(packed)
        text = f"{actor}.{endpoint} raised on {where} (host {host}, pid {pid}): {text_of(cause)}\n\n{trace}"
        error: BaseException = ActorError(text, actor, endpoint, rank)
        error.__cause__ = cause
        return error
    failure = unpack_exception(bytes(body))
    if not isinstance(failure, MeshFailure):
        return failure
    delivery = "not sent" if status == Status.DEAD else "unknown"
    return supervision_error(failure, f"{actor}.{endpoint}", delivery)


def describe_error(body: Any, actor: str, endpoint: str, where: str) -> str:
    """Return the text of the error in a reply. The exception is not unpickled, as that may run user code."""
    _, trace, host, pid = loads(body, None)
    return f"{actor}.{endpoint} raised on {where} (host {host}, pid {pid})\n\n{trace.rstrip()}\n"


def supervision_error(failure: MeshFailure, endpoint: str, delivery: str) -> SupervisionError:
    became = "it was not sent" if delivery == "not sent" else "it may have run"
    text = f"{endpoint} was called on a rank that is dead ({became}): {failure}"
    error = SupervisionError(text, endpoint, failure, delivery)
    error.__cause__ = failure.__cause__
    return error
