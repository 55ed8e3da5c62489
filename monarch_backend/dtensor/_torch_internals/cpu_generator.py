"""Advance of a controller's CPU generator by an operation's random numbers, without running the operation.

torch's CPU generator (mt19937) uses some words for each element of an operation. Their number is not documented. It is
measured once for each operation and dtype, on tensors of a few dozen elements. This module uses no workers or DTensors.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch

from monarch_backend import _native

BLOCK = 16
"""Elements that `normal_` processes at a time; all other operations process fewer."""
MIN_ELEMENTS = 2 * BLOCK
"""Size from which each further block takes as many words as the one before."""
MAX_WORDS = 16 * BLOCK
"""Limit of words that an operation takes for a block."""

Fill = Callable[[torch.Tensor], object]

_words_of_block: dict[Any, int] = {}


def state_of(generator: Any) -> bytes:
    """Return everything that the next numbers depend on."""
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())  # as numpy would do it, which may be missing


def set_state(generator: Any, state: bytes | bytearray) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


_LEFT_AT, _NEXT_AT, _WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 624 * 8)
"""Positions in torch's state: number of words until the next twist, index of the next word, all words."""


def skip(generator: Any, words: int) -> None:
    """Draw this number of words and drop them."""
    if not words:
        return
    state = bytearray(state_of(generator))
    left = _native.skip_mt19937(memoryview(state)[_WORDS], struct.unpack("i", state[_LEFT_AT])[0], words)
    state[_LEFT_AT], state[_NEXT_AT] = struct.pack("i", left), struct.pack("Q", 625 - left)
    set_state(generator, state)


class Move:
    """Effect of ``fill`` on a generator, for a tensor of this shape, strides and dtype.

    ``key``: the operation, with all arguments that the number of words may depend on. For a large tensor the words are
    skipped, except for a last, small part, which is really filled. So other state of the generator (the second of two
    normal numbers) is right, too.
    """

    def __init__(self, key: Any, shape: Any, stride: Any, dtype: torch.dtype) -> None:
        self._key = (key, dtype)
        whole = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        self._numel = whole.numel()
        self._is_contiguous = whole.is_contiguous()
        last = self._numel if self._numel < MIN_ELEMENTS + BLOCK else MIN_ELEMENTS + self._numel % BLOCK
        self._last = self._part(last, dtype)
        self._blocks = (self._numel - last) // BLOCK
        self._more = self._part(last + BLOCK, dtype)

    def _part(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a part of the tensor, with its memory format as far as operations depend on it."""
        part = torch.empty(numel, dtype=dtype)
        return part if self._is_contiguous else torch.empty(2 * numel, dtype=dtype)[::2]

    def make(self, generator: Any, fill: Fill) -> None:
        """Advance the generator. ``fill`` draws from it."""
        if self._blocks:
            skip(generator, self._blocks * self._measured(generator, fill))
        fill(self._last)

    def _measured(self, generator: Any, fill: Fill) -> int:
        key = (*self._key, self._is_contiguous)
        words = _words_of_block.get(key)
        if words is None:
            words = _words_of_block[key] = self._measure(generator, fill)
        return words

    def _measure(self, generator: Any, fill: Fill) -> int:
        before = state_of(generator)
        try:
            fill(self._more)
            after = state_of(generator)
            for words in range(MAX_WORDS + 1):
                set_state(generator, before)
                skip(generator, words)
                fill(self._last)
                if state_of(generator) == after:
                    return words
        finally:
            set_state(generator, before)
        raise RuntimeError(
            f"{self._key[0]} of {self._key[1]}: this torch's CPU generator is not moved by a fixed number of words for "
            f"each {BLOCK} elements, so the next numbers are not known. Draw these numbers on the controller and "
            "distribute_tensor() them, and report this to monarch_backend"
        )
