"""Setup of a worker's `logging`, so that records reach the controller whole: marks, a default handler, line buffering.

It runs in the worker once, before user code. Without it records would arrive as plain lines of stderr without a level.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

from monarch_backend._logs.line_splitter import LEVEL_END, RECORD, RECORD_BREAK
from monarch_backend._logs.mesh_log import level_number

_RECORD, _LEVEL_END, _RECORD_BREAK = (mark.decode() for mark in (RECORD, LEVEL_END, RECORD_BREAK))
_plain_format = logging.StreamHandler.format


def install_worker_logging(level: int | str = logging.INFO) -> None:
    """Send this process's log records to the controller with their level, and stdout line by line.

    Call again to change the level. Records of loggers without a configured handler go to stderr as
    ``LEVEL:name:message``, with no time in it, so that equal ones of many ranks fold. A program that configures
    logging itself keeps its own handlers, formats and levels; what those write to stdout or stderr is marked too, so
    that the mesh's level works on it and a traceback stays one unit. ``level`` is the root logger's, as in
    `level_number`; records below it are not made at all.

    >>> install_worker_logging("WARNING")
    >>> logging.getLogger("loader").info("not said")
    """
    number = level_number(level)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # replaced by something else, or closed
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logging.StreamHandler.format = _marked_format  # type: ignore[assignment, method-assign]
    # Not a handler of the root logger: then the program's own basicConfig() would do nothing.
    handler = logging.lastResort = logging._StderrHandler()  # type: ignore[attr-defined]
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    logging.getLogger().setLevel(number)


def _marked_format(handler: Any, record: logging.LogRecord) -> str:
    """Replacement of `StreamHandler.format`: it marks records that go to the controller's pipe."""
    text = _plain_format(handler, record)
    try:
        if handler.stream.fileno() not in (1, 2):
            return text
    except (AttributeError, OSError, ValueError):
        return text
    body = text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n").replace("\n", _RECORD_BREAK)
    return f"{_RECORD}{record.levelno}{_LEVEL_END}{body}"
