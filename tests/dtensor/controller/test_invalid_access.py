"""C++ that reads the untyped address of a remote tensor gets zeros, and Python gets an error.

On systems without such an address it is 0, and the message of the crash explains the access.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import pickle
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.utils import _free_storage
from torch.utils import cpp_extension

from monarch_backend import _native
from monarch_backend.dtensor import NotReadableError, simulated_mesh
from monarch_backend.dtensor._torch_internals import tensor_impl_layout
from monarch_backend.dtensor._torch_internals.invalid_access import AddressUsedError
from tests.actor.script_runner import Run
from tests.dtensor.data_pointer import address_of

PART = 1 << 26  # bytes that are mapped at a time
WITH_GIL = ctypes.pythonapi.memcmp  # ctypes holds the GIL during calls of these functions
NO_GIL = ctypes.CDLL(None).memcmp
for function in (WITH_GIL, NO_GIL):
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def ones() -> Any:
    mesh = simulated_mesh((2,), ("x",))
    return torch.distributed.tensor.ones(4, device_mesh=mesh, placements=[Replicate()])


def read(x: Any, function: Any, size: int = 4) -> None:
    """Read the address as an extension does that holds the GIL, or that releases it."""
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


def test_access_without_the_gil_is_printed_and_raised_in_main_thread(capfd: pytest.CaptureFixture[str]) -> None:
    x = ones()
    thread = threading.Thread(target=lambda: NO_GIL(address_of(x), address_of(x) + PART, 4))
    with pytest.raises(NotReadableError):
        start_and_join(thread)
    with contextlib.suppress(NotReadableError):  # the function reads twice: the page may be closed again in between
        thread.join()
    thread.join()
    said = capfd.readouterr().err
    assert f"pid {os.getpid()} used address {address_of(x):#x} on host " in said
    assert NOTE in said


def test_thread_that_waits_for_the_main_thread_gets_each_report(capfd: pytest.CaptureFixture[str]) -> None:
    """The main thread blocks in join(), so it cannot close the memory that the first use has opened."""
    x, others = ones(), [ones() for _ in range(3)]
    found: list[Any] = []

    def use() -> None:
        NO_GIL(address_of(x), address_of(x), 4)
        for each in others:
            try:
                read(each, WITH_GIL)
            except BaseException as error:
                found.append(type(error))

    thread = threading.Thread(target=use)
    with pytest.raises(NotReadableError):
        start_and_join(thread)
    with contextlib.suppress(NotReadableError):  # the function reads twice: the page may be closed again in between
        thread.join()
    thread.join()
    assert found == [AddressUsedError] * 3
    assert NOTE in capfd.readouterr().err


def start_and_join(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


def test_threads_without_python(capfd: pytest.CaptureFixture[str]) -> None:
    """Threads that C creates, as OpenMP does."""
    pthread, told = ctypes.CDLL(None), []
    addresses = [ctypes.c_void_p(address_of(each)) for each in (ones(), ones())]
    for address in addresses:
        thread = ctypes.c_ulong()
        for act in (
            lambda: pthread.pthread_create(ctypes.byref(thread), None, pthread.strlen, address),  # noqa: B023
            lambda: pthread.pthread_join(thread, None),  # noqa: B023
        ):
            try:
                assert act() == 0
            except NotReadableError as error:  # raised after C has returned
                told.append(error)
    assert len(told) == 2
    said = capfd.readouterr().err.splitlines()
    assert [NOTE in line for line in said] == [True, True], said


DROPPED_ERRORS: dict[str, Callable[[Any, Any], Any]] = {
    "hasattr": lambda x, use: ctypes.pythonapi.PyObject_HasAttrString(
        ctypes.py_object(type("Asked", (), {"__getattr__": lambda self, name: use(x)})()), b"name"
    ),
    "another error that is set for the thread": lambda x, use: (
        use(x, 0)
        or ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(KeyError))
    ),
}


@pytest.mark.parametrize("way", DROPPED_ERRORS)
def test_dropped_error_does_not_hide_the_next(way: str) -> None:
    x = ones()
    with contextlib.suppress(NotReadableError, KeyError):
        DROPPED_ERRORS[way](x, lambda x, *_: WITH_GIL(address_of(x), address_of(x), 4))
    for each in (x, x * 2, x):
        with pytest.raises(NotReadableError):
            read(each, WITH_GIL)


class Finalised:
    """An argument with a finaliser: it runs Python after C++ has returned, before the calling line continues."""

    def __init__(self, of: Any) -> None:
        self._as_parameter_ = address_of(of)

    def __del__(self) -> None:
        sum(range(1))


@pytest.mark.parametrize("way", ["a finaliser", "a callback"])
def test_unraisable_error_is_raised_again(way: str) -> None:
    x = ones()

    def argument() -> Any:
        made = Finalised(x)
        if way == "a callback":
            weakref.finalize(made, len, "x")
        return made

    with pytest.raises(NotReadableError):
        WITH_GIL(argument(), address_of(x), 4)
    with pytest.raises(NotReadableError):
        list(map(WITH_GIL, [argument()], [address_of(x)], [4]))


def test_another_unraisable_error_is_reported() -> None:
    ones()
    seen: list[Any] = []
    hook = _native.unraisable_hook(seen.append)
    hook(types.SimpleNamespace(exc_type=KeyError))
    assert len(seen) == 1
    with pytest.raises(AttributeError):
        hook(None)


def test_the_error_goes_to_another_process() -> None:
    with pytest.raises(NotReadableError) as raised:
        read(ones(), WITH_GIL)
    for copied in (pickle.loads(pickle.dumps(raised.value)), copy.copy(raised.value)):
        assert type(copied) is NotReadableError and str(copied) == str(raised.value)


RESIZED: dict[str, Callable[[Any], Any]] = {
    "resize_": lambda x: x.resize_(100),
    "resize_ again": lambda x: x.resize_(100).resize_(4).resize_(200),
    "resize_as_": lambda x: x.new_empty(2).resize_as_(x),
    "from nothing": lambda x: x.new_empty(0).resize_(5),
    "a view": lambda x: x[1:].resize_(3),
    "set_": lambda x: x.new_empty(0).set_(x),
}


@pytest.mark.parametrize("way", RESIZED)
def test_a_tensor_that_is_resized_has_an_address_as_before(mesh_of: Callable[[str], Any], way: str) -> None:
    x = (distribute_tensor(torch.arange(4.0), mesh_of("2"), [Replicate()]) + 0).to_local()
    expected = RESIZED[way](torch.arange(4.0))
    found = RESIZED[way](x)
    assert found.shape == expected.shape
    if way in ("resize_", "resize_ again", "a view", "set_"):  # the other ways define no values
        assert found[:3].tolist() == expected[:3].tolist()
    for each in (x, found, found + 1):
        with pytest.raises(NotReadableError):
            read(each, WITH_GIL)


BY_STORAGE: dict[str, Callable[[Any], Any]] = {
    "resize_": lambda x: torch.Tensor.untyped_storage(x).resize_(64),
    "of torch's modules": lambda x: _free_storage(x),
    "without dispatch": lambda x: without_dispatch(x),
    "another tensor's": lambda x: torch.empty(0).set_(torch.Tensor.untyped_storage(x), 0, (4,), (1,)).resize_(100),
}


def without_dispatch(x: Any) -> None:
    with torch._C._DisableTorchDispatch():
        torch.Tensor.resize_(x, 100)


@pytest.mark.parametrize("way", BY_STORAGE)
def test_torch_does_not_copy_from_there(way: str) -> None:
    x = ones()
    for each in (x, x.to_local()):
        with pytest.raises(RuntimeError):
            BY_STORAGE[way](each)


def test_all_tensors_have_such_an_address() -> None:
    x = ones()
    parted = distribute_tensor(torch.ones(5, 2), x.device_mesh, [Shard(0)])
    made = [
        copy.copy(x),
        x[1:],
        parted,
        parted.to_local(),
        parted.t(),
        nn.Parameter(x),
        x.data,
    ]
    for each in made:
        with pytest.raises(NotReadableError):
            read(each, WITH_GIL)


def test_two_tensors_have_two_addresses() -> None:
    assert len({address_of(ones()) // PART for _ in range(100)}) == 100


def is_closed(x: Any) -> bool:
    """Return whether the tensor's address and all memory near it are unmapped.

    They belong to one inaccessible mapping that continues for more than 512 GiB after the address.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_ = line.split()
        start, end = (int(each, 16) for each in span.split("-"))
        if start <= address_of(x) < end:
            return access == "---p" and end - address_of(x) > 1 << 39
    return False


