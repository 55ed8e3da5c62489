"""What travels in the bodies of calls and replies: arguments, values, errors; and the prefix that names an endpoint."""

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
"""Of a port: token, number, -1; or of the way back to a caller: token, the call's number, the rank that answers."""


class CallHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The prefix of a call: the endpoint, the mesh or slice it was sent to, and where the reply goes if not back."""

    method: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    port: Address | None = None
    plain: int = 0  # 1: a method that is no endpoint, called as one; 2: as one with an explicit port


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CallHeader)
_known: dict[bytes, tuple[CallHeader, Extent]] = {}


def prefix_of(method: str, extent: Extent, port: Address | None = None, plain: int = 0) -> bytes:
    """The prefix of a call."""
    return _encoder.encode(CallHeader(method, tuple(extent.labels), tuple(extent.sizes), port, plain))


def read_prefix(prefix: bytes) -> tuple[CallHeader, Extent]:
    """The endpoint and the extent of a call's prefix; remembered, since they are few."""
    found = _known.get(prefix)
    if found is None:
        called = decode(_decoder, prefix, "the prefix of a call")
        try:
            found = called, Extent(called.labels, called.sizes)
        except (ValueError, TypeError) as error:
            raise FrameError(f"not the prefix of a call: {error}") from error
        if len(_known) > 4096:
            _known.clear()
        _known[prefix] = found
    return found


def pack_error(error: BaseException) -> Any:
    """The body of a reply with an error in it."""
    return dumps((pack_exception(error), remote_traceback(error), HOST, getpid()))[0]


def pack_failure(failure: MeshFailure) -> bytes:
    """The body of a reply of a dead actor."""
    return pack_exception(failure)


def text_of(error: BaseException) -> str:
    """Type and message, also of exceptions that can't say theirs."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as again:
        return f"{type(error).__name__} (whose text can't be had: {type(again).__name__})"


def read_error(status: bytes, body: Any, actor: str, endpoint: str, where: str, rank: int) -> BaseException:
    """The exception that a caller gets for a reply that is no value."""
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
    """The text of the error in a reply, without unpickling the exception, which may run code of the user's."""
    _, trace, host, pid = loads(body, None)
    return f"{actor}.{endpoint} raised on {where} (host {host}, pid {pid})\n\n{trace.rstrip()}\n"


def supervision_error(failure: MeshFailure, endpoint: str, delivery: str) -> SupervisionError:
    """The error of a call on a dead rank."""
    became = "it was not sent" if delivery == "not sent" else "it may have run"
    text = f"{endpoint} was called on a rank that is dead ({became}): {failure}"
    error = SupervisionError(text, endpoint, failure, delivery)
    error.__cause__ = failure.__cause__
    return error
