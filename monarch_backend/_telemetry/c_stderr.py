"""Lines that C code of this process prints to the ``stderr`` of the C library, without some of them.

Only the pointer of the C library is replaced, for a moment. Python and the descriptor 2 are not concerned, so no other
output is lost, also not that of processes that are started meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any

_BYTES = 1 << 16
"""Room for what is printed meanwhile. Further text is lost."""

_IONBF = 2  # of setvbuf: unbuffered
_lock = threading.Lock()
_file: tuple[int, Any] | None = None
"""A file in memory, and its memory. It stays: another thread may be printing to it."""


@contextlib.contextmanager
def without(beginning: bytes) -> Iterator[None]:
    """Drop lines with this beginning that C code prints in the block. Others are printed at its end."""
    library = ctypes.CDLL(None)
    try:
        stderr = ctypes.c_void_p.in_dll(library, "stderr")
    except ValueError:  # the C library has another name for it
        yield
        return
    with _lock:
        made = _made(library)
        if made is None:
            yield
            return
        file, memory = made
        before, stderr.value = stderr.value, file
        try:
            yield
        finally:
            stderr.value = before
            text = memory.raw[: max(0, library.ftell(ctypes.c_void_p(file)))]
            library.rewind(ctypes.c_void_p(file))
            left = b"".join(line for line in text.splitlines(keepends=True) if not line.startswith(beginning))
            with contextlib.suppress(OSError):
                os.write(2, left)


def _made(library: Any) -> tuple[int, Any] | None:
    global _file
    if _file is None:
        memory = ctypes.create_string_buffer(_BYTES)
        library.fmemopen.restype = ctypes.c_void_p
        library.ftell.restype = ctypes.c_long
        file = library.fmemopen(memory, ctypes.c_size_t(_BYTES), b"w")
        if not file:
            return None
        library.setvbuf(ctypes.c_void_p(file), None, _IONBF, ctypes.c_size_t(0))
        _file = file, memory
    return _file
