"""`RemoteStorage`: what a remote tensor says is its storage. It can be emptied and filled again; nothing can be read.

FSDP frees and allocates whole parameters that way, so that all views of them stay views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from monarch_backend.dtensor import _dispatch
from monarch_backend.dtensor._signatures import stands_in
from monarch_backend.dtensor.worker import _storage

if TYPE_CHECKING:
    from monarch_backend.dtensor._remote_tensor import RemoteTensor


class RemoteStorage:
    """Of a tensor that is no view: only its own size is known here. ``own``: what torch believes is its storage."""

    __slots__ = ("__weakref__", "_own", "_tensor")  # dynamo refers to storages weakly

    def __init__(self, tensor: RemoteTensor, own: torch.UntypedStorage) -> None:
        self._tensor, self._own = tensor, own

    def size(self) -> Any:
        """In bytes, on each worker."""
        whole = self._tensor.numel() * self._tensor.itemsize
        return getattr(self._tensor._ref, "nbytes", whole)

    nbytes = size

    def resize_(self, nbytes: Any) -> RemoteStorage:
        """On the workers, in its turn. What was unreachable before is gone before."""
        tensor = self._tensor
        tensor._meta.workers.stream.delete()
        _dispatch.call(_storage.resize, f"{_storage.__name__}:resize", (tensor, nbytes), {}, writes=(0,))
        tensor._ref.nbytes = nbytes
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


stands_in[_storage.resize] = lambda *_: None  # nothing here has storage
