"""Errors for C++ code that uses the address of a workers' tensor: it reads zeros, and Python gets an exception.

torch itself raises for typed access and for writes. An untyped `const_data_ptr()`, and the storage's `data()`, get an
unmapped address, whose use is the error.

Without such an address it is 0, and the process ends with a message about the access. That is the case for a torch
whose layout tensor_impl_layout.py does not know, or under a limit of address space.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import socket
import sys
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from monarch_backend import _native
from monarch_backend.dtensor._errors import NotReadableError
from monarch_backend.dtensor._torch_internals import tensor_impl_layout

_INSTEAD = (
    "the memory is in other processes. Read the values before (.numpy(), .full_tensor()), or run what needs the memory "
    "on the workers: monarch_backend.dtensor.run(mesh, function, ...)"
)


class AddressUsedError(NotReadableError):
    """Raised by C, which can only name the class; it is constructed in the thread that accessed the memory."""

    def __init__(self) -> None:
        _native.close_absent_memory()
        super().__init__(
            "C++ used a tensor's untyped address (const_data_ptr(), storage().data()) and was given zeros, so what it "
            f"made of them, or returned just now, is worth nothing: {_INSTEAD}"
        )

    def __reduce__(self) -> Any:
        return NotReadableError, self.args


_native.set_up_tensor_address(torch.Tensor, torch._C._set_throw_on_mutable_data_ptr, AddressUsedError)


def prepare() -> bool:
    """Give tensors unmapped addresses from now on; return whether that works.

    An access that cannot continue prints its cause and Python's stack before the process ends. Called with each mesh,
    because another signal handler may have been installed since.
    """
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # a closed stderr does not matter to a mesh
            faulthandler.enable()
    _native.explain_absent_memory(
        f" on host {socket.gethostname()}, where nothing is. If C++ asked a tensor of a mesh's workers for its untyped "
        f"address (const_data_ptr(), storage().data()), that is what it got: {_INSTEAD}"
    )
    return _reserve()


@functools.cache
def _reserve() -> bool:
    places = tensor_impl_layout.places()
    if places is None or not _native.reserve_tensor_address(*places):
        return False
    # A finaliser or a weak reference's callback may run before the line that called C++ continues. It would get the
    # error, where no code can catch it.
    sys.unraisablehook = _native.unraisable_hook(sys.unraisablehook)
    return True


def set_metadata(func: Any, args: Any, kwargs: Any) -> None:
    """Let an operator change the sizes of a wrapper, its first argument, which has no values."""
    _native.without_address(args[0])
    try:
        with no_dispatch():
            func(*args, **kwargs)
    finally:
        _native.no_pointer(args[0])
