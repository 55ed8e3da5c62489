"""Bootstrap of a new process: it gives the process the state of a freshly started interpreter, then calls its main.

A forked child is a copy of the fork server. Its environment, paths, signals, randomness and standard streams are set to
the requested ones. A plainly spawned child comes from the program in interpreter_args.py to `main` and takes the same
steps. Some are not needed in a new process, and have no effect there.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import io
import multiprocessing.process
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import cloudpickle  # type: ignore[import-untyped]
import msgspec

from monarch_backend import _autoload
from monarch_backend._core import fork, platform
from monarch_backend._core.garbage_collection import without_collector
from monarch_backend._processes import cpu_affinity, finalization, system_calls
from monarch_backend._processes.debugging import channel
from monarch_backend._processes.main_module import empty_main_module
from monarch_backend._processes.spawn_protocol import Spawn
from monarch_backend._telemetry import recorder


def main(argument: str) -> NoReturn:
    """Bootstrap a plainly spawned process. ``argument`` is the descriptor of a file with its Spawn message."""
    with without_collector():
        importlib.import_module("torch")  # a forked child has torch; here its threads and random seed are set
    finalization.remember_preloaded()
    with open(int(argument), "rb") as file:
        spec = msgspec.msgpack.decode(file.read(), type=Spawn)
    run(spec)


def run(spec: Spawn) -> NoReturn:
    """Apply ``spec`` to this process, call its main, and end as an interpreter would end."""
    code = 1
    try:
        _become(spec)
        if spec.bootstrap is not None:
            cloudpickle.loads(spec.bootstrap)()
        _use_threads(spec)
        cloudpickle.loads(spec.main)()
        code = 0
    except SystemExit as request:
        code = _exit_code(request)
    except KeyboardInterrupt as interrupt:
        report_exception(interrupt)
        code = -signal.SIGINT
    except BaseException as error:
        report_exception(error)
    _end(code)


def _become(spec: Spawn) -> None:
    if spec.ignores_sigterm:
        _ignore_sigterm()
    with contextlib.suppress(OSError):  # forked or spawned with setsid it leads its session already
        os.setsid()
    system_calls.adopt_orphans()  # if this process dies, the fork server adopts and kills its descendants
    system_calls.set_title(f"monarch {spec.label}")
    if spec.recording is not None:
        recorder.start(*spec.recording, spec.label)
    set_environment(spec.environment)
    os.chdir(spec.cwd)
    sys.path[:] = map(os.fsdecode, spec.path)
    sys.argv[:] = map(os.fsdecode, spec.argv)
    for entry in [entry for entry, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[entry]  # it may have been created meanwhile
    # multiprocessing's children call the main module __mp_main__, also in what they send back.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = empty_main_module(
        spec.main_module[0], os.fsdecode(spec.main_module[1])
    )
    # The controller's interpreter flushes each line to a terminal; a log needs the same.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    faulthandler.enable()
    channel.set_label(spec.label)
    sys.breakpointhook = _breakpoint
    if spec.cpus is not None:
        cpu_affinity.bind(frozenset(spec.cpus))
    _forget_the_server(spec.label)


def _ignore_sigterm() -> None:
    """Ignore SIGTERM in this process, but not in its children: a program ends its own children with it."""
    signal.signal(signal.SIGTERM, _do_nothing)  # a new program has the default again, other than with SIG_IGN
    fork.register(fork.Step.SIGTERM, after_in_child=_stop_ignoring_sigterm)


def _do_nothing(_number: int, _frame: Any) -> None:
    pass


def _stop_ignoring_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _do_nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    """Stand in for `sys.breakpointhook`: wait for `monarch-backend debug`, since pdb would read /dev/null.

    PYTHONBREAKPOINT has its usual meaning, but debugpy waits for an editor. A process with a stdin uses pdb.
    """
    chosen = os.environ.get("PYTHONBREAKPOINT", "")
    if chosen == "debugpy.breakpoint":
        from monarch_backend._processes.debugging import debugpy_wait

        return debugpy_wait.set_trace(sys._getframe(1))
    if chosen not in ("", "pdb.set_trace") or not _stdin_is_null():
        return sys.__breakpointhook__(*args, **kwargs)
    # pdb is imported with the first breakpoint only
    from monarch_backend._processes.debugging import remote_pdb

    return remote_pdb.set_trace(sys._getframe(1), *args, **kwargs)


def _stdin_is_null() -> bool:
    try:
        return os.path.samestat(os.fstat(0), os.stat(os.devnull))
    except OSError:  # closed
        return True


def set_environment(environment: Mapping[bytes, bytes]) -> None:
    """Set ``environment`` as this process's, with few calls where most of it is equal."""
    for name in os.environb.keys() - environment.keys():
        del os.environb[name]
    for name, value in environment.items():
        if os.environb.get(name) != value:
            os.environb[name] = value


def _forget_the_server(label: str) -> None:
    """Drop secrets and random states that siblings would share. `random` reseeds itself after a fork."""
    process: Any = multiprocessing.process.current_process()
    process.name = label
    process.authkey = os.urandom(32)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(None)
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # generators of accelerators start at a fixed seed, in every process
    else:
        _autoload.after_import.append(lambda torch: torch.default_generator.seed())


def _from_environment(*names: str) -> int | None:
    for name in names:
        first = os.environ.get(name, "").partition(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            return int(first)
    return None


def _use_threads(spec: Spawn) -> None:
    """Set the number of threads of torch and NumPy's OpenBLAS: of the environment, else the spec, else one per bound
    CPU.

    Both have read the environment when they were loaded. In a forked child that was the server's environment.
    """
    asked = spec.threads or (len(spec.cpus) if spec.cpus else None)
    torch = sys.modules.get("torch")
    wanted = _from_environment("OMP_NUM_THREADS", "MKL_NUM_THREADS") or asked
    if torch is None and wanted is not None:
        _autoload.after_import.append(lambda torch: torch.set_num_threads(wanted))
    elif torch is not None and wanted is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
    default = platform.usable_cpus() if platform.HAS_AFFINITY else None
    wanted = _from_environment("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") or asked or default
    for get, set_ in openblas():
        if wanted is not None and get() != wanted:
            set_(wanted)


@functools.cache
def openblas() -> list[tuple[Callable[[], int], Callable[[int], object]]]:
    """Yield getter and setter of the number of threads of every OpenBLAS in this process; none without /proc."""
    if not platform.HAS_PROC:
        return []
    try:
        with open("/proc/self/maps") as maps:
            files = {line.split()[-1] for line in maps if "openblas" in line}
    except OSError:
        return []
    found = []
    for library in map(ctypes.CDLL, sorted(files)):
        for pattern in ("openblas_%s_num_threads", "openblas_%s_num_threads64_", "scipy_openblas_%s_num_threads64_"):
            with contextlib.suppress(AttributeError):
                found.append((getattr(library, pattern % "get"), getattr(library, pattern % "set")))
    return found


def report_exception(error: BaseException) -> None:
    """Print a traceback as an interpreter does, without frames of this module and frames that are marked as hidden."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    while trace is not None and "__tracebackhide__" in trace.tb_frame.f_locals:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)


def _exit_code(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _end(code: int) -> NoReturn:
    """End as an interpreter does, but do not tear down torch."""
    finalization.finalize_user_code()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:  # as Python ends after a KeyboardInterrupt: the parent sees the signal
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