def test_written_bytes_are_dropped() -> None:
    x = ones()
    seen = (ctypes.c_char * (2 * PART))()
    for _ in range(2):
        assert is_closed(x)
        with pytest.raises(NotReadableError):
            ctypes.memset(address_of(x), 7, 2 * PART)
        assert is_closed(x)
        with pytest.raises(NotReadableError):
            ctypes.memmove(seen, address_of(x), 2 * PART)
        assert not any(memoryview(seen).cast("B")[:: PART // 1000])
    assert is_closed(x)


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
def test_other_objects_have_no_address(wrong: object) -> None:
    with pytest.raises(TypeError, match="no tensor"):
        _native.no_pointer(wrong)


@pytest.mark.parametrize("at", range(48, 80))
def test_bytes_that_the_system_chooses_are_not_taken_for_the_right_one(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """In about one process of a hundred an allocator's address contains a byte 1."""
    found = tensor_impl_layout.places()
    assert found is not None
    asked = tensor_impl_layout._may_say_resizable
    monkeypatch.setattr(tensor_impl_layout, "_may_say_resizable", lambda *tensors: sorted({*asked(*tensors), at}))
    assert tensor_impl_layout.places() == found


def test_other_tensor_layout_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tensor_impl_layout.places()
    assert found is not None, "this torch has a tensor's address elsewhere: read c10/core/StorageImpl.h"
    assert all(each > 0 for each in found)
    for name in ("_STORAGE_WITHIN", "_ADDRESS_WITHIN", "_RESIZABLE_WITHIN"):
        with monkeypatch.context() as patch:
            patch.setattr(tensor_impl_layout, name, 1)
            assert tensor_impl_layout.places() is None
    monkeypatch.setattr(tensor_impl_layout, "_is_right", lambda *_: False)
    assert tensor_impl_layout.places() is None


SCRIPT = """
import ctypes, faulthandler, os, resource, signal, sys, torch
from torch.distributed.tensor import Replicate, distribute_tensor
from monarch_backend.dtensor import NotReadableError, simulated_mesh
from tests.dtensor.data_pointer import address_of

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
    "no address": "ctypes.string_at(0xdeadbeefdeadbeef, 1)  # the line",  # the kernel reports this address as 0
    "sent": "os.kill(os.getpid(), signal.SIGSEGV)  # the line",
}
LINE = re.compile(r'script\.py", line (\d+) in <module>')
USED = "ctypes.string_at(address_of(x[1:]), 4)  # the line"


def test_uncaught_error_ends_the_program_with_its_traceback(run_script: Callable[..., Run]) -> None:
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
    "another file for Python's handler": f"faulthandler.enable(open(os.devnull, 'w')){CAUGHT}",
    "a handler that comes later": "faulthandler.disable(); faulthandler.enable()\n"
    f'simulated_mesh((2,), ("x",)){CAUGHT}',
    "no handler any more": f'faulthandler.disable(); simulated_mesh((2,), ("x",)){CAUGHT}',
    # The main thread blocks in C until the other thread has ended.
    # Otherwise it could unmap the page during the other thread's access, which would then raise a second error.
    "a second interpreter": "import _thread, _xxsubinterpreters as several\nseveral.destroy(several.create())\n"
    "libc = ctypes.CDLL(None)\nlibc.memcmp.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t]\n"
    "reader, writer = os.pipe()\nsys.setswitchinterval(60)\n"
    "_thread.start_new_thread(lambda: (libc.memcmp(address_of(x), address_of(x), 4), os.close(writer)), ())\n"
    "try:\n    libc.read(reader, ctypes.create_string_buffer(1), 1)\n    print('no error', end=' ')\n"
    f"except NotReadableError:\n    os.dup2(os.open(os.devnull, os.O_WRONLY), 2){CAUGHT}",
    "a fork": f"child = os.fork()\nif child == 0:{CAUGHT.replace(chr(10), chr(10) + '    ')}"
    "\n    sys.stdout.flush(); os._exit(0)\nassert os.waitpid(child, 0)[1] == 0",
}


@pytest.mark.parametrize("way", AFTERWARDS)
def test_invalid_access_is_an_error_after(run_script: Callable[..., Run], way: str) -> None:
    run = run_script(SCRIPT.replace("READ", AFTERWARDS[way]).replace("WHEN", ""))
    assert (run.out, run.returncode) == ("an error, and not reached\n", 0), run.err
    assert run.err == "" or (way == "a second interpreter" and NOTE in run.err)


LATER = "faulthandler.disable(); faulthandler.enable(); simulated_mesh((2,), ('x',))"


@pytest.mark.parametrize("read", [NEAR, OTHERS["far"], OTHERS["sent"]], ids=["near", "far", "sent"])
def test_fault_handlers_that_chain_to_each_other_terminate(run_script: Callable[..., Run], read: str) -> None:
    run = run_script(SCRIPT.replace("READ", f"{LATER}\n{read}").replace("WHEN", ""))
    assert run.returncode == -signal.SIGSEGV and run.err.count("Segmentation fault") in (1, 2), run.err
    assert (NOTE in run.err) == (read == NEAR)


LIMITED = "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))"


def test_address_is_0_where_address_space_is_limited(run_script: Callable[..., Run]) -> None:
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
    """Return whether the output names the line of Python that caused the access."""
    lines = SCRIPT.replace("READ", read).replace("WHEN", when).splitlines()
    found = LINE.search(said)
    return found is not None and lines[int(found[1]) - 1].endswith("# the line")


def test_read_at_address_0_is_explained(run_script: Callable[..., Run]) -> None:
    run = ended(run_script, NEAR)
    assert f"pid {run.pid} used address 0x10 on host " in run.err
    assert NOTE in run.err
    assert "monarch_backend.dtensor.run(mesh, function, ...)" in run.err
    assert line_of(run.err, NEAR)


@pytest.mark.parametrize("read", OTHERS.values(), ids=OTHERS.keys())
def test_other_segmentation_faults_have_no_note(run_script: Callable[..., Run], read: str) -> None:
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
def test_access_by_a_cpp_extension_raises(run_script: Callable[..., Run], tmp_path: Path) -> None:
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
