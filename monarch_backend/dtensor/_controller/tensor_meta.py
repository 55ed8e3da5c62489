"""Metadata of tensors on the workers: shape, strides, dtype, device. Interned: equal metadata are one object.

There are no ids and no messages here. Shards of unequal sizes are classes of ranks with equal metadata, to avoid loops
over ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from monarch_backend.dtensor._controller import remote_tensor
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._per_rank import per_rank_int

if TYPE_CHECKING:
    from monarch_backend.dtensor._controller.worker_set import WorkerSet
    from monarch_backend.dtensor._per_rank.shard_origins import Origin

Sizes = tuple[Any, ...]
_CPU = torch.device("cpu")


class Meta:
    """Metadata of one tensor. ``shape`` and other attributes are torch's; ints that differ by rank are SymInts.

    ``classes``: None if all ranks have the same. Otherwise it lists the different metadata: rank r has
    ``classes[of_rank[r]]``, or nothing if that is -1.
    """

    __slots__ = (
        "__weakref__",
        "classes",
        "device",
        "dtype",
        "form",
        "nbytes",
        "of_rank",
        "offset",
        "origin",
        "shape",
        "shown",
        "stride",
        "workers",
    )  # fmt: skip

    workers: WorkerSet
    shape: Sizes
    stride: Sizes
    offset: Any
    dtype: torch.dtype
    device: torch.device
    shown: torch.device
    """Device in torch's C++. A controller without a GPU can run autograd only for the CPU and meta."""
    classes: tuple[Meta, ...] | None
    of_rank: tuple[int, ...]
    form: tuple[Any, ...]
    """Arguments of torch's constructor for a tensor of this metadata."""
    origin: Origin | None
    """Origin of a plain tensor that is computed from a DTensor's shard. None: replicated."""
    nbytes: int
    """Bytes of its elements, on the rank that has the most; 0 if they have no memory."""

    def on(self, rank: int) -> Meta | None:
        if self.classes is None:
            return self
        which = self.of_rank[rank]
        return None if which < 0 else self.classes[which]

    @property
    def outside(self) -> frozenset[int]:
        return frozenset(rank for rank, which in enumerate(self.of_rank) if which < 0)

    def __repr__(self) -> str:
        return f"Meta({self.shape}, {self.dtype}, {self.device})"


class MetaCache:
    def __init__(self, workers: WorkerSet) -> None:
        self._workers = workers
        # Tensors and signatures keep the metadata that they use.
        self._same: weakref.WeakValueDictionary[Any, Meta] = weakref.WeakValueDictionary()
        self._by_rank: weakref.WeakValueDictionary[tuple[Meta | None, ...], Meta] = weakref.WeakValueDictionary()

    def same(
        self, shape: Sizes, stride: Sizes, offset: Any, dtype: torch.dtype, device: torch.device,
        origin: Origin | None = None,
    ) -> Meta:  # fmt: skip
        if device.type == self._workers.device.type:
            device = self._workers.device  # a worker has one
        key = (shape, stride, offset, dtype, device, origin)
        found = self._same.get(key)
        if found is None:
            found = Meta()
            found.workers, found.classes, found.of_rank = self._workers, None, ()
            found.shape, found.stride, found.offset, found.dtype, found.device, found.origin = key
            found.shown = device if device.type == "meta" else _CPU
            found.form = remote_tensor.form_of(found)
            found.nbytes = 0 if device.type == "meta" else math.prod(shape) * dtype.itemsize
            self._same[key] = found
        return found

    def with_origin(self, meta: Meta, origin: Origin | None) -> Meta:
        if meta.origin == origin:
            return meta
        if meta.classes is None:
            return self.same(meta.shape, meta.stride, meta.offset, meta.dtype, meta.device, origin)
        each = [self.with_origin(one, origin) for one in meta.classes]
        return self.by_rank([None if which < 0 else each[which] for which in meta.of_rank])

    def like(self, tensor: torch.Tensor, device: torch.device | None = None, origin: Origin | None = None) -> Meta:
        refuse_sparse(tensor)
        where = device or tensor.device
        return self.same(
            tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype, where, origin
        )

    def sent(self, tensor: torch.Tensor, device: torch.device) -> Meta:
        """Return the metadata of a tensor of this process after it was sent: a new storage, with offset 0."""
        return self.same(tuple(tensor.shape), tuple(tensor.stride()), 0, tensor.dtype, device)

    def by_rank(self, metas: Sequence[Meta | None]) -> Meta:
        """Return metadata for each rank's, or None. Raises ValueError if they differ in more than sizes."""
        key = tuple(metas)
        found = self._by_rank.get(key)
        if found is None:
            found = self._by_rank[key] = self._combine(key)
        return found

    def _combine(self, metas: tuple[Meta | None, ...]) -> Meta:
        classes = list(dict.fromkeys(meta for meta in metas if meta is not None))
        if len(classes) == 1 and None not in metas:
            return classes[0]
        kinds = {(each.dtype, len(each.shape)) for each in classes}
        if len(kinds) != 1:
            raise ValueError(f"tensors of ranks must have one dtype and number of dimensions, these have {kinds}")
        found, first = Meta(), classes[0]
        found.workers, found.dtype, found.device = self._workers, first.dtype, first.device
        found.shown, found.origin = first.shown, first.origin
        found.classes = tuple(classes)
        found.of_rank = tuple(-1 if meta is None else classes.index(meta) for meta in metas)
        found.shape = tuple(_int(metas, lambda meta, d=d: meta.shape[d]) for d in range(len(first.shape)))
        found.stride = tuple(_int(metas, lambda meta, d=d: meta.stride[d]) for d in range(len(first.shape)))
        found.offset = _int(metas, lambda meta: meta.offset)
        found.form = remote_tensor.form_of(found)
        found.nbytes = max(each.nbytes for each in classes)
        return found


def refuse_sparse(tensor: torch.Tensor) -> None:
    """Raise RemoteTensorError for a sparse tensor: shards, commands and messages need tensors with strides."""
    if tensor.layout is not torch.strided:
        raise RemoteTensorError(
            f"a tensor with layout {tensor.layout}: those of the workers of one controller are dense. Use its "
            "to_dense(), nn.Embedding(sparse=False), or run what needs it on the workers "
            "(monarch_backend.dtensor.run)"
        )


def _int(metas: Sequence[Meta | None], of: Any) -> Any:
    return per_rank_int.by_rank([None if meta is None else of(meta) for meta in metas], sizes=True)
