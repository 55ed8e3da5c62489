"""Seeds of GPUs, and modules of devices, which only the workers may have."""

from __future__ import annotations

import functools
from typing import Any

import torch

from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._controller.controller_mesh import Replacement
from monarch_backend.dtensor._controller.device_module import DeviceHandle
from monarch_backend.dtensor._rng import philox
from monarch_backend.dtensor._worker.xla.xla_spmd import handle_for


def _handle(own: Any) -> Replacement:
    @functools.cache
    def made(device_type: str) -> Any:
        return DeviceHandle(handle_for(own, device_type))

    def _get_device_handle(device_type: str = "cuda") -> Any:
        is_ours = device_type != "cpu" and controller_process_group.is_controller()
        return made(device_type) if is_ours else own(device_type)

    return _get_device_handle


def _skip_init_on_controller(own: Any) -> Replacement:
    def _lazy_init() -> None:
        # Each function of torch with a device argument calls it, also for the workers' device.
        if torch.cuda.is_available() or not controller_process_group.is_controller():
            own()

    return _lazy_init


def _seeding(own: Any) -> Replacement:
    def manual_seed(seed: int) -> None:  # torch.manual_seed() calls it
        philox.default.manual_seed(int(seed))
        own(seed)

    return manual_seed


def _get_rng_state(own: Any) -> Replacement:
    return lambda *device, **named: own(*device, **named) if torch.cuda.is_available() else philox.default.get_state()


def _set_rng_state(own: Any) -> Replacement:
    def set_rng_state(new_state: torch.Tensor, *device: Any, **named: Any) -> None:
        if torch.cuda.is_available():
            own(new_state, *device, **named)
        else:
            philox.default.set_state(new_state)

    return set_rng_state
