"""C++ that reads a remote tensor's memory where torch lets it have the address, 0: the end of it says what that was."""

from __future__ import annotations

import re
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
import ctypes, faulthandler, os, signal, sys, torch
from torch.distributed.tensor import Replicate, distribute_tensor
from monarch_backend.dtensor import simulated_mesh

WHEN
mesh = simulated_mesh((2,), ("x",))
x = torch.distributed.tensor.ones(4, device_mesh=mesh, placements=[Replicate()])
READ
print("not reached")
"""
NOTE = "where nothing is. If C++ asked a tensor of a mesh's workers for its untyped address"
NEAR = "ctypes.string_at(16, 1)  # the line"
OTHERS = {
    "far": "ctypes.string_at(1 << 46, 1)  # the line",
    "no address": "ctypes.string_at(0xdeadbeefdeadbeef, 1)  # the line",  # which the kernel tells as 0
    "sent": "os.kill(os.getpid(), signal.SIGSEGV)  # the line",
}
LINE = re.compile(r'script\.py", line (\d+) in <module>')


def ended(run_script: Callable[..., Run], read: str, when: str = "") -> Run:
    run = run_script(SCRIPT.replace("READ", read).replace("WHEN", when))
    assert "not reached" not in run.out
    assert run.returncode == -signal.SIGSEGV, run.err
    return run


def line_of(said: str, read: str, when: str = "") -> bool:
    """Whether the line of Python that led there is told."""
    lines = SCRIPT.replace("READ", read).replace("WHEN", when).splitlines()
    found = LINE.search(said)
    return found is not None and lines[int(found[1]) - 1].endswith("# the line")


def test_a_read_at_address_0_says_what_it_was(run_script: Callable[..., Run]) -> None:
    run = ended(run_script, NEAR)
    assert f"pid {run.pid} used address 0x10 on host " in run.err
    assert NOTE in run.err
    assert "monarch_backend.dtensor.run(mesh, function, ...)" in run.err
    assert line_of(run.err, NEAR)


@pytest.mark.parametrize("read", OTHERS.values(), ids=OTHERS.keys())
def test_another_segmentation_fault_is_another_matter(run_script: Callable[..., Run], read: str) -> None:
    run = ended(run_script, read)
    assert NOTE not in run.err
    assert line_of(run.err, read)


@pytest.mark.parametrize("read", [NEAR, OTHERS["far"]], ids=["near", "far"])
def test_a_handler_that_was_there_before_is_called(run_script: Callable[..., Run], tmp_path: Path, read: str) -> None:
    when = f"faulthandler.enable(open({str(tmp_path / 'faults')!r}, 'w'))"
    run = ended(run_script, read, when)
    assert (NOTE in run.err) == (read == NEAR)
    assert "Fatal Python error" not in run.err
    assert "Fatal Python error: Segmentation fault" in (tmp_path / "faults").read_text()
    assert line_of((tmp_path / "faults").read_text(), read, when)


NO_STDERR = {
    "none": "sys.stderr = None",
    "closed": "sys.stderr.close()",
    "no descriptor": "os.close(2); os.open('/dev/null', os.O_RDONLY); os.close(2)",
    "no file": "sys.stderr = type('Cell', (), {name: lambda *_: None for name in ('fileno', 'write', 'flush')})()",
}


@pytest.mark.parametrize("gone", NO_STDERR.values(), ids=NO_STDERR.keys())
def test_a_program_without_a_stderr_has_meshes_all_the_same(run_script: Callable[..., Run], gone: str) -> None:
    run = run_script(SCRIPT.replace("WHEN", f"{gone}\nfaulthandler.disable()").replace("READ", "").replace("not ", ""))
    assert run.out == "reached\n"


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
    read = USES.replace("LIBRARY", repr(str(library)))
    run = ended(run_script, read)
    assert "used address 0x0 on host " in run.err
    assert NOTE in run.err
    assert line_of(run.err, read)
