"""Runner processes of actors.py: how each peer's is started, given orders and stopped.

What a runner does is in actor_peers/_runner.py. A runner runs in a session of its own, so that Ctrl-C meets the
driver only, which then ends everybody: it is the reaper of whatever loses its parent, and what is below it at the end
is killed.
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
START_SECONDS = 900.0  # of 64 processes that import torch on two cores
END_SECONDS = 30.0
GRACE_SECONDS = 2.0  # in which a runner's processes may follow it
PR_SET_CHILD_SUBREAPER = 36

# For every process of every peer alike: a worker computes nothing here.
COMMON = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class RunnerFailed(Exception):
    """A runner that ended or does not answer."""


class Refused(Exception):
    """The runner's own word that this peer can't do it, or the error that it met."""


@dataclass(frozen=True)
class Peer:
    """A library or a floor: ``settings`` is for the reader, the rest starts its runner."""

    key: str
    name: str
    script: str
    settings: str
    environment: Callable[[], dict[str, str]] = dict
    own: str = ""  # the environment that tools/peer_env.py makes; none: this one
    lacks: str = ""  # why it can't be measured on any machine
    only: tuple[str, ...] = ()  # the cases that it is for; none: all

    @property
    def python(self) -> Path:
        """The interpreter of its runner."""
        return ROOT / ".envs" / f"peer-{self.own}" / "bin" / "python" if self.own else Path(sys.executable)

    def missing(self) -> str | None:
        """What there is not, or None."""
        if self.lacks or self.python.exists():
            return self.lacks or None
        return f"not installed; run: python tools/peer_env.py {self.own}"


def _ray_environment() -> dict[str, str]:
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # or it writes one into the home directory
    }


FLOOR = Peer("floor", "floor", "floor_socket.py", "Unix sockets of 64 bytes, memcpy, fork after torch, poll on a pidfd")
PEERS = (
    Peer("ours", "ours", "ours.py", "defaults: who waits spins first while there are processors for all"),
    Peer(
        "sleep",
        "ours, sleeping",
        "ours.py",
        "MONARCH_BUSY_POLL=0: who waits sleeps at once",
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
    """The process of one peer, ready for orders."""

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
        """Give an order and wait for its answer. Refused, or RunnerFailed and then the runner is gone."""
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
        """What its processes have used so far, those that live."""
        return _cpu_seconds(self._process.pid) + tree_cpu_seconds(self._process.pid)

    def _tail(self) -> str:
        self._log.seek(0)
        return "".join(f"    {line[:300]}\n" for line in self._log.read().splitlines()[-12:])

    def end(self, patient: bool = True) -> None:
        """End it and what it started; ``left`` says afterwards how many processes had outlived it."""
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
        # Pids are not used again so soon, and only what is still below this process is touched.
        deadline = time.monotonic() + (GRACE_SECONDS if patient else 0)
        while (outlived := below & set(descendants(os.getpid()))) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.left += len(outlived) if patient else 0
        for pid in outlived:
            _kill(pid)
        self._process.stdout.close()
        self._log.close()


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    # Its own and that of the children it has waited for.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def tree_cpu_seconds(root: int) -> float:
    """What the processes below this one have used so far, those that live and those that they have waited for."""
    return sum(map(_cpu_seconds, descendants(root)))


def descendants(root: int) -> list[int]:
    """Children of this process, theirs, and so on; without those that have ended and wait to be reaped."""
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
    """Become the parent of every process below that loses its own."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_all() -> int:
    """Kill and reap what is still below this process; how many there were."""
    killed: set[int] = set()
    while left := descendants(os.getpid()):
        for pid in left:
            _kill(pid)
        killed.update(left)
        _reap()
        time.sleep(0.01)  # the dead are not gone at once, and their children become ours
    _reap()
    return len(killed)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def machine_cpu_seconds() -> float:
    """What all processes of the machine have used since it started."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    return sum(map(int, (*fields[1:4], *fields[6:9]))) / os.sysconf("SC_CLK_TCK")


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
