"""Results of collectives that are in flight, and the memory that these collectives still read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed._functional_collectives as funcol

from monarch_backend.dtensor._protocol import Signature
from monarch_backend.dtensor._worker import storage as storage_module
from monarch_backend.dtensor._worker.failures import Failure
from monarch_backend.dtensor._worker.op_functions import Function


class PendingResults:
    """Waits for collectives when their results or their operands' memory are used. ``tensors``: by number."""

    def __init__(
        self, tensors: dict[int, Any], new_failure: Callable[[Signature, int, int, Exception], Failure]
    ) -> None:
        self._tensors, self._new_failure = tensors, new_failure
        self.pending: dict[int, tuple[Signature, int, int]] = {}  # by result: arguments of ``new_failure``
        self._sources: dict[int, frozenset[int]] = {}  # by result: the storages that the collective reads
        self._readers: dict[int, set[int]] = {}  # by storage: the results

    def wait_for_operands(self, function: Function | None, words: list[Any], i: int) -> None:
        for each in function.operands(words, i):  # type: ignore[union-attr]
            if each in self.pending:
                self.settled(each)

    def wait_for_readers(self, function: Function, words: list[Any], i: int) -> None:
        """Wait for collectives that still read memory which a command writes."""
        writes = function.signature.writes
        if not writes:
            return
        operands = function.operands(words, i)
        written = self.memory_of([operands[at] for at in writes])
        for each in [each for storage in written for each in self._readers.get(storage, ())]:
            self.settled(each)

    def note_readers(self, results: list[int], storages: frozenset[int]) -> None:
        """Record the storages that the collective of these results reads."""
        self._sources.update(dict.fromkeys(results, storages))
        for storage in storages:
            self._readers.setdefault(storage, set()).update(results)

    def _forget_reader(self, result: int) -> None:
        for storage in self._sources.pop(result, ()):
            self._readers[storage].discard(result)
            if not self._readers[storage]:
                del self._readers[storage]

    def memory_of(self, numbers: list[int]) -> frozenset[int]:
        """Return the identities of the storages of these tensors."""
        found = [storage_module.identity(self._tensors.get(each)) for each in numbers]
        return frozenset(each for each in found if each is not None)

    def settled(self, number: int) -> Any:
        """Wait for a result; return it, a `Failure`, or None if this rank has no part in it."""
        found = self._tensors.get(number)  # None: this rank takes no part in it
        origin = self.pending.pop(number, None)
        self._forget_reader(number)
        if origin is not None and not isinstance(found, Failure):
            try:
                found = funcol.wait_tensor(found)
            except Exception as error:  # such as the death of another rank
                found = self._new_failure(*origin, error)
            self._tensors[number] = found
        return found
