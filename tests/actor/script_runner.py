"""Runner of complete programs for tests, in interpreters that have already imported torch.

A warm interpreter forks for each script. The fork runs the script at its top level, as ``python script.py`` does.
Ctrl-C and the end of the program behave as in plain Python. A script takes 0.1 s instead of 2 s. `python` starts a cold
interpreter.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 60.0


class Run:
    """A running or ended script: its output so far and its exit status."""

    def __init__(self, pid: int, out: int, err: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._texts = {out: b"", err: b""}
        self._out, self._err = out, err
        self._open = {out, err}

    @property
    def out(self) -> str:
        return self._texts[self._out].decode()

    @property
    def err(self) -> str:
        return self._texts[self._err].decode()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def read_until(self, text: str, patience: float = PATIENCE) -> None:
        """Wait for this text on stdout or stderr."""
        self._read(lambda: text in self.out or text in self.err, patience, f"{text!r}")

    def read_all(self, patience: float = PATIENCE) -> None:
        """Read stdout and stderr to their ends: no process has them open any more."""
        self._read(lambda: not self._open, patience, "the end of stdout and stderr")

    def _read(self, enough: Any, patience: float, what: str) -> None:
        deadline = time.monotonic() + patience
        while not enough():
            assert self._open, f"no {what} came in\n{self.out}\nand\n{self.err}"
            ready, _, _ = select.select(list(self._open), [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"after {patience} s no {what} in\n{self.out}\nand\n{self.err}"
            for fd in ready:
                data = os.read(fd, 1 << 16)
                self._texts[fd] += data
                if not data:
                    self._open.discard(fd)

    def close(self) -> None:
        for fd in (self._out, self._err):
            os.close(fd)


def _listen_to_ctrl_c() -> None:
    """Restore the default action of SIGINT.

    A shell starts background commands, perhaps the tests, with SIGINT ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class WarmInterpreter:
    """Runs scripts in forks of one interpreter, one script at a time."""

    def __init__(
        self,
        server: str,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        modules: Sequence[str] = ("monarch_backend.actor",),
    ) -> None:
        """``server`` is the address of the fork server for scripts without their own.

        ``prefix``: words that make a command run elsewhere, for example on another host. ``modules``: modules that are
        slow to import and that scripts need.
        """
        self._server = server
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # a pipe, so that the script's stdout is block buffered
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})},
                preexec_fn=_listen_to_ctrl_c,
            )
        self.run: Run | None = None

    def start(
        self,
        path: Path,
        source: str | None,
        env: Mapping[str, str] | None = None,
        own_server: bool = False,
        arguments: Sequence[str] = (),
    ) -> Run:
        """Start the source as a script at this path. Without a source, start the file that exists there."""
        if source is not None:
            path.write_text(source)
        request = {
            "path": str(path),
            "arguments": list(arguments),
            "env": dict(env or {}),
            "server": "" if own_server else self._server,
        }
        (out, child_out), (err, child_err) = os.pipe(), os.pipe()
        socket.send_fds(self._channel, [pickle.dumps(request)], [child_out, child_err])
        os.close(child_out)
        os.close(child_err)
        self.run = Run(self._answer(), out, err)
        return self.run

    def finish(self, patience: float = PATIENCE) -> Run:
        """Wait for the end of the script, and read all of its output."""
        run = self.run
        assert run is not None
        deadline = time.monotonic() + patience
        while not select.select([self._channel], [], [], 0)[0]:
            assert time.monotonic() < deadline, f"it does not end:\n{run.out}\n{run.err}"
            ready, _, _ = select.select([self._channel, *run._open], [], [], max(0.0, deadline - time.monotonic()))
            for fd in run._open.intersection(ready):
                data = os.read(fd, 1 << 16)
                run._texts[fd] += data
                if not data:
                    run._open.discard(fd)
        run.returncode = self._answer()
        run.read_all()
        return run

    def complete(self, path: Path, source: str | None, patience: float = PATIENCE, **options: Any) -> Run:
        """Run a script from `start` to `finish`, then `drop` it."""
        self.start(path, source, **options)
        try:
            return self.finish(patience)
        finally:
            self.drop()

    def ends_within(self, seconds: float) -> bool:
        """Return whether the script ends within this time. Call `finish` in either case."""
        return bool(select.select([self._channel], [], [], seconds)[0])

    def drop(self) -> None:
        """Kill the script if it still runs, and close its pipes."""
        run, self.run = self.run, None
        if run is not None:
            if run.returncode is None:
                os.killpg(run.pid, signal.SIGKILL)
                self._answer()
            run.close()

    def _answer(self) -> int:
        ready, _, _ = select.select([self._channel], [], [], PATIENCE)
        assert ready, "the warm interpreter does not answer"
        return int(self._channel.recv(64))

    def __enter__(self) -> WarmInterpreter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            # ends the connection also for ranks that were forked since and have inherited it
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(PATIENCE)


@contextlib.contextmanager
def with_meshes() -> Iterator[WarmInterpreter]:
    """Yield an interpreter for programs that have device meshes. All modules that they import are already imported."""
    from monarch_backend._actor.runtime import program
    from monarch_backend.actor import this_host

    with this_host().spawn_procs({"x": 1}) as procs:
        procs.initialized.get(PATIENCE)
    address = str(program().owner.starter.spawner.address)
    with WarmInterpreter(address, modules=("monarch_backend.dtensor._device_mesh",)) as interpreter:
        yield interpreter


def python(*arguments: str, stdin: str | None = None, env: Mapping[str, str] | None = None) -> Any:
    """Run a cold interpreter to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})},
        check=False,
    )


def use_server(address: str) -> None:
    """Use the fork server at this address instead of starting one."""
    from monarch_backend._actor.processes import start as process_start
    from monarch_backend._processes.spawner import Spawner

    def spawner(told: Any, given: str | None = None, **options: Any) -> Spawner:
        return Spawner(told, given or address, **options)

    process_start.Spawner = spawner  # type: ignore[assignment, misc]


def _next_script(channel: socket.socket) -> dict[str, Any]:
    """Fork the warm interpreter for each request. Return only in the fork."""
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 16, 2)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for number, fd in enumerate(fds, start=1):
                os.dup2(fd, number)
                os.close(fd)
            channel.close()
            request: dict[str, Any] = pickle.loads(message)
            return request
        for fd in fds:
            os.close(fd)
        channel.send(b"%d" % pid)
        _, status = os.waitpid(pid, 0)
        channel.send(b"%d" % os.waitstatus_to_exitcode(status))


def _script(arguments: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Wait for a script in the warm interpreter. Return its code and its ``__main__`` namespace in the fork."""
    import gc
    import importlib
    import types

    for name in arguments[2:]:
        importlib.import_module(name)

    # Without this, the garbage collection at the end of each script would traverse all of torch: half a second each.
    gc.collect()
    gc.freeze()
    sys.path.remove(str(Path(__file__).parent))
    request = _next_script(socket.socket(fileno=int(arguments[1])))
    os.environ.update(request["env"])
    if request["server"]:
        use_server(request["server"])
    path = request["path"]
    sys.argv[:] = [path, *request["arguments"]]
    sys.path.insert(0, str(Path(path).parent))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    return compile(Path(path).read_text(), path, "exec"), vars(main)


if __name__ == "__main__":
    exec(*_script(sys.argv))
