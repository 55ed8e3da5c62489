"""C++ that reads a remote tensor's memory where torch lets it have the address, 0: the end of it says what that was."""

from __future__ import annotations

import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.actor.scripts import Run

SCRIPT = """
import ctypes, faulthandler, os, signal, torch
from torch.distributed.tensor import Replicate, distribute_tensor
from monarch_backend.dtensor import simulated_mesh

def before(*_):
    os.write(2, b"the program's own handler\\n")
    os._exit(3)

WHEN
mesh = simulated_mesh((2,), ("x",))
x = torch.distributed.tensor.ones(4, device_mesh=mesh, placements=[Replicate()])
READ
print("not reached")
"""
NOTE = "where nothing is, and ends. C++ that asks a tensor of a mesh's workers for its untyped address"
NEAR, FAR = "ctypes.string_at(16, 1)  # the line", "ctypes.string_at(1 << 46, 1)  # the line"


def ended(run_script: Callable[..., Run], read: str, when: str = "") -> Run:
    run = run_script(SCRIPT.replace("READ", read).replace("WHEN", when))
    assert "not reached" not in run.out
    return run


def test_a_read_at_address_0_says_what_it_was(run_script: Callable[..., Run]) -> None:
    run = ended(run_script, NEAR)
    assert run.returncode == -signal.SIGSEGV
    assert f"pid {run.pid} used address 0x10 on host " in run.err and NOTE in run.err
    assert "monarch_backend.dtensor.run(mesh, function, ...)" in run.err
    assert 'script.py", line 13 in <module>' in run.err, "the line of Python that led there"


@pytest.mark.parametrize("read", [FAR, "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_another_segmentation_fault_is_another_matter(run_script: Callable[..., Run], read: str) -> None:
    run = ended(run_script, read)
    assert run.returncode == -signal.SIGSEGV
    assert NOTE not in run.err
    assert 'script.py", line 13 in <module>' in run.err


@pytest.mark.parametrize("read", [NEAR, FAR, "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_a_handler_that_was_there_before_is_called(run_script: Callable[..., Run], read: str) -> None:
    """Python's own handlers run between lines of Python, where a fault never comes to; faulthandler's does."""
    with_file = "faulthandler.enable(open('faults', 'w'))"
    run = ended(
        run_script, f"os.chdir('/'); {read}", f"os.chdir(os.path.dirname(os.path.abspath(__file__))); {with_file}"
    )
    assert run.returncode == -signal.SIGSEGV
    assert (NOTE in run.err) == (read == NEAR)
    assert "Fatal Python error" not in run.err, "it has gone into the program's own file"


EXTENSION = """
#include <torch/csrc/autograd/python_variable.h>

extern "C" float first(PyObject* tensor) {
  return *static_cast<const float*>(THPVariable_Unpack(tensor).const_data_ptr());
}
"""
USES = """
load = ctypes.PyDLL(LIBRARY).first
load.argtypes, load.restype = [ctypes.py_object], ctypes.c_float
assert load(torch.tensor([2.5])) == 2.5
load(x)  # the line
"""


@pytest.mark.slow
def test_an_extension(run_script: Callable[..., Run], tmp_path: Path) -> None:
    source, library = tmp_path / "first.cpp", tmp_path / "first.so"
    source.write_text(EXTENSION)
    paths = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    told = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    command = ["c++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", *paths, str(source), "-o", str(library), *told]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert sys.platform == "linux"
    run = ended(run_script, USES.replace("LIBRARY", repr(str(library))))
    assert run.returncode == -signal.SIGSEGV
    assert "used address 0x0 on host " in run.err and NOTE in run.err
    assert 'script.py", line 17 in <module>' in run.err
