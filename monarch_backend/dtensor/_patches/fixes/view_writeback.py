"""Write-back for rows of a tensor that is sharded by rows (``x[1:]``), which torch gathers into a copy.

For the program and autograd the result is a view. A write into it (``x[1:] = 0``) must change ``x``, but torch changes
the copy. Here the tensor behind the copy is written, too. A write into that tensor, directly or through another copy,
also updates all its existing copies. An index of several parts (``x[1:, 0] = 0``), or of rows of rows (``x[1:][0] =
0``), is a view of such a copy: its ``_through`` is the copy.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _dispatch as op_dispatch
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.weak import WeakIdKeyDictionary

from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import op_signatures
from monarch_backend.dtensor._errors import RemoteTensorError

_Base: Any = torch.Tensor


class _Taken:
    """Origin of a copy. ``place``: its index among several (``x.split(2)``); ``placements``: of the gathered tensor.

    ``version``: of the source, and of writes into the copy since.
    """

    def __init__(self, func: Any, args: Any, placements: Any, place: int | None) -> None:
        self.func, self.args, self.placements, self.place = func, args, placements, place
        self.version = _version(args[0])
        self.spec: Any = None  # of the copy

    def check(self) -> None:
        """Raise RemoteTensorError if the copy's source has changed, because a write-back would overwrite its rows."""
        if _version(self.args[0]) > self.version:
            raise RemoteTensorError(
                f"these rows are a copy ({self.func}), because each rank had a part of them, and their tensor has "
                "changed since. Index it again before you change them"
            )


_copies: Any = WeakIdKeyDictionary()
"""By the source's local tensor: the local tensors of its copies, weakly, by id, oldest first."""


class _Indexing(threading.local):
    copies: list[Any] | None = None


_indexing = _Indexing()
"""``copies``: made by this thread's present index, and not written back yet."""


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _note_copies(own: Any) -> Replacement:
    def _dispatch_get_local_results_slow_path(self: Any, op_call: Any, args: Any, op_info: Any) -> Any:
        results = own(self, op_call, args, op_info)
        sharding = op_info.output_sharding
        if (
            sharding.needs_redistribute
            and op_call._schema._is_view_op()
            and controller_mesh.workers_of(op_info.compute_mesh)
        ):
            gathered = sharding.redistribute_schema.args_spec[0].placements
            if gathered != args[0].placements:
                note(_Taken(op_call, tuple(args), gathered, None), results, sharding.output_spec)
        return results

    return _dispatch_get_local_results_slow_path


def note(taken: _Taken, locals_: Any, specs: Any) -> None:
    """Record that these local tensors, of one result or several, are copies."""
    if isinstance(locals_, (list, tuple)):
        for place, (local, spec) in enumerate(zip(locals_, specs, strict=True)):
            note(_Taken(taken.func, taken.args, taken.placements, place), local, spec)
        return
    locals_._taken, taken.spec = taken, specs
    base = _base(taken.args[0])._local_tensor
    base._copied = _copies.setdefault(base, {})  # a fast lookup: each operation in place uses it
    _keep(base._copied, locals_)
    if _indexing.copies is not None:
        _indexing.copies.append(DTensor(locals_, specs, requires_grad=False))


def _keep(kept: dict[int, Any], copy: Any) -> None:
    key = id(copy)
    kept[key] = weakref.ref(copy, lambda _: kept.pop(key, None))


class IndexMethods:
    """Base class of DTensor: an index of a controller's DTensor records copies, and writes them back."""

    __slots__ = ()

    def __getitem__(self: Any, index: Any) -> Any:
        if not _is_ours(self):
            return _Base.__getitem__(self, index)
        before, _indexing.copies = _indexing.copies, []
        try:
            found = _Base.__getitem__(self, index)
            copies = _indexing.copies
        finally:
            _indexing.copies = before
        if not copies and _source(self._local_tensor) is None:
            return found
        for earlier, later in itertools.pairwise(copies):
            between = later._local_tensor._taken.args[0]._local_tensor
            if _source(between) is None:
                between._through = earlier
        last = copies[-1] if copies else self if _source(self._local_tensor) is not None else None
        is_copy = hasattr(found._local_tensor, "_taken") or not (found._is_view() or found.is_inference())
        if last is not None and not is_copy and found is not self:
            found._local_tensor._through = last
        return found

    def __setitem__(self: Any, index: Any, value: Any) -> None:
        if not _is_ours(self):
            _Base.__setitem__(self, index, value)
            return
        before, _indexing.copies = _indexing.copies, []
        chain = _chain(self)
        for taken, _ in chain:
            taken.check()
        try:
            _Base.__setitem__(self, index, value)
            copies = _indexing.copies
        finally:
            _indexing.copies = before
        with torch.no_grad():
            for copy in reversed(copies):
                _written(copy._local_tensor._taken, copy)
            for taken, copy in chain:
                _written(taken, copy)
                taken.version = _version(taken.args[0])
            if _indexing.copies is None:
                _write_through(chain[-1][0].args[0] if chain else self)
            _renew(self, 0, [each._local_tensor for each in (*copies, *(copy for _, copy in chain))])


def _is_ours(tensor: Any) -> bool:
    return controller_mesh._is_remote(tensor) or controller_mesh._is_traced(tensor)


def _source(local: Any) -> Any:
    return getattr(local, "_taken", None) or getattr(local, "_through", None)


def _chain(tensor: Any) -> list[tuple[_Taken, Any]]:
    """Return what must be written after this tensor: (origin, copy) pairs, up to a tensor that is not a copy."""
    found = []
    while (source := _source(tensor._local_tensor)) is not None:
        if isinstance(source, _Taken):
            found.append((source, tensor))
            tensor = source.args[0]
        else:
            tensor = source
    return found


