"""`RemoteTensor`: on the controller, the tensor that every worker holds under one id, with metadata and the id only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from monarch_backend import _native
from monarch_backend.dtensor._controller import fetch
from monarch_backend.dtensor._controller.device_methods import DeviceMethods
from monarch_backend.dtensor._controller.operations import operations
from monarch_backend.dtensor._controller.remote_storage import RemoteStorage
from monarch_backend.dtensor._errors import not_readable
from monarch_backend.dtensor._torch_internals import invalid_access as invalid_access  # the import sets up no_pointer

if TYPE_CHECKING:
    from monarch_backend.dtensor._controller.tensor_meta import Meta

make = torch.Tensor._make_wrapper_subclass
no_pointer = _native.no_pointer
_set_data: Any = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


Ref = _native.Ref
"""Reference to a tensor of the workers by its id. When it is dropped here, the next batch deletes the tensor there.

``nbytes``: of the storage, where a `RemoteStorage` has changed it; else it has no such attribute.
"""


def form_of(meta: Meta) -> tuple[Any, ...]:
    """Return the arguments of torch's constructor for this metadata. Keyword arguments would take 0.3 us."""
    strided = None, meta.dtype, torch.strided, meta.shown
    if meta.classes is None:
        return (RemoteTensor, meta.shape, meta.stride, meta.offset, *strided)
    return (RemoteTensor, meta.shape, meta.stride, None, *strided, False, False, "sizes")


class RemoteTensor(DeviceMethods, torch.Tensor):
    """A tensor of the workers of a mesh, one on each. Operations make it; there is no public constructor.

    As a DTensor's local tensor it is the shard of each rank. ``shape`` and ``dtype`` are those on the workers; a branch
    on a size that differs by rank raises RankDependentError. Reading a value (``.item()``, ``.tolist()``, ``print``)
    waits for the workers and takes it from the first of them. Nothing else waits.

    Reading raises RemoteOpError if an operation before it failed on a worker, and MeshClosedError if the processes have
    ended. Code that needs the memory itself raises NotReadableError.

    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from monarch_backend.dtensor import simulated_mesh
    >>> x = distribute_tensor(torch.ones(4, 2), simulated_mesh((2,), ("dp",)), [Shard(0)])
    >>> local = x.to_local()
    >>> type(local).__name__, tuple(local.shape), local.dtype
    ('RemoteTensor', (2, 2), torch.float32)
    >>> local.data_ptr()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    monarch_backend.dtensor.NotReadableError: data_ptr(): this tensor's memory is in other processes. ...
    """

    _ref: Ref
    _meta: Meta

    @staticmethod
    def __new__(cls, meta: Meta, ref: Ref) -> RemoteTensor:
        """The results of operations are made by csrc/records/controller_dispatch.cpp, in the same way."""
        if torch.is_inference_mode_enabled():  # a view of a tensor from outside must be a normal tensor as well
            with torch.inference_mode(False):
                return RemoteTensor(meta, ref)
        made = make(*meta.form)
        no_pointer(made)  # C++ code that needs the memory gets an error
        made._ref, made._meta = ref, meta
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if len(types) > 1 and DTensor in types:
            return _beside_dtensors(func, args, kwargs or {})
        return _dispatch(func, args, kwargs)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on each worker: its own "cuda:0" on GPUs."""
        return self._meta.shown if _in_a_trace else self._meta.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether the workers' device is a GPU."""
        return self._meta.device.type == "cuda"

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether it has no values on the workers either."""
        return self._meta.device.type == "meta"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """Whether the workers' device is the CPU."""
        return self._meta.device.type == "cpu"

    def pin_memory(self, device: Any = None) -> Any:
        """Return it in pinned memory of the workers, if they have GPUs."""
        return operations.pinned(self)

    def wait(self) -> RemoteTensor:
        """Return the tensor: workers wait for a collective when its result is used.

        torch's functional collectives return an `AsyncCollectiveTensor`, which has this method.
        """
        return self

    def record_stream(self, _stream: Any) -> None:
        """Do nothing: a worker has one stream, so memory is never freed before its last use."""

    def get_device(self) -> int:
        """Return the number of the workers' GPU, which is 0 on each; -1 on a CPU."""
        index = self._meta.device.index
        return -1 if index is None else index

    def untyped_storage(self) -> Any:
        """Return the storage on the workers. Its memory can't be read here."""
        return RemoteStorage(self, super().untyped_storage())

    def __coerce_same_metadata_as_tangent__(self, _metadata: Any, _type: Any = None) -> RemoteTensor:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied  # type: ignore[return-value]

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return fetch.as_host(self).__reduce_ex__(_protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return fetch.text_of(self)

    def data_ptr(self) -> int:
        """Raises NotReadableError: the address is one in another process."""
        raise not_readable("data_ptr()")

    def storage(self) -> Any:
        """Raises NotReadableError; use `untyped_storage`."""
        raise not_readable("storage()")

    _typed_storage = storage

    def share_memory_(self) -> Any:
        """Raises NotReadableError: the memory belongs to the workers."""
        raise not_readable("share_memory_()")

    def is_shared(self) -> bool:
        """Return False: no process outside the mesh shares it."""
        return False

    def __dlpack__(self, **_: Any) -> Any:
        """Raises NotReadableError: a consumer would share the memory."""
        raise not_readable("__dlpack__()")

    def apply_(self, _function: Any) -> Any:
        """Raises NotReadableError: it would call a function of this process for each number."""
        raise not_readable("apply_()")

    def map_(self, *_: Any) -> Any:
        """Raises NotReadableError, as `apply_` does."""
        raise not_readable("map_()")

    map2_: Any = map_

    @property
    def __cuda_array_interface__(self) -> Any:
        """Raises NotReadableError; of what is on no GPU, AttributeError, as numba and its like expect."""
        if not self.is_cuda:
            raise AttributeError("__cuda_array_interface__ of a tensor that is on no GPU")
        raise not_readable("__cuda_array_interface__")

    @property
    def data(self) -> torch.Tensor:
        """The same values without autograd history. Assignment replaces the tensor on the workers."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, RemoteTensor):
            other = self._meta.workers.put(other)
        _set_data(self, other)
        self._ref, self._meta = other._ref, other._meta

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 and spec else repr(self)

    def tolist(self) -> Any:
        """Return the first worker's values as nested lists. Waits for the workers."""
        return fetch.as_host(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the first worker's values as a NumPy array of the same shape. Waits for the workers."""
        return fetch.as_host(self).numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)


def _beside_dtensors(func: Any, args: Any, kwargs: Any) -> Any:
    """Leave operations with DTensors to DTensor, except for those that change a plain tensor of workers."""
    written = func._schema.arguments[0].alias_info
    if written is None or not written.is_write or not isinstance(args[0], RemoteTensor):
        return NotImplemented
    args, kwargs = pytree.tree_map_only(DTensor, lambda each: each.full_tensor(), (args, kwargs))
    return _dispatch(func, args, kwargs)


_in_a_trace = False


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """In this context Python sees the device that C++ has: a trace for another device would need that device here."""
    global _in_a_trace
    before, _in_a_trace = _in_a_trace, True
    try:
        yield
    finally:
        _in_a_trace = before


_dispatch: Any = None
"""Implementation of __torch_dispatch__. _dispatch/dispatch.py sets it, because it imports this module."""


def set_dispatch(function: Any) -> None:
    global _dispatch
    _dispatch = function
