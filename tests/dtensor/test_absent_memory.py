"""C++ that uses a remote tensor's untyped address: it has zeros, and Python an error. Where there is no such address it
is 0, and the end of the program says what that was."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate
from torch.utils import cpp_extension

from monarch_backend.dtensor import NotReadableError, _torch_addresses, simulated_mesh
from tests.actor.scripts import Run
from tests.dtensor.addresses import address_of

PART = 1 << 26  # mapped at a time
WITH_GIL = ctypes.pythonapi.memcmp  # any library's functions, with the GIL
NO_GIL = ctypes.CDLL(None).memcmp
for function in (WITH_GIL, NO_GIL):
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def ones() -> Any:
    mesh = simulated_mesh((2,), ("x",))
    return torch.distributed.tensor.ones(4, device_mesh=mesh, placements=[Replicate()])


def read(x: Any, function: Any, size: int = 4) -> None:
    """As an extension with the GIL, or without."""
    function(address_of(x), address_of(x) + PART * 3, size)
    raise AssertionError("went on")


@pytest.mark.parametrize("function", [WITH_GIL, NO_GIL], ids=["with the GIL", "without"])
def test_each_use_is_an_error_at_its_line(function: Any) -> None:
    x = ones()
    for size in (1, 4, 2 * PART + 1, 4):
        with pytest.raises(
            NotReadableError, match=r"given zeros.* in other processes.*\.numpy\(\).*run\(mesh"
        ) as raised:
            read(x, function, size)
        assert raised.traceback[-1].name == "read" and "function(" in str(raised.traceback[-1].statement)
    assert (x + 1).shape == (4,)


def test_another_thread_has_its_own_errors() -> None:
    x = ones()
    with ThreadPoolExecutor(1) as pool:
        for each in [pool.submit(read, x, WITH_GIL, 100) for _ in range(20)]:
            assert isinstance(each.exception(), NotReadableError)


def test_a_thread_without_the_gil_has_words_and_the_main_thread_the_error(capfd: pytest.CaptureFixture[str]) -> None:
    x = ones()
    thread = threading.Thread(target=lambda: NO_GIL(address_of(x), address_of(x) + PART, 4))

    def wait() -> None:
        thread.start()
        thread.join()

    with pytest.raises(NotReadableError):
        wait()
    thread.join()
    said = capfd.readouterr().err
    assert f"pid {os.getpid()} used address {address_of(x):#x} on host " in said
    assert NOTE in said


def test_threads_without_python(capfd: pytest.CaptureFixture[str]) -> None:
    """As OpenMP's."""
    x, pthread = ones(), ctypes.CDLL(None)
    threads = [ctypes.c_ulong() for _ in range(8)]
    told = 0
    for each in threads:
        try:
            assert pthread.pthread_create(ctypes.byref(each), None, pthread.strlen, ctypes.c_void_p(address_of(x))) == 0
        except NotReadableError:
            told += 1
    while threads:
        try:
            pthread.pthread_join(threads.pop(), None)
        except NotReadableError:
            told += 1
    assert told > 0
    assert NOTE in capfd.readouterr().err
    with pytest.raises(NotReadableError):
        read(x, WITH_GIL)


def mapped() -> list[str]:
    """The lines about what is reserved."""
    begin = address_of(ones()) - PART
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [(line, [int(each, 16) for each in line.split()[0].split("-")]) for line in lines]
    return [line for line, (start, end) in spans if start <= begin < end or begin <= start < begin + (1 << 40)]


