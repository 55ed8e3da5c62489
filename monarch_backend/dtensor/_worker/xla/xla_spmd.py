"""Copies of torch's functions that treat every mesh of XLA devices as torch_xla's SPMD mode, without this case.

In that mode one process has all devices, and a mesh has no groups. Our meshes have one process for each device.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _api as api

FUNCTIONS = (DeviceMesh.__init__, api.distribute_tensor, api.distribute_module)
"""Functions that compare the device's type with "xla" once."""


def without_spmd(function: Any) -> Any:
    """Return a copy of a function that treats all devices alike."""
    made = types.FunctionType(
        _code(function), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def leave_out_spmd() -> None:
    """Install the copies for this process's callers: a worker's process does not use that mode."""
    for function in FUNCTIONS:
        function.__code__ = _code(function)
    own = device_mesh._get_device_handle
    device_mesh._get_device_handle = lambda device_type="cuda": handle_for(own, device_type)


def handle_for(own: Any, device_type: str) -> Any:
    """Return the module by which torch counts a host's devices to estimate costs; XLA has none."""
    return torch.cpu if device_type == "xla" else own(device_type)


def _code(function: Any) -> types.CodeType:
    code: types.CodeType = function.__code__
    return code.replace(co_consts=tuple("no device" if each == "xla" else each for each in code.co_consts))
