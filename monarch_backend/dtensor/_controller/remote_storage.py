"""`RemoteStorage`: storage of a remote tensor. It can be emptied and filled again, but not read.

FSDP frees and allocates whole parameters in this way, so that all views of them stay views. A DTensor of remote tensors
also has one, which only has a size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor._controller.operations import operations
from monarch_backend.dtensor._errors import not_readable
from monarch_backend.dtensor._worker import storage

_KNOWN = frozenset({
    "_cdata", "_expired", "_fix_weakref", "_free_weak_ref", "_weak_ref", "device", "element_size", "get_device",
    "is_cuda", "is_hpu", "is_pinned", "is_shared", "is_sparse", "is_sparse_csr", "resizable", "untyped",
})  # fmt: skip
"""Attributes of torch's own storage that need no memory. torch uses them to find tensors that share a storage."""


class RemoteStorage:
    """Storage of a tensor that is not a view, since only its own size is known here. ``own``: its storage in torch."""

    __slots__ = ("__weakref__", "_own", "_tensor")  # dynamo refers to storages weakly

    def __init__(self, tensor: Any, own: torch.UntypedStorage) -> None:
        self._tensor, self._own = tensor, own

    def size(self) -> Any:
        """Return the bytes on each worker; for a DTensor, the bytes of the whole."""
        whole = self._tensor.numel() * self._tensor.itemsize
        return whole if isinstance(self._tensor, DTensor) else getattr(self._tensor._ref, "nbytes", whole)

    nbytes = __len__ = size

    def resize_(self, nbytes: Any) -> RemoteStorage:
        """Resize on the workers, in order. Earlier unreachable tensors are deleted before. Raises NotReadableError."""
        tensor: Any = self._tensor
        if isinstance(tensor, DTensor):
            raise not_readable("untyped_storage().resize_()")
        tensor._meta.workers.stream.delete()
        operations.call(storage.resize, f"{storage.__name__}:resize", (tensor, nbytes), {}, writes=(0,))
        tensor._ref.nbytes = nbytes
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _KNOWN:
            return getattr(self._own, name)
        if name.startswith("__"):  # callers have another way without it
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise not_readable(f"untyped_storage().{name}()")

    def _refuse(self, *_: Any) -> Any:
        raise not_readable("untyped_storage()")

    __getitem__ = __setitem__ = __iter__ = __copy__ = __deepcopy__ = __reduce_ex__ = _refuse

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size()} bytes, device={self._tensor.device}, in other processes)"
