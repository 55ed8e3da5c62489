"""Cache of this process's tensors on workers: the backward of an operation reuses the copy that its forward has sent.

Other operations send the tensor again, because NumPy and others may change memory without notifying torch. A copy is
dropped with its backward, with the tensor's memory here, and with the first forward after any backward.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from monarch_backend.dtensor._controller.tensor_meta import refuse_sparse
from monarch_backend.dtensor._torch_internals import autograd_node

if TYPE_CHECKING:
    from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
    from monarch_backend.dtensor._controller.worker_set import WorkerSet

MAX_CACHED_BYTES = 128 << 20
"""Bytes that are kept for a thread's backward, besides the last tensor. A backward may never come."""

Key = tuple[Any, ...]


class _Copy(NamedTuple):
    tensor: RemoteTensor
    version: int  # torch's version counter of the tensor here
    nbytes: int
    memory: weakref.ref[Any]  # its callback drops the copy


class _Copies:
    """Copies for one thread, whose operations have their own numbers."""

    def __init__(self) -> None:
        self._known: dict[Key, _Copy] = {}
        self._nbytes = 0
        self.went_back = False

    def keep(self, key: Key, source: Source, tensor: RemoteTensor) -> None:
        self.take(key)
        while self._known and self._nbytes > MAX_CACHED_BYTES:
            self.take(next(iter(self._known)))
        gone = weakref.ref(source.memory, lambda _: self.take(key))
        self._known[key] = _Copy(tensor, source.version, source.nbytes, gone)
        self._nbytes += source.nbytes

    def take(self, key: Key) -> _Copy | None:
        copy = self._known.pop(key, None)
        self._nbytes -= 0 if copy is None else copy.nbytes
        return copy

    def clear(self) -> None:
        self._known.clear()
        self._nbytes, self.went_back = 0, False


class _OfWorkers(threading.local):
    def __init__(self) -> None:
        self.copies = _Copies()


def _of(workers: WorkerSet) -> _Copies:
    known: _OfWorkers | None = workers.kept.get("host copies")
    if known is None:
        known = workers.kept.setdefault("host copies", _OfWorkers())
    return known.copies


class Source(NamedTuple):
    """Identity of a tensor's data: memory, torch's version of it, the part or function of it, most bytes of it."""

    memory: torch.UntypedStorage
    version: int
    what: Key
    nbytes: int


def source(value: torch.Tensor) -> Source | None:
    """Return the source of a tensor of this process, or None if a change of it could not be detected."""
    if not value.ndim or value.is_inference():
        return None
    refuse_sparse(value)
    of = value.dtype, value.storage_offset(), value.shape, value.stride(), value.is_neg(), value.is_conj()
    return Source(value.untyped_storage(), value._version, of, value.numel() * value.element_size())


def put(workers: WorkerSet, schema: Any, source: Source | None, send: Callable[[], RemoteTensor]) -> RemoteTensor:
    """Return an operator's argument on the workers: a copy that its forward has sent, or a new one from ``send``."""
    backward = autograd_node.backward_of()
    keeps = torch.is_grad_enabled()
    if source is None or not _only_reads(schema) or (backward is None and not keeps):
        return send()
    copies = _of(workers)
    of = (id(source.memory), source.what)
    if backward is not None:
        copies.went_back = True
        known = copies.take((backward, *of))
        if known is not None and known.version == source.version:
            return known.tensor
    elif copies.went_back:
        copies.clear()
    tensor = send()
    if keeps:
        copies.keep((autograd_node.forward_operation(), *of), source, tensor)
    return tensor


@functools.cache
def _only_reads(schema: Any) -> bool:
    """Return whether the operator neither changes nor returns the copy."""
    return schema is not None and all(each.alias_info is None for each in schema.arguments)
