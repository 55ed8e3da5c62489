"""Host on this machine whose Python has torch_xla, for meshes of XLA devices. Its daemon ends with the block.

MONARCH_TEST_XLA_PYTHON is the path of that Python (`make test-xla` sets it). Its release of torch differs from the
tests' own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from monarch_backend._mesh.host_mesh import HostMesh
from monarch_backend.hosts import attach_to_workers

PYTHON = os.environ.get("MONARCH_TEST_XLA_PYTHON", "")
NOT_HERE = "no Python with torch_xla is named by MONARCH_TEST_XLA_PYTHON: run `make test-xla`"
_UP = "import sys; from monarch_backend.cli import main; sys.exit(main())"
_NOT_OPTIMIZED = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
_PATIENCE = 60.0
_ROOT = Path(__file__).parent.parent.parent


def environment() -> dict[str, str]:
    """Return the environment of a process of that Python."""
    mine = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    # XLA compiles thousands of graphs once each. Without optimisation this takes a third of the time.
    flags = " ".join([mine.get("XLA_FLAGS", ""), *_NOT_OPTIMIZED]).strip()
    own = {"PYTHONPATH": str(_ROOT), "PJRT_DEVICE": "CPU", "XLA_FLAGS": flags}
    return {**mine, **own, "PYTHONWARNINGS": "ignore"}  # torch_xla emits warnings


@contextmanager
def xla_host() -> Iterator[HostMesh]:
    """Attach the host."""
    with daemon() as address:
        yield attach_to_workers([address], "xla", any_torch=True, timeout=_PATIENCE)


@contextmanager
def daemon() -> Iterator[str]:
    """Start the daemon and yield its address."""
    process = subprocess.Popen(
        [PYTHON, "-c", _UP, "up", "--address", "127.0.0.1:0"], env=environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_us,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "is up: " in said, f"the daemon is not up: {said}"
        yield said.split("is up: ")[1].strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=_PATIENCE)


def _end_with_us() -> None:
    """Have the kernel kill this process if pytest is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
