"""Proof that an endpoint uses its reply port only to send with it, so that no other code gets the port.

The proof is in the bytecode: each load of the argument is for ``port.send(...)`` or ``port.exception(...)``. Such an
endpoint stores, passes and returns its port nowhere. While it waits, no thread, callback or actor can reply.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from types import CodeType, MethodType
from typing import Any

_PLACE = 1
"""Place of the port among the arguments of the endpoint's function, after ``self``."""

_USES = ("send", "exception")

_READS_VARIABLES = frozenset(("locals", "vars", "dir", "eval", "exec", "f_locals", "_getframe", "currentframe"))
"""Names with which code can read the variables of a frame."""

_NO_EFFECT = ("EXTENDED_ARG", "NOP", "CACHE")


def only_sends(method: Any) -> bool:
    """Return whether this method, whose first argument is a port, is plain and only sends with the port."""
    return type(method) is MethodType and inspect.isfunction(method.__func__) and _only_sends(method.__func__.__code__)


@functools.lru_cache(maxsize=1024)
def _only_sends(code: CodeType) -> bool:
    if code.co_argcount <= _PLACE or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return False
    name = code.co_varnames[_PLACE]
    if name in code.co_cellvars or not _READS_VARIABLES.isdisjoint(code.co_names):
        return False
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _NO_EFFECT]
    for place, each in enumerate(instructions):
        loaded = _variables(each)
        if name in loaded[:-1] or not all(isinstance(variable, str) for variable in loaded):
            return False
        if loaded[-1:] == (name,) and not _loads_method(instructions[place + 1]):
            return False
    return True


def _variables(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Return the variables that an instruction loads, in their order, or that it stores together with others."""
    if "FAST" not in instruction.opname or instruction.opname in ("STORE_FAST", "DELETE_FAST"):
        return ()
    variables = instruction.argval
    return variables if isinstance(variables, tuple) else (variables,)


def _loads_method(instruction: dis.Instruction) -> bool:
    """Return whether the instruction loads a method of the last value for a call, without a bound method."""
    is_call = instruction.opname == "LOAD_METHOD" or (
        sys.version_info >= (3, 12) and instruction.opname == "LOAD_ATTR" and bool((instruction.arg or 0) & 1)
    )
    return is_call and instruction.argval in _USES
