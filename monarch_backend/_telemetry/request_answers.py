"""Answers of this process to requests of others of this user, such as a profile: process_requests.py sends them.

A request is a memory file of the requester. The kernel tells the requester's pid with the signal, whose value is the
file's descriptor there. The work is done on a thread, and the answer written into the file. So nothing is left when
either process ends. Only the same user can open the file. What answers a request is an extension of the name
"request NAME".
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from monarch_backend._core.extension_points import extension, has_extension
from monarch_backend._telemetry import discovery

ASKED, TAKEN, ENDED, DONE = b"asked\n", b"taken\n", b"ended\n", b"done\n\n"
"""States of a request: the first bytes of its file."""

BODY_AT = 64
"""Where the request is in the file, and later the answer: JSON in one line, and bytes."""


class RequestError(Exception):
    """A process has not answered a request. The text says why."""


def name_for(pid: int) -> str:
    """Return the name of the memory file of a request to this process."""
    return f"monarch-request-{pid}"


class Asked:
    """The requester, for the function that answers."""

    def __init__(self, requester: int, number: int, descriptor: int) -> None:
        self._path, self._descriptor = f"/proc/{requester}/fd/{number}", descriptor

    def is_wanted(self) -> bool:
        """Return whether the requester still waits for the answer."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except OSError:
            return False

    def end(self) -> None:
        """Say that what was asked for is over. Only the answer is still to be written."""
        os.pwrite(self._descriptor, ENDED, 0)


def answer(requester: int, number: int) -> None:
    """Answer the request of another process to this one. ``number`` is the descriptor of the request there."""
    try:
        descriptor = _open(requester, number)
    except (OSError, LookupError):  # it has given up, or is another user's
        return
    try:
        request = json.loads(os.pread(descriptor, 1 << 16, BODY_AT))
        os.pwrite(descriptor, TAKEN, 0)
        try:
            name = f"request {request.get('do')}"
            if not has_extension(name):
                raise RequestError(f"it does not know the {name}: it is of another release")
            handler: Callable[..., tuple[dict[str, Any], bytes]] = extension(name)
            about, body = handler(request, Asked(requester, number, descriptor))
        except RequestError as error:
            about, body = {"error": str(error)}, b""
        except BaseException as error:  # the answer is the error
            about, body = {"error": f"{type(error).__name__}: {error}"}, b""
        os.ftruncate(descriptor, BODY_AT)
        with open(descriptor, "r+b", closefd=False) as file:
            file.seek(BODY_AT)
            file.write(json.dumps(about).encode() + b"\n" + body)
        os.pwrite(descriptor, DONE, 0)
    except OSError:
        return
    finally:
        os.close(descriptor)


def _open(requester: int, number: int) -> int:
    if not discovery.is_named(requester, number, name_for(os.getpid())):
        raise LookupError("the requester has no such file for this process")
    descriptor = os.open(f"/proc/{requester}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(descriptor).st_uid not in (os.geteuid(), 0):
        os.close(descriptor)
        raise LookupError("the file is another user's")
    return descriptor


def is_imported(module: str) -> bool:
    """Return whether the program has imported a module completely."""
    found = sys.modules.get(module)
    return found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False)
