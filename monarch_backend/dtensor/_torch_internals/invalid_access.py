"""What happens when C++ that was given a tensor of the workers uses its address: it has zeros, and Python an error.

Typed access and what may write are errors of torch's at once. An untyped `const_data_ptr()`, and the storage's
`data()`, get an address at which nothing is mapped; using it is the error. Where there is no such address (a torch that
_torch_addresses does not know, a limit of addresses) it is 0, and the program ends with words that say what that was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import socket
import sys
from typing import Any

import torch

from monarch_backend import _native
from monarch_backend.dtensor._errors import NotReadableError
from monarch_backend.dtensor._torch_internals import tensor_impl_layout

_INSTEAD = (
    "the memory is in other processes. Read the values before (.numpy(), .full_tensor()), or run what needs the memory "
    "on the workers: monarch_backend.dtensor.run(mesh, function, ...)"
)


class AddressUsedError(NotReadableError):
    """Raised by C, which names the class only; so this happens where it is raised, in the thread whose it is."""

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
    """From now on tensors get such addresses, if there are any: whether there are.

    In any case who uses one that does not go on says what it was, with the lines of Python, before the process ends.
    With each mesh, for another handler may have come since.
    """
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # a stderr that is closed, or no file, does not matter to a mesh
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
    # A finaliser of an argument's, or a callback of a weak reference, runs before the line that called C++ goes on, and
    # has the error: nobody could catch it.
    sys.unraisablehook = _native.unraisable_hook(sys.unraisablehook)
    return True
