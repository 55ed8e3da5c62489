"""`Philox`: state of the GPUs' random generator, for a controller that has no GPU.

A GPU's generator is a seed and the count of numbers that were drawn. The controller draws none: workers report how far
an operation advances theirs. It has the methods of torch's own generators, so that the controller can use both alike.
"""

from __future__ import annotations

import struct

import torch

_STATE = struct.Struct("<Qq")
"""torch's format: the seed, the offset."""


class Philox:
    """Replacement of ``torch.cuda.default_generators[0]``."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.manual_seed(torch.initial_seed())

    def manual_seed(self, seed: int) -> Philox:
        self._state = _STATE.pack(seed % (1 << 64), 0)
        return self

    def get_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._state), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """Set a state of get_state. Raises ValueError for the state of another kind of generator."""
        if state.numel() != _STATE.size:
            raise ValueError(f"{state.numel()} bytes are not the state of a GPU's generator, which has {_STATE.size}")
        self._state = bytes(state.tolist())


def moved(before: bytes, after: bytes) -> int:
    return int(_STATE.unpack(after)[1] - _STATE.unpack(before)[1])


def after(before: bytes, numbers: int) -> bytes:
    seed, offset = _STATE.unpack(before)
    return _STATE.pack(seed, offset + numbers)


default = Philox()
"""Generator of operations on GPU meshes, if this process has no GPU itself."""


def default_generator(device_type: str) -> torch.Generator | Philox:
    if device_type == "cuda":
        return torch.cuda.default_generators[0] if torch.cuda.is_initialized() else default
    return torch.default_generator
