"""Serialization of NumPy's arrays: their bytes as one buffer, in memory order. Imported only where NumPy is.

Arrays of objects, subclasses and types without size are pickled by NumPy.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from monarch_backend._serialization.memory_layout import is_dense

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUILT_IN = frozenset("biufcSUmM")  # kinds of dtypes that their name describes in full


def reduce_array(array: np.ndarray[Any, Any]) -> Any:
    """Return the pickler's reduction of an array.

    It makes no copy of dense elements, in any order of axes. A read-only array arrives read-only.
    """
    dtype = array.dtype
    if dtype.hasobject or not dtype.itemsize:
        return NotImplemented
    writeable = array.flags.writeable
    if not array.flags.forc and not is_dense(array.shape, array.strides, dtype.itemsize):
        array = array.copy(order="K")
    flat = array.ravel(order="K").view(np.uint8)
    if not writeable:
        flat.flags.writeable = False  # where it is a copy
    described = dtype.str if dtype.kind in _BUILT_IN and dtype.metadata is None else dtype
    buffer = pickle.PickleBuffer(cast("Buffer", flat))
    return build_array, (buffer, described, array.shape, array.strides)


def build_array(buffer: Buffer, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the array that `reduce_array` took apart, on the memory of ``buffer``."""
    make: Any = np.ndarray
    array: np.ndarray[Any, Any] = make(shape, dtype, buffer, 0, strides)
    return array


REDUCERS: dict[type, Callable[[Any], Any]] = {np.ndarray: reduce_array}