def test_what_is_written_is_dropped_and_nothing_stays() -> None:
    x, before = ones(), mapped()
    seen = (ctypes.c_char * (2 * PART))()
    for _ in range(2):
        with pytest.raises(NotReadableError):
            ctypes.memset(address_of(x), 7, 2 * PART)
        with pytest.raises(NotReadableError):
            ctypes.memmove(seen, address_of(x), 2 * PART)
        assert not any(memoryview(seen).cast("B")[:: PART // 1000])
        assert mapped() == before


def test_the_kernel_refuses_the_address() -> None:
    x, libc = ones(), ctypes.CDLL(None, use_errno=True)
    reading, writing = os.pipe()
    try:
        assert libc.write(writing, ctypes.c_void_p(address_of(x)), 4) == -1
        assert ctypes.get_errno() == 14  # EFAULT
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("wrong", [None, 3, "tensor", torch.ones], ids=repr)
def test_what_is_no_tensor_has_no_address(wrong: object) -> None:
    from monarch_backend import _native

    with pytest.raises(TypeError, match="no tensor"):
        _native.no_pointer(wrong)


def test_a_torch_that_has_it_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _torch_addresses.places()
    assert found is not None, "this torch has a tensor's address elsewhere: read c10/core/StorageImpl.h"
    assert all(each > 0 for each in found)
    for name in ("_STORAGE_WITHIN", "_ADDRESS_WITHIN"):
        with monkeypatch.context() as patch:
            patch.setattr(_torch_addresses, name, 1)
            assert _torch_addresses.places() is None
    monkeypatch.setattr(_torch_addresses, "_has_none", lambda _: False)
    assert _torch_addresses.places() is None


SCRIPT = """
import ctypes, faulthandler, os, resource, signal, sys, torch
from torch.distributed.tensor import Replicate, distribute_tensor
from monarch_backend.dtensor import NotReadableError, simulated_mesh
from tests.dtensor.addresses import address_of

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
USED = "ctypes.string_at(address_of(x[1:]), 4)  # the line"


def test_a_program_that_does_not_catch_it_ends_with_its_traceback(run_script: Callable[..., Run]) -> None:
    run = run_script(SCRIPT.replace("READ", USED).replace("WHEN", ""))
    assert run.returncode == 1 and run.out == ""
    assert re.search(r'script\.py", line \d+, in <module>\n +ctypes', run.err), run.err
    assert "AddressUsedError: C++ used a tensor's untyped address" in run.err
    assert "Fatal Python error" not in run.err and NOTE not in run.err


CAUGHT = """
try:
    ctypes.string_at(address_of(x), 4)
except NotReadableError:
    print("an error, and", end=" ")
"""
AFTERWARDS = {
    "a handler that comes later": f"faulthandler.enable(open('faults', 'w')){CAUGHT}",
    "a fork": f"child = os.fork()\nif child == 0:{CAUGHT.replace(chr(10), chr(10) + '    ')}"
    "\n    sys.stdout.flush(); os._exit(0)\nassert os.waitpid(child, 0)[1] == 0",
}


@pytest.mark.parametrize("way", ["a handler that comes later", "a fork"])
def test_it_is_an_error_also_after(run_script: Callable[..., Run], way: str) -> None:
    run = run_script(SCRIPT.replace("READ", AFTERWARDS[way]).replace("WHEN", ""))
    assert (run.out, run.returncode) == ("an error, and not reached\n", 0), run.err
    assert run.err == ""


LIMITED = "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))"


def test_where_addresses_are_few_it_is_0(run_script: Callable[..., Run]) -> None:
    run = ended(run_script, USED, LIMITED)
    assert f"pid {run.pid} used address 0x4 on host " in run.err
    assert NOTE in run.err
    assert line_of(run.err, USED, LIMITED)


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

extern "C" float first_of_storage(PyObject* tensor) {
  return *static_cast<const float*>(THPVariable_Unpack(tensor).storage().data());
}
"""
USES = """
library = ctypes.PyDLL(LIBRARY)
for first in (library.first, library.first_of_storage):
    first.argtypes, first.restype = [ctypes.py_object], ctypes.c_float
    assert first(torch.tensor([2.5])) == 2.5
    for each in (x, x.to_local(), x[1:], x * 2, torch.nn.Parameter(x)):
        try:
            first(each)
        except NotReadableError:
            print("error", end=" ")
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
    run = run_script(SCRIPT.replace("READ", USES.replace("LIBRARY", repr(str(library)))).replace("WHEN", ""))
    assert run.out == "error " * 10 + "not reached\n", run.err
    assert run.returncode == 0 and run.err == ""
