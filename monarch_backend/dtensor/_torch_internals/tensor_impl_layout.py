"""Location of the address in torch's tensors, which C++ reads there directly.

An untyped `const_data_ptr()`, and the storage's `data()`, are inline functions of torch's headers. torch has a switch
that makes them raise (StorageImpl's throw_on_immutable_data_ptr_). But its own dispatch of a DTensor's views calls them
(`isSharedStorageAlias` checks both sides). So a remote tensor has an address whose use is an error: see
invalid_access.py.
"""

from __future__ import annotations

import ctypes

import torch

_WORD = ctypes.sizeof(ctypes.c_void_p)
_STORAGE_WITHIN = 8  # first words of torch's TensorImpl that are searched
_ADDRESS_WITHIN = 6  # and of its StorageImpl
_RESIZABLE_WITHIN = 10


class _Wrapper(torch.Tensor):
    __torch_dispatch__ = torch._C._disabled_torch_function_impl


def places() -> tuple[int, int, int, int] | None:
    """Return byte offsets: the C++ object in a tensor, its storage in that, the address in that, the resizable flag.

    None if a torch has another layout; then addresses stay 0.
    """
    real = [torch.ones(3), torch.ones(2, 5, dtype=torch.int8), torch.nn.Parameter(torch.ones(4))]
    found = {_places_of(each) for each in real}
    if len(found) != 1 or None in found:
        return None
    (place,) = found
    if place is None:
        return None
    others = [torch.frombuffer(bytearray(size), dtype=torch.uint8) for size in (3, 16)]
    right = [each for each in _may_say_resizable(real, others) if _is_right(*place, each)]
    return (*place, right[0]) if len(right) == 1 else None


def _places_of(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    impl, storage = tensor._cdata, tensor.untyped_storage()._cdata
    # The address occurs twice: the second one is the pointer to free.
    at = (
        _first(_words(id(tensor), type(tensor).__basicsize__ // _WORD), impl),
        _first(_words(impl, _STORAGE_WITHIN), storage),
        _first(_words(storage, _ADDRESS_WITHIN), tensor.data_ptr()),
    )
    return at if 0 not in at else None  # 0: a reference count, or a table of functions


def _may_say_resizable(can: list[torch.Tensor], cannot: list[torch.Tensor]) -> list[int]:
    """Return the bytes that are 1 in these tensors' storages, and 0 in storages of foreign memory.

    Sometimes there are several. One may belong to a pointer to the allocator of resizable tensors, whose bytes the
    system chooses.
    """
    can_be, cannot_be = ([_bytes(each.untyped_storage()._cdata) for each in tensors] for tensors in (can, cannot))
    return [
        at
        for at in range(_ADDRESS_WITHIN * _WORD, _RESIZABLE_WITHIN * _WORD)
        if all(each[at] == 1 for each in can_be) and all(each[at] == 0 for each in cannot_be)
    ]


def _is_right(to_impl: int, to_storage: int, to_address: int, to_resizable: int) -> bool:
    """Check the offsets: torch must report an address that is written there, for a tensor without memory."""
    made = torch.Tensor._make_wrapper_subclass(_Wrapper, (3,))
    storage = _word(_word(id(made) + to_impl) + to_storage)
    if storage != made.untyped_storage()._cdata or _word(storage + to_address) != 0:
        return False
    address = ctypes.c_size_t.from_address(storage + to_address)
    resizable = ctypes.c_ubyte.from_address(storage + to_resizable)
    before = resizable.value
    could_be = made.untyped_storage().resizable()
    address.value, resizable.value = _WORD, 0
    seen = made.untyped_storage()
    said = seen.data_ptr(), seen.resizable()
    address.value, resizable.value = 0, before
    return could_be and said == (_WORD, False) and seen.resizable()


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_size_t * count).from_address(address))


def _bytes(address: int) -> bytes:
    return bytes((ctypes.c_ubyte * (_RESIZABLE_WITHIN * _WORD)).from_address(address))


def _first(words: list[int], wanted: int) -> int:
    return _WORD * words.index(wanted) if wanted in words else 0
