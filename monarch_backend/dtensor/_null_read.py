"""What the controller says when C++ that was given a tensor of the workers reads its memory, at address 0, and ends it.

Typed access and what may write are errors (`no_pointer`). For an untyped `const_data_ptr()`, and for the storage's
`data()`, torch has a switch, which its own dispatch of DTensors' views runs into (StorageImpl's
throw_on_immutable_data_ptr_: `isSharedStorageAlias` asks both sides).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import socket

from monarch_backend import _native


@functools.cache
def explain() -> None:
    """From now on such a read says what it was, with the lines of Python that led there, before the process ends."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # a stderr that is closed, or no file, does not matter to a mesh
            faulthandler.enable()
    _native.explain_null_reads(
        f" on host {socket.gethostname()}, where nothing is. If C++ asked a tensor of a mesh's workers for its untyped "
        "address (const_data_ptr(), storage().data()), that is what it got: the memory is in other processes. Read "
        "the values before (.numpy(), .full_tensor()), or run what needs the memory on the workers: "
        "monarch_backend.dtensor.run(mesh, function, ...)"
    )
