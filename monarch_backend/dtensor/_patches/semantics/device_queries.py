"""Replacements of torch's functions that ask this process for a GPU, where only the workers have any.

Each calls torch's own function where this process has a GPU itself, or is not a controller.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._controller.device_module import Event, Stream, XlaModule
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import device_moves, dispatch
from monarch_backend.process_group._c10d_patches import overriding


def stands_for_gpus() -> bool:
    """Whether "cuda" means the workers' here: this is a controller without a GPU."""
    return controller_process_group.is_controller() and not torch.cuda.is_available()


def controls(device_type: str) -> bool:
    """Whether there are workers with such devices."""
    return controller_process_group.is_controller() and any(
        each.device.type == device_type for each in controller_process_group.owners()
    )


def controls_others() -> bool:
    """Whether there are workers with devices that C++ takes for the CPU here."""
    return controls("cuda") or controls("xla")


def is_of_workers(device_type: str) -> bool:
    """Whether only workers have such devices, and some have."""
    return device_type in ("cuda", "xla") and not _is_here(device_type) and controls(device_type)


# Tensors that a program makes on "cuda" -------------------------------------------------------------------------


FACTORIES = (
    "empty.memory_format", "empty_strided", "zeros", "ones", "full", "arange", "arange.start", "arange.start_step",
    "linspace", "eye", "eye.m", "scalar_tensor", "tril_indices", "triu_indices",
)  # fmt: skip
"""Operators of aten that make a tensor on a named device."""
_libraries: dict[str, torch.library.Library] = {}


def register_factories(device_type: str) -> None:
    """Let factory operators make tensors of this device type on the workers; a second call does nothing.

    A build of torch for CPUs has no kernels there. Those of a build for GPUs could only fail without a GPU.
    """
    if device_type in _libraries or _is_here(device_type):
        return
    library = torch.library.Library("aten", "IMPL")
    with overriding():  # without such a device, the old kernels could only fail
        for name in FACTORIES:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(operator, _factory(operator, device_type), device_type.upper())
    for name in ("_fused_sgd_", "_fused_adagrad_"):
        # Their shapes are found by running them on a device that is missing here; they only change values.
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, lambda *_, **__: None, "Meta")
            library.impl(name + ".tensor_lr", lambda *_, **__: None, "Meta")
    if device_type == "xla" and not hasattr(torch, "xla"):
        torch._register_device_module("xla", XlaModule())
    _libraries[device_type] = library
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(1.0, device=...): made here, then sent
    torch._C._ensureCUDADeviceGuardSet()  # there is no device to switch to, but a program may name "cuda"


def _is_here(device_type: str) -> bool:
    return torch.cuda.is_available() if device_type == "cuda" else "torch_xla" in sys.modules


def _factory(operator: Any, device_type: str) -> Any:
    kept = ("dtype", "device", "memory_format")

    def make(*args: Any, **options: Any) -> Any:
        device = options.get("device") or torch.device(device_type)
        workers = device_moves.workers_of_factory(device)
        given = {name: each for name, each in options.items() if name in kept and each is not None}
        if "dtype" not in given and not operator._schema.name.startswith(("aten::arange", "aten::full", "aten::tri")):
            given["dtype"] = torch.get_default_dtype()
        return dispatch.create(workers, operator, args, {**given, "device": workers.device})

    return make


# Streams, events, the device ------------------------------------------------------------------------------------


def _if_missing(other: Callable[..., Any]) -> Callable[[Any], Replacement]:
    return lambda own: lambda *args, **options: (other if stands_for_gpus() else own)(*args, **options)


_stream = Stream()
_the_stream = _if_missing(lambda *_, **__: _stream)
_current_device = _if_missing(lambda: 0)
_set_device = _if_missing(lambda device: None)  # noqa: ARG005 -- each worker has set its own
_exchange = _if_missing(lambda device: -1)  # noqa: ARG005 -- ``with torch.cuda.device(...)``, which then restores none


def _new(own: Any) -> Replacement:
    def __new__(cls: Any, *args: Any, **options: Any) -> Any:
        if stands_for_gpus():
            return (Event if issubclass(cls, torch.cuda.Event) else Stream)()
        return own(cls, *args, **options)

    return __new__


def _synchronize(own: Any) -> Replacement:
    def synchronize(device: Any = None) -> Any:
        for workers in controller_process_group.owners() if controller_process_group.is_controller() else ():
            if workers.device.type == "cuda":
                workers.synchronize()
        return None if stands_for_gpus() else own(device)

    return synchronize


def _device_module(own: Any) -> Replacement:
    def _get_device_module(device: str = "cuda") -> Any:
        # It saves the random numbers of the workers' GPUs; torch.cuda would report no GPUs.
        return _checkpointed if device == "cuda" and stands_for_gpus() else own(device)

    return _get_device_module


_checkpointed = types.SimpleNamespace(
    _initialized=True,
    device=lambda _: contextlib.nullcontext(),  # there is no device to switch to
    get_rng_state=lambda: torch.cuda.get_rng_state(),
    set_rng_state=lambda state: torch.cuda.set_rng_state(state),
)
"""Module like torch.cuda, for an activation checkpoint. torch's functions are replaced later."""


# Modules --------------------------------------------------------------------------------------------------------


def _module_to(own: Any) -> Replacement:
    def to(self: Any, *args: Any, **options: Any) -> Any:
        if not stands_for_gpus() and not (controller_process_group.is_controller() and "xla" in _libraries):
            return own(self, *args, **options)
        # Torch without GPUs knows only devices with a number; with one, it asks for a tensor there.
        args = tuple(_with_number(each) for each in args)
        options = {name: _with_number(each) for name, each in options.items()}
        # A parameter of this process would take the memory of a remote tensor, which has none.
        is_on_workers = any(isinstance(each, (RemoteTensor, DTensor)) for each in _tensors_of(self))
        changes_class = is_on_workers or _is_to_workers((*args, *options.values()))
        with _swapping() if changes_class else contextlib.nullcontext():
            return own(self, *args, **options)

    return to


def _is_to_workers(given: Any) -> bool:
    devices = [each.device if isinstance(each, torch.Tensor) else each for each in given]
    return any(isinstance(each, torch.device) and is_of_workers(each.type) for each in devices)


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def _module_cuda(own: Any) -> Replacement:
    return lambda self, device=None: self.to("cuda") if stands_for_gpus() else own(self, device)


@contextlib.contextmanager
def _swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _with_number(value: Any) -> Any:
    kind = torch.device(value).type if isinstance(value, (str, torch.device)) else ""
    return torch.device(kind, 0) if kind in ("cuda", "xla") else value


# Mixed precision ------------------------------------------------------------------------------------------------


def _no_amp(own: Any) -> Replacement:
    return lambda: own() and not controls("cuda")


def _bf16(own: Any) -> Replacement:
    return lambda *args, **options: (controls("cuda") and stands_for_gpus()) or own(*args, **options)
