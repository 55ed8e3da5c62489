"""Base class of DTensor with the methods that act on a tensor's device, values or memory.

torch's DTensor inherits these from `torch.Tensor`. The class comes between the two, so none of them is replaced. Each
method calls torch's own for a DTensor that is not a controller's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import _api as api

from monarch_backend.dtensor._controller import fetch
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._controller.device_methods import DeviceMethods
from monarch_backend.dtensor._controller.remote_storage import RemoteStorage
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor, no_pointer
from monarch_backend.dtensor._dispatch import device_moves
from monarch_backend.dtensor._errors import not_readable
from monarch_backend.dtensor._patches.fixes.view_writeback import IndexMethods

_Base: Any = torch.Tensor


def with_methods(own: tuple[type, ...]) -> tuple[type, ...]:
    return (_Methods, *own)


def _is_remote(tensor: Any) -> bool:
    return isinstance(tensor._local_tensor, RemoteTensor)


def _property(name: str) -> Any:
    own = getattr(torch.Tensor, name)
    return property(lambda self: getattr(self._local_tensor, name) if _is_remote(self) else own.__get__(self))


class _Devices(DeviceMethods):
    """Device: for C++ a remote tensor is on the CPU, and so is a DTensor of it."""

    __slots__ = ()

    device, is_cpu, is_cuda, is_meta = map(_property, ("device", "is_cpu", "is_cuda", "is_meta"))

    def pin_memory(self, *args: Any, **options: Any) -> Any:
        return device_moves.pinned(self) if _is_remote(self) else _Base.pin_memory(self, *args, **options)

    def record_stream(self, stream: Any) -> Any:
        """Do nothing: a worker has one stream."""
        return None if _is_remote(self) else _Base.record_stream(self, stream)

    def get_device(self: Any) -> int:
        """Return the number of the workers' GPU, 0, or -1 on a CPU."""
        return self._local_tensor.get_device() if _is_remote(self) else _Base.get_device(self)  # type: ignore[no-any-return]


def _reading(name: str) -> Any:
    own = getattr(torch.Tensor, name)

    def read(self: Any, *args: Any, **options: Any) -> Any:
        if not _is_remote(self):
            return own(self, *args, **options)
        return getattr(fetch.as_host(self.detach().full_tensor()), name)(*args, **options)

    return read


class _Values:
    """Values of the whole tensor, not of a rank's shard."""

    __slots__ = ()

    tolist, numpy, __array__ = map(_reading, ("tolist", "numpy", "__array__"))

    def __format__(self: Any, spec: str) -> str:
        return format(self.item(), spec) if _is_remote(self) and self.ndim == 0 and spec else super().__format__(spec)

    def __iter__(self: Any) -> Any:
        if _is_remote(self) and self.ndim:  # no rank has all rows of a tensor that is sharded by rows
            keep = [p if not p.is_shard(0) and not p.is_partial() else Replicate() for p in self.placements]
            self = self.redistribute(self.device_mesh, keep)
        return _Base.__iter__(self)

    def _set_data(self: Any, other: Any) -> None:
        if _is_remote(self):
            if not isinstance(other, api.DTensor):
                other = api.distribute_tensor(other, self.device_mesh, self.placements)
            # torch copies only the other's sizes; a DTensor's values are in attributes.
            self._local_tensor, self._spec = other.detach()._local_tensor, other._spec
        _Base.data.__set__(self, other)

    data = property(_Base.data.__get__, _set_data)


def _is_torch() -> bool:
    """Whether the calling function's caller is a module of torch."""
    caller: str = sys._getframe(2).f_globals.get("__name__", "")
    return caller.partition(".")[0] == "torch"


def _memory(name: str) -> Any:
    own = getattr(torch.Tensor, name)

    def memory(self: Any, *args: Any, **options: Any) -> Any:
        if _is_remote(self):
            raise not_readable(f"{name}()")
        return own(self, *args, **options)

    return memory


def to_dlpack(own: Any) -> Replacement:
    def to_dlpack(tensor: Any, *args: Any, **options: Any) -> Any:
        local = tensor._local_tensor if isinstance(tensor, api.DTensor) else tensor
        if isinstance(local, RemoteTensor):
            raise not_readable("to_dlpack()")
        return own(tensor, *args, **options)

    return to_dlpack


class _Memory:
    """Memory, which a controller's DTensor does not have: torch's own methods would read at an address.

    torch's modules ask a DTensor for its address to learn that it has none (`deepcopy`, `nn.LSTM`,
    `get_model_state_dict`). They get the 0 that they expect.
    """

    __slots__ = ()

    storage, share_memory_, __dlpack__, apply_, map_, map2_ = map(
        _memory, ("storage", "share_memory_", "__dlpack__", "apply_", "map_", "map2_")
    )
    __cuda_array_interface__ = _property("__cuda_array_interface__")

    def data_ptr(self) -> int:
        """Raise `NotReadableError`, but for torch's own modules."""
        if not _is_remote(self):
            return _Base.data_ptr(self)  # type: ignore[no-any-return]
        if _is_torch():
            return 0
        raise not_readable("data_ptr()")

    def untyped_storage(self: Any) -> Any:
        is_ours = _is_remote(self) and not _is_torch()
        return RemoteStorage(self, _Base.untyped_storage(self)) if is_ours else _Base.untyped_storage(self)

    def __setstate__(self, state: Any) -> Any:
        # `copy.copy` makes a tensor without __init__.
        made = torch._utils._set_obj_state(self, state)
        if _is_remote(self):
            no_pointer(self)
        return made


class _Methods(_Devices, _Values, _Memory, IndexMethods):
    __slots__ = ()
