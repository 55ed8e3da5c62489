"""Forked ranks for tests: processes that share one imported torch, run functions, and return results.

`RankPool` keeps its ranks and an initialised default group between calls. `run_ranks` makes fresh ranks, for a test
that inits, destroys or kills them. A rank that raises fails the caller with its traceback. A rank that hangs prints
all stacks and is killed. Expected results are in the tests.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

# Processes and descriptors that outlive a test on purpose. The leak check ignores them.
KEPT_PIDS: set[int] = set()
KEPT_FDS: set[int] = set()

HANG = 120.0
_GOODBYE = b"goodbye"


def without_gloos_lines(output: str) -> str:
    """Return the output of a program without the lines that Gloo prints to stdout with torch before 2.11."""
    return re.sub(r"^\[Gloo\] Rank \d+ is connected to .*\n", "", output, flags=re.MULTILINE)


class RankFailedError(AssertionError):
    """At least one rank raised, died or hung. The text has the error of each failed rank."""


def _spawn(target: Callable[[Connection], None]) -> tuple[int, Connection]:
    ours, theirs = multiprocessing.Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    code = 1
    try:
        ours.close()
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
        target(theirs)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _answer(connection: Connection, call: Callable[[], Any]) -> None:
    try:
        reply: tuple[bool, Any] = (True, call())
    except BaseException:
        reply = (False, traceback.format_exc())
    connection.send_bytes(pickle.dumps(reply))


def _collect(pids: list[int], connections: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    replies: dict[int, tuple[bool, Any]] = {}
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                os.kill(pids[rank], signal.SIGUSR1)
                replies[rank] = (False, f"no answer within {timeout:.0f} s (stacks on stderr)")
            time.sleep(1.0)  # time for the hung ranks to print their stacks; the test has failed already
            break
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[arg-type]
            try:
                replies[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                replies[rank] = (False, "the rank died without an answer")
    failed = {rank: text for rank, (ok, text) in sorted(replies.items()) if not ok}
    if failed:
        raise RankFailedError("\n".join(f"--- rank {rank}:\n{text}" for rank, text in failed.items()))
    return [replies[rank][1] for rank in range(len(connections))]


def _kill(pids: list[int]) -> dict[int, int]:
    codes = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return codes


@contextlib.contextmanager
def store_file() -> Iterator[str]:
    """Yield an address for `init_method=` that no other test uses. Its file is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="monarch-test-") as folder:
        yield f"file://{folder}/store"


def init(rank: int, world_size: int, address: str, backend: str = "monarch", seconds: float = 60.0, **kw: Any) -> None:
    """Call init_process_group for a test rank."""
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size, timeout=timeout, **kw)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "monarch",
    timeout: float = HANG,
    group_timeout: float = 60.0,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(rank, *args)`` on fresh ranks and return their results by rank.

    With ``backend=None`` no group is made, and the call is ``fn(rank, address, *args)``.
    """
    groups: list[Any] = []
    with store_file() as address:

        def body(rank: int) -> Callable[[Connection], None]:
            def run(connection: Connection) -> None:
                os.environ.update(env or {})
                # as torchrun sets them: a function must not see those of the pytest process
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))

                def call() -> Any:
                    if backend is None:
                        return fn(rank, address, *args)
                    init(rank, world_size, address, backend, group_timeout)
                    # A rank that ends early must not end while other ranks still connect.
                    dist.barrier(device_ids=[rank] if backend == "nccl" else None)
                    # Keep a reference until the process ends. If a callback on one of Gloo's own threads (for example
                    # PowerSGD's) drops the last reference to a Gloo group, it joins its own thread and torch aborts the
                    # process.
                    groups.append(dist.group.WORLD)
                    result = fn(rank, *args)
                    if dist.is_initialized():
                        dist.destroy_process_group()
                    return result

                _answer(connection, call)

            return run

        started = [_spawn(body(rank)) for rank in range(world_size)]
        pids, connections = [p for p, _ in started], [c for _, c in started]
        try:
            return _collect(pids, connections, timeout)
        finally:
            for connection in connections:
                connection.close()
            _kill(pids)


def _script(rank: int, address: str, path: str, arguments: tuple[str, ...]) -> str:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv[:] = [path, *arguments]
    with open(path) as source, contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source.read(), path, "exec"), vars(main))
    return out.getvalue()


def run_script(path: str, *arguments: str) -> str:
    """Return what ``python path arguments`` would print. A fork runs it, so torch is not imported again."""
    return str(run_ranks(_script, 1, path, arguments, backend=None)[0])


class RankPool:
    """``world_size`` ranks with an initialised default group, for many calls."""

    def __init__(self, world_size: int, backend: str = "monarch") -> None:
        self.world_size = world_size
        self._folder = store_file()
        address = self._folder.__enter__()

        def body(rank: int) -> Callable[[Connection], None]:
            def serve(connection: Connection) -> None:
                init(rank, world_size, address, backend, seconds=30.0)
                while True:
                    # An explicit message ends the rank: pools forked later hold copies of this pipe, so closing it
                    # would not.
                    message = connection.recv_bytes()
                    if message == _GOODBYE:
                        break
                    name, args = pickle.loads(message)
                    fn = getattr(sys.modules[name[0]], name[1])
                    _answer(connection, lambda fn=fn, args=args: fn(rank, *args))  # type: ignore[misc]
                dist.destroy_process_group()

            return serve

        started = [_spawn(body(rank)) for rank in range(world_size)]
        self._pids, self._connections = [p for p, _ in started], [c for _, c in started]
        KEPT_PIDS.update(self._pids)
        KEPT_FDS.update(c.fileno() for c in self._connections)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = HANG) -> list[Any]:
        """Run the module-level function ``fn(rank, *args)`` on every rank, and return the results by rank."""
        message = pickle.dumps(((fn.__module__, fn.__qualname__), args))
        for connection in self._connections:
            connection.send_bytes(message)
        return _collect(self._pids, self._connections, timeout)

    def close(self) -> None:
        """Have the ranks destroy their group and end. Kill those that do not end in time."""
        for connection in self._connections:
            KEPT_FDS.discard(connection.fileno())
            with contextlib.suppress(OSError):
                connection.send_bytes(_GOODBYE)
            connection.close()
        deadline = time.monotonic() + 20
        alive = list(self._pids)
        while alive and time.monotonic() < deadline:
            alive = [pid for pid in alive if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            time.sleep(0.01)
        _kill(alive)
        KEPT_PIDS.difference_update(self._pids)
        self._folder.__exit__(None, None, None)
