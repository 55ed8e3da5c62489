"""Fast paths of messages between ranks of one host, and the work of a message that is under way.

csrc/shm/python/messages.h has the calls and the wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

from monarch_backend.process_group import _c10d_internals
from monarch_backend.process_group._collective_specs import COLLECTIVES
from monarch_backend.process_group._shm import shm_backend
from monarch_backend.process_group._shm.shm_backend import FastPathWork, SharedMemory

KINDS = tuple(spec.key for spec in COLLECTIVES if spec.form.is_point_to_point)
"""Names of the methods, indexed by csrc/shm/python/messages.h: MessageKind."""

_DTYPES = {dtype: code for dtype, code in shm_backend._DTYPES.items() if not dtype.is_complex}
"""Codes of the core, as `_cpu_validation.movable` would have them."""


@_c10d_internals.hide_from_dynamo
class MessageWork(FastPathWork):
    """Message under way, or one that is done."""

    _source = -1

    def _source_rank(self) -> int:
        return self._source if self._operation is None else super()._source_rank()


def fast_paths(memory: SharedMemory, owner: object, methods: Mapping[str, object]) -> dict[str, Any]:
    """Return fast paths of messages by name, under the conditions of `SharedMemory.fast_paths`."""
    names = _c10d_internals.fast_path_torch_names({}, _DTYPES)
    waiting, passing = _c10d_internals.callers_of_messages()
    found = {}
    for kind, name in enumerate(KINDS):
        method = getattr(type(owner), name, None)
        if isinstance(method, FunctionType) and method is methods.get(name):
            found[name] = memory.native.message_path(
                kind,
                owner,
                name,
                MessageWork,
                memory._failed,
                lambda: memory._timeout().total_seconds(),
                memory,
                memory._engine(),
                waiting,
                passing,
                names,
            )
    return found
