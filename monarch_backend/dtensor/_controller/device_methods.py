"""Methods of remote tensors and of a controller's DTensors that move them between devices.

They are in a separate module because dynamo traces them. In a trace a tensor has the device that C++ stores.
"""

from __future__ import annotations

from typing import Any

import torch

from monarch_backend.dtensor._controller.operations import operations

_Base: Any = torch.Tensor


class DeviceMethods:
    """Base class of tensors whose device is the workers'; C++ on the controller has them on the CPU."""

    __slots__ = ()

    def to(self, *args: Any, **options: Any) -> Any:
        """Convert as `torch.Tensor.to` does, on the workers. A device is one of theirs."""
        if torch.compiler.is_compiling() or (len(args) == 1 and not options and type(args[0]) is torch.dtype):
            return _Base.to(self, *args, **options)
        return operations.to(_Base.to, self, args, options)

    def cpu(self, memory_format: Any = torch.preserve_format) -> Any:
        """Move to the workers' CPUs, as `torch.Tensor.cpu` does on one process."""
        if torch.compiler.is_compiling():
            return _Base.cpu(self, memory_format=memory_format)
        return self.to("cpu", memory_format=memory_format)

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format) -> Any:
        """Move to the workers' GPUs, as `torch.Tensor.cuda` does. The number is ignored: each worker has one GPU."""
        if torch.compiler.is_compiling():
            return _Base.cuda(self, device, non_blocking, memory_format=memory_format)
        return self.to("cuda", non_blocking=non_blocking, memory_format=memory_format)

    def type_as(self, other: Any) -> Any:
        """Convert to the dtype and device of ``other``, as `torch.Tensor.type_as` does."""
        if torch.compiler.is_compiling():
            return _Base.type_as(self, other)
        return self.to(other.device, other.dtype)
