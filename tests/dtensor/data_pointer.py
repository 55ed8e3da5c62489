"""Address of a tensor as `const_data_ptr()` in C++ returns it."""

from __future__ import annotations

import ctypes

import torch

from monarch_backend.dtensor._torch_internals import tensor_impl_layout


def address_of(tensor: torch.Tensor) -> int:
    places = tensor_impl_layout.places()
    assert places is not None
    at = id(tensor)
    for each in places[:3]:
        at = ctypes.c_size_t.from_address(at + each).value
    return at + tensor.storage_offset() * tensor.itemsize
