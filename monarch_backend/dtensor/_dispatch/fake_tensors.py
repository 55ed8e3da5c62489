"""Fake tensors: the metadata of an operation's results, found by running it on tensors without values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.tensor_meta import Meta
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._torch_internals import tracing_state
from monarch_backend.dtensor._worker import storage

_CPU = torch.device("cpu")
_fake = FakeTensorMode()
_fake.cache_enabled = False  # its cache keeps all entries without limit; callers here have their own caches
fake_like = _fake.from_tensor
one_at_a_time = threading.RLock()
"""Lock for all uses of fake tensors: the device that one reports depends on the state of their common mode."""
stands_in: dict[Any, Callable[..., Any]] = {storage.resize: lambda *_: None}  # tensors here have no storage
"""Shape functions of operators whose own shape function needs this process's rank or memory."""


class Operand:
    """Placeholder of a tensor, for a class of ranks."""

    __slots__ = ("meta",)

    def __init__(self, meta: Meta | None) -> None:
        self.meta = meta


def meta_of(value: Any) -> Meta | None:
    return value._meta if isinstance(value, RemoteTensor) else value.meta if isinstance(value, Operand) else None


def out_sizes(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Return the tensors into which an operator writes results, with the results' sizes."""
    fakes: list[tuple[Any, Any]] = []

    def fake(value: Any) -> Any:
        meta = meta_of(value)
        if meta is None and not isinstance(value, torch.Tensor):
            return value
        made = fake_like(value) if meta is None else fake_of(meta, _CPU)  # sizes are the same on all devices
        fakes.append((value, made))
        return made

    with one_at_a_time:
        fake_args, fake_kwargs = pytree.tree_map(fake, (args, kwargs))
        propagate(func, fake_args, fake_kwargs, _CPU)
        outs = {each.name for each in func._schema.arguments if each.is_out}
        given = pytree.tree_leaves([value for name, value in kwargs.items() if name in outs])
        return [(value, tuple(made.shape)) for value, made in fakes if any(value is each for each in given)]


def propagate_there(workers: WorkerSet, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run `propagate` on fake tensors of the workers' device, where the results are, too."""
    metas = workers.metas
    result, device = propagate_with_device(workers, call, args, kwargs)
    if device is None:
        return result
    return pytree.tree_map_only(torch.Tensor, lambda each: fake_of(metas.like(each, device)), result)


def propagate_with_device(
    workers: WorkerSet, call: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, torch.device | None]:
    """Return the results on fake tensors, and their device if it is not the one that they report."""
    try:
        return propagate(call, args, kwargs), None
    except RuntimeError as error:
        # Some of torch's C++ switches to the device, which fails in a build without it.
        if "not linked with support" not in str(error) or not _are_on(workers.device, args, kwargs):
            raise
        metas = workers.metas
        args, kwargs = pytree.tree_map_only(FakeTensor, lambda each: Operand(metas.like(each)), (args, kwargs))
        return propagate(call, args, kwargs, _CPU), workers.device


def _are_on(device: torch.device, args: Any, kwargs: Any) -> bool:
    """Whether no tensor among the arguments is on another device, or is to be."""
    leaves = [meta_of(each) or each for each in pytree.tree_leaves((args, kwargs))]
    devices = [each if isinstance(each, torch.device) else getattr(each, "device", device) for each in leaves]
    return all(each.type == device.type for each in devices)


def propagate(call: Callable[..., Any], args: Any, kwargs: Any, device: torch.device | None = None) -> Any:
    """Return the results on fake tensors of ``device``, or of the arguments'. Raises what torch would raise."""

    def fake(value: Any) -> Any:
        if device is not None and isinstance(value, torch.device):
            return device
        meta = meta_of(value)
        return value if meta is None else fake_of(meta, device)

    # Modes of the program, such as torch.set_default_device, must not apply here.
    with one_at_a_time, torch._C.DisableTorchFunction(), torch.no_grad():
        args, kwargs = pytree.tree_map(fake, (args, kwargs))
        with tracing_state.quiet, _fake:
            return stands_in.get(call, call)(*args, **kwargs)


def fake_of(meta: Meta, device: torch.device | None = None) -> FakeTensor:
    return FakeTensor(_fake, _without_values(meta), device or meta.device)


def _without_values(meta: Meta) -> torch.Tensor:
    if not meta.offset or 0 in meta.shape:
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    length = meta.offset + 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride, strict=True))
    return torch.empty(length, dtype=meta.dtype, device="meta").as_strided(meta.shape, meta.stride, meta.offset)
