"""Call sites: a number for each place in the controller's program, so that a worker's failure names the line.

A place is the three innermost lines of the program that are neither torch's nor this package's. The compiled core finds
them (csrc/records/call_site.cpp). This module formats and numbers each place once.
"""

from __future__ import annotations

import itertools
import linecache
import os
from types import CodeType

import torch

from monarch_backend import _native

_INTERNAL = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(os.path.dirname(__file__)))
)

_kept: list[CodeType] = []
_places: dict[int, tuple[tuple[CodeType, int], ...]] = {0: ()}
_numbers = itertools.count(1)


here = _native.current_call_site
"""Return the number of the current place."""


def _look(code: CodeType) -> bool:
    _kept.append(code)
    return code.co_filename.startswith((*_INTERNAL, "<"))


def _number(place: tuple[tuple[CodeType, int], ...]) -> int:
    number = next(_numbers)  # each thread has its own
    _places[number] = place
    return number


_native.set_up_call_sites(_look, _number)


def text_of(number: int) -> str:
    """Return the place as text, as in a traceback: the innermost line last."""
    lines = []
    for code, at in reversed(_places[number]):
        line = next((line for start, end, line in code.co_lines() if start <= at < end and line), code.co_firstlineno)
        lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n')
        source = linecache.getline(code.co_filename, line).strip()
        lines.append(f"    {source}\n" if source else "")
    return "".join(lines)
