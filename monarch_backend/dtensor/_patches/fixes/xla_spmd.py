"""Functions of torch's that take any mesh of XLA devices for one of torch_xla's SPMD mode, without this case.

In that mode one process has all devices, and a mesh no groups. Ours have one process for each device.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _api as api

FUNCTIONS = (DeviceMesh.__init__, api.distribute_tensor, api.distribute_module)
"""Each compares the device's type with "xla" once."""


def without_spmd(function: Any) -> Any:
    """The same for all devices; another function."""
    made = types.FunctionType(
        _code(function), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def leave_out_spmd() -> None:
    """Of all of them, for whoever calls them in this process: a worker's, which has nothing to do with that mode."""
    for function in FUNCTIONS:
        function.__code__ = _code(function)
    own = device_mesh._get_device_handle
    device_mesh._get_device_handle = lambda device_type="cuda": handle_for(own, device_type)


def handle_for(own: Any, device_type: str) -> Any:
    """What torch asks how many devices a host has, to guess what collectives cost: for XLA it has nothing to ask."""
    return torch.cpu if device_type == "xla" else own(device_type)


def _code(function: Any) -> types.CodeType:
    code: types.CodeType = function.__code__
    return code.replace(co_consts=tuple("no device" if each == "xla" else each for each in code.co_consts))
