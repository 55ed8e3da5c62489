"""Runner processes of actors.py: start them, send requests, stop them.

A runner's own code is in actor_peers/_runner.py. Each runner has its own session, so that Ctrl-C reaches only the
driver, which then ends all runners. The driver is the subreaper of all processes below it. At the end it kills the
remaining ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("actor_peers")
ANSWER_SECONDS = 180.0
START_SECONDS = 900.0  # enough for 64 processes that import torch on two cores
END_SECONDS = 30.0
GRACE_SECONDS = 2.0  # time for the processes of an ended runner to end
PR_SET_CHILD_SUBREAPER = 36

# Environment of all processes of all peers. Workers compute nothing here.
COMMON = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class RunnerFailed(Exception):
    """A runner ended or did not answer in time."""


class Refused(Exception):
    """A runner answered that its peer cannot do the request, or failed with an error."""


@dataclass(frozen=True)
class Peer:
    """A library or a floor, and how to start its runner. The report prints ``settings``."""

    key: str
    name: str
    script: str
    settings: str
    environment: Callable[[], dict[str, str]] = dict
    own: str = ""  # name of its environment from tools/peer_env.py; empty: this environment
    lacks: str = ""  # the reason if it cannot be measured on any machine
    only: tuple[str, ...] = ()  # its cases; empty: all

    @property
    def python(self) -> Path:
        """Path of the runner's interpreter."""
        return ROOT / ".envs" / f"peer-{self.own}" / "bin" / "python" if self.own else Path(sys.executable)

    def missing(self) -> str | None:
        """Return what is missing to run it, or None."""
        if self.lacks or self.python.exists():
            return self.lacks or None
        return f"not installed; run: python tools/peer_env.py {self.own}"


def _ray_environment() -> dict[str, str]:
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # without it Ray writes a token into the home directory
    }


FLOOR = Peer("floor", "floor", "floor_socket.py", "Unix sockets of 64 bytes, memcpy, fork after torch, poll on a pidfd")
PEERS = (
    Peer("ours", "ours", "ours.py", "defaults: waiting processes spin first while there are processors for all"),
    Peer(
        "sleep",
        "ours, sleeping",
        "ours.py",
        "MONARCH_BUSY_POLL=0: waiting processes sleep at once",
        environment=lambda: {"MONARCH_BUSY_POLL": "0"},
        only=("round_trip", "pipelined", "warm_8", "cast_8"),
    ),
    Peer(
        "torchmonarch",
        "torchmonarch",
        "torchmonarch_peer.py",
        "defaults (Unix sockets), more patient at start; its log stays in /tmp/USER/monarch_log.log",
        own="torchmonarch",
    ),
    Peer(
        "ray",
        "Ray",
        "ray_peer.py",
        "num_cpus=0 per actor, no dashboard, no logs to the driver, RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1 "
        "(off by default, and slower then), 1 GiB object store, 127.0.0.2",
        environment=_ray_environment,
        own="ray",
    ),
    Peer(
        "rpc",
        "torch.rpc",
        "torch_rpc.py",
        "TensorPipe's defaults, TCP for 64 processes (its shared memory fails there); stopped (SIGSTOP) between its "
        "turns, for its threads never sleep",
        environment=lambda: {"TP_SOCKET_IFNAME": "lo"},
    ),
    FLOOR,
)


class Runner:
    """The runner process of one peer, ready for requests."""

    def __init__(self, peer: Peer, folder: Path) -> None:
        self.peer, self.left = peer, 0
        folder.mkdir()
        self._buffer = b""
        self._log = (folder / "log").open("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [str(peer.python), str(FOLDER / peer.script)],
            env={**os.environ, **COMMON, **peer.environment(), "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=folder,
            start_new_session=True,
        )
        try:
            self.versions: str = self._answer(ANSWER_SECONDS)
        except BaseException:
            self.end(patient=False)
            raise

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a request and return the answer. Raises Refused, or RunnerFailed after ending the runner."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            return self._answer(START_SECONDS if do in ("start", "cast", "drop") else ANSWER_SECONDS)
        except (RunnerFailed, OSError) as error:
            self.end(patient=False)
            raise RunnerFailed(str(error)) from None

    def _answer(self, seconds: float) -> Any:
        assert self._process.stdout is not None
        deadline, file = time.monotonic() + seconds, self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([file], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise RunnerFailed(f"no answer in {seconds:g} s; it wrote last:\n{self._tail()}")
            data = os.read(file, 1 << 16)
            if not data:
                last = self._tail().strip().splitlines() or ["no word"]
                raise RunnerFailed(f"the runner ended: {last[-1].strip()}\n{self._tail()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["value"]

    def cpu_seconds(self) -> float:
        """Return the CPU time of the runner and its live descendants."""
        return _cpu_seconds(self._process.pid) + tree_cpu_seconds(self._process.pid)

    def _tail(self) -> str:
        self._log.seek(0)
        return "".join(f"    {line[:300]}\n" for line in self._log.read().splitlines()[-12:])

    def end(self, patient: bool = True) -> None:
        """End the runner and its descendants. Add the number of descendants that outlived the runner to ``left``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        below = set(descendants(self._process.pid))
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if patient:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        # Kill only pids that are still below this process. A pid is not reused within this time.
        deadline = time.monotonic() + (GRACE_SECONDS if patient else 0)
        while (outlived := below & set(descendants(os.getpid()))) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.left += len(outlived) if patient else 0
        for pid in outlived:
            _kill(pid)
        self._process.stdout.close()
        self._log.close()


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or [] if the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    # The process itself and its reaped children.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def tree_cpu_seconds(root: int) -> float:
    """Return the CPU time of the live descendants of a process, including their reaped children."""
    return sum(map(_cpu_seconds, descendants(root)))


def descendants(root: int) -> list[int]:
    """Return the pids of all descendants of a process, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the subreaper: it becomes the parent of descendants whose parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_all() -> int:
    """Kill and reap all descendants of this process. Return their number."""
    killed: set[int] = set()
    while left := descendants(os.getpid()):
        for pid in left:
            _kill(pid)
        killed.update(left)
        _reap()
        time.sleep(0.01)  # killed processes take a moment to end, and their children become children of this process
    _reap()
    return len(killed)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def machine_cpu_seconds() -> float:
    """Return the CPU time of all processes of the machine since boot."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    return sum(map(int, (*fields[1:4], *fields[6:9]))) / os.sysconf("SC_CLK_TCK")


def available_bytes() -> int:
    """Return the memory that is available without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
