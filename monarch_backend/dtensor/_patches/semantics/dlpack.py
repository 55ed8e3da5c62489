"""``to_dlpack``, which reads a tensor's memory in C++: an error for tensors of a controller."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._errors import not_readable


def to_dlpack(own: Any) -> Replacement:
    def to_dlpack(tensor: Any, *args: Any, **options: Any) -> Any:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if isinstance(local, RemoteTensor):
            raise not_readable("to_dlpack()")
        return own(tensor, *args, **options)

    return to_dlpack
