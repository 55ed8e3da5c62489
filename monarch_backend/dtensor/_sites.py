"""Places in the controller's program: a number for each, so that a worker's failure names the line that issued it.

A place is the innermost lines of the program that are neither torch's nor ours, three of them.
"""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from monarch_backend.dtensor._workers import Workers

LINES = 3
_INTERNAL = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)

_is_internal: dict[int, bool] = {}  # by the code's identity: it is kept below
_kept: list[CodeType] = []
_numbers: dict[tuple[Any, ...], int] = {}
_places: list[tuple[tuple[CodeType, int], ...]] = [()]


def here(_workers: Workers) -> int:
    """The number of the place that runs now."""
    frame: FrameType | None = sys._getframe(3)
    key: list[int] = []
    codes = []
    while frame is not None:
        code = frame.f_code
        internal = _is_internal.get(id(code))
        if internal is None:
            internal = _look(code)
        if not internal:
            key += (id(code), frame.f_lasti)
            codes.append((code, frame.f_lasti))
            if len(codes) == LINES:
                break
        frame = frame.f_back
    number = _numbers.get(tuple(key))
    if number is None:
        _places.append(tuple(codes))
        number = _numbers[tuple(key)] = len(_places) - 1
    return number


def _look(code: CodeType) -> bool:
    _kept.append(code)
    internal = _is_internal[id(code)] = code.co_filename.startswith((*_INTERNAL, "<"))
    return internal


def text_of(number: int) -> str:
    """The place for people, as in a traceback: the innermost line last."""
    lines = []
    for code, at in reversed(_places[number]):
        line = next((line for start, end, line in code.co_lines() if start <= at < end and line), code.co_firstlineno)
        lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n')
        source = linecache.getline(code.co_filename, line).strip()
        lines.append(f"    {source}\n" if source else "")
    return "".join(lines)
