"""Ways to a tensor's memory, of which a controller's DTensor has none: torch's own would take its address, and read.

Those of a RemoteTensor are its methods. torch itself asks a DTensor for the address to know that it has none
(`deepcopy`, `nn.LSTM`, `get_model_state_dict`), so its own modules get the 0 that they expect.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import dlpack

from monarch_backend.dtensor._controller.remote_storage import RemoteStorage
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor, no_pointer, not_readable
from monarch_backend.dtensor._torch_patches.device_mesh_and_api import Replacement, _is_remote, _replaces


def _is_torch() -> bool:
    """Whether who called the function that asks is one of torch's."""
    caller: str = sys._getframe(2).f_globals.get("__name__", "")
    return caller.partition(".")[0] == "torch"


@_replaces(DTensor, "data_ptr")
def _data_ptr(own: Any) -> Replacement:
    def data_ptr(self: Any) -> int:
        if not _is_remote(self):
            return own(self)  # type: ignore[no-any-return]
        if _is_torch():
            return 0
        raise not_readable("data_ptr()")

    return data_ptr


@_replaces(DTensor, "untyped_storage")
def _untyped_storage(own: Any) -> Replacement:
    def untyped_storage(self: Any) -> Any:
        return RemoteStorage(self, own(self)) if _is_remote(self) and not _is_torch() else own(self)

    return untyped_storage


@_replaces(DTensor, "storage", "share_memory_", "__dlpack__", "apply_", "map_", "map2_")
def _memory(own: Any) -> Replacement:
    name = own.__name__

    def memory(self: Any, *args: Any, **options: Any) -> Any:
        if _is_remote(self):
            raise not_readable(f"{name}()")
        return own(self, *args, **options)

    return memory


@_replaces(torch._utils, "_set_obj_state")
def _copied(own: Any) -> Replacement:
    # `copy.copy` makes one without __init__.
    def _set_obj_state(obj: Any, state: Any) -> Any:
        made = own(obj, state)
        if isinstance(made, DTensor) and _is_remote(made):
            no_pointer(made)
        return made

    return _set_obj_state


@_replaces(DTensor, "__cuda_array_interface__")
def _cuda_array_interface(own: Any) -> Any:
    return property(lambda self: self._local_tensor.__cuda_array_interface__ if _is_remote(self) else own.__get__(self))


@_replaces(dlpack, "to_dlpack")
@_replaces(torch, "to_dlpack")
def _to_dlpack(own: Any) -> Replacement:
    def to_dlpack(tensor: Any, *args: Any, **options: Any) -> Any:
        if isinstance(tensor, RemoteTensor) or (isinstance(tensor, DTensor) and _is_remote(tensor)):
            raise not_readable("to_dlpack()")
        return own(tensor, *args, **options)

    return to_dlpack