def _after_each(own: Any) -> Replacement:
    def _dispatch_fast_path_python_tail(
        self: Any, op_call: Any, args: Any, kwargs: Any, mesh: Any, sharding: Any, results: Any, participating: Any,
        is_inplace_op: Any, is_out_variant_op: Any,
    ) -> Any:  # fmt: skip
        if is_inplace_op and _changes_first_only(op_call) and _is_alone(args[0]):
            spec = sharding.output_spec
            stays = type(spec) is DTensorSpec and spec.placements == args[0]._spec.placements
            if stays and op_dispatch.get_active_debug_mode() is None:
                return args[0]  # as torch's own, without a write-back
        result = own(
            self, op_call, args, kwargs, mesh, sharding, results, participating, is_inplace_op, is_out_variant_op
        )
        write_back(op_call, args, kwargs)
        return result

    return _dispatch_fast_path_python_tail


@functools.cache
def _changes_a_list(op_call: Any) -> bool:
    return op_call._schema.name.startswith("aten::_foreach_") and _changes(op_call)


@functools.cache
def _changes(op_call: Any) -> bool:
    return bool(op_call._schema.is_mutable)


@functools.cache
def _changes_first_only(op_call: Any) -> bool:
    return [at for at, _ in op_signatures._writes(op_call._schema)] == [0]


def _is_alone(tensor: Any) -> bool:
    """Whether it shares its values with no other tensor that is known here."""
    if type(tensor) is not DTensor or type(tensor._local_tensor) is not RemoteTensor:
        return False
    marks = tensor._local_tensor.__dict__
    return not ("_taken" in marks or "_through" in marks or marks.get("_copied") or tensor._is_view())


def write_back(op_call: Any, args: Any, kwargs: Any) -> None:
    """Write what this operator has changed in copies into their sources."""
    if not _changes(op_call):
        return
    written = op_signatures.written(op_call._schema, args, kwargs or {})
    ours = {id(each): each for each in written if isinstance(each, DTensor) and _is_ours(each)}
    chains = [_chain(each) for each in ours.values()]
    steps = [step for chain in chains for step in chain]
    for taken, _ in steps:
        taken.check()
    behind = 1  # torch increments it after this, except for lists
    if _changes_a_list(op_call):
        behind = 0
        counted = (each for each in ours.values() if controller_mesh._is_remote(each) and not each.is_inference())
        torch.autograd.graph.increment_version(list(counted))
    for taken, copy in steps:
        with torch.no_grad():
            _written(taken, copy)
        taken.version = taken.version + 1 if behind else _version(taken.args[0])
        if _indexing.copies is not None:
            _indexing.copies = [each for each in _indexing.copies if each._local_tensor is not copy._local_tensor]
    if _indexing.copies is None:
        with torch.no_grad():  # after all writes: another's copy may be among them
            for changed, chain in zip(ours.values(), chains, strict=True):
                _write_through(chain[-1][0].args[0] if chain else changed)
            for changed in ours.values():
                _renew(changed, behind, [copy._local_tensor for _, copy in steps])


def _base(tensor: Any) -> Any:
    """Return the tensor that it is a view of for autograd, or the source of the copy, whose rows it may have."""
    base = tensor._base if tensor._is_view() else tensor
    return base if isinstance(base, DTensor) else tensor


def _renew(changed: Any, behind: int, but: Iterable[Any]) -> None:
    """Update copies other than these from their sources. ``behind``: changes that autograd has not counted yet."""
    kept = _copies.get(_base(changed)._local_tensor) if _copies else None
    if kept is None:
        return
    known, gathered = set(map(id, but)), dict[Any, Any]()
    for copy in [each() for each in list(kept.values())]:
        if copy is not None and id(copy) not in known:
            taken = copy._taken
            key = id(taken.args[0]), taken.placements  # of a copy that is updated by now, and older
            if key not in gathered:
                gathered[key] = _as_placed(taken.args[0], taken.placements)
            view = _retaken(taken, gathered[key])
            copy.copy_(_as_placed(view, taken.spec.placements)._local_tensor)
            taken.version = _version(taken.args[0]) + behind


def _write_through(changed: Any) -> None:
    """Write through a view that C++ has made of copies, as autograd does in the backward of ``x[1:, 0] = 0``."""
    base = changed._base if changed._is_view() else None
    if not isinstance(base, DTensor) or not _is_ours(base) or all(p.is_replicate() for p in base.placements):
        return
    _indexing.copies = []
    try:
        again = changed._view_func_unsafe(base)
        copies = _indexing.copies
    finally:
        _indexing.copies = None
    if copies:
        again._local_tensor.copy_(_as_placed(changed, again.placements)._local_tensor)
    for copy in reversed(copies):
        _written(copy._local_tensor._taken, copy)


def _written(taken: _Taken, copy: Any) -> None:
    """Write below autograd, which takes the copy for a view and has a gradient for the write already."""
    source = taken.args[0]
    whole = _as_placed(source, taken.placements)
    view = _retaken(taken, whole)
    view._local_tensor.copy_(_as_placed(copy, view.placements)._local_tensor)
    source._local_tensor.copy_(_as_placed(whole, source.placements)._local_tensor)


def _retaken(taken: _Taken, whole: Any) -> Any:
    view = taken.func(whole, *taken.args[1:])
    return view if taken.place is None else view[taken.place]


def _as_placed(tensor: Any, placements: Any) -> Any:
    spec = DTensorSpec(tensor.device_mesh, placements, tensor_meta=tensor._spec.tensor_meta)
    local = tensor._local_tensor
    if tensor.placements != placements:
        local = redistribution.redistribute_local_tensor(local, tensor._spec, spec)
    return DTensor(local, spec, requires_grad=False)
