"""Several hosts on one machine: namespaces for network, System V IPC, mounts and hostname.

A host is a process that only keeps its namespaces alive. Forked ranks enter them before anything else. The hosts meet
on a bridge in a network namespace of its own, so the machine's interfaces are not touched. The kernel removes
everything when the processes end. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from tests.support.ranks import HANG, init, run_ranks

_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_NET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
_PRIVATE, _BIND = 0x40000 | 0x4000, 0x1000  # MS_PRIVATE | MS_REC, MS_BIND
_PR_SET_PDEATHSIG = 1
_NAMESPACES = {"net": _NEW_NET, "ipc": _NEW_IPC, "uts": _NEW_UTS, "mnt": _NEW_NS}


def _libc(name: str, *args: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


class Cables:
    """The network between hosts. It needs only the pids of their processes, so any root process can use a copy.

    A cut drops frames silently: the sender's neighbour entry has an unused hardware address, or the switch's port is
    down.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = list(pids)

    def cut(self, sender: int, receiver: int) -> None:
        """Drop all frames from one host to another. The other direction still works."""
        self._point(sender, receiver, "02:00:00:00:ff:ff")

    def cut_off(self, index: int, others: Sequence[int] | None = None) -> None:
        """Drop all frames in both directions between a host and ``others``, by default all hosts."""
        if others is None:
            self.ip(-1, f"link set p{index} down")
        for other in others or ():
            self.cut(index, other)
            self.cut(other, index)

    def heal(self, index: int, others: Sequence[int] | None = None) -> None:
        """Restore the network between a host and ``others``, by default all hosts."""
        if others is None:
            self.ip(-1, f"link set p{index} up")
        for other in range(len(self.pids) - 1) if others is None else others:
            if other != index:
                self._point(index, other, hardware_address(other))
                self._point(other, index, hardware_address(index))

    def heal_all(self) -> None:
        """Restore the network between all hosts."""
        for index in range(len(self.pids) - 1):
            self.heal(index)

    def reset(self, index: int) -> None:
        """Break all connections of this host at once. Both sides notice it."""
        command = ["nsenter", f"--net=/proc/{self.pids[index]}/ns/net", "ss", "-K", "-t", "state", "established"]
        subprocess.run(command, check=True, capture_output=True)

    def _point(self, sender: int, receiver: int, where: str) -> None:
        self.ip(sender, f"neigh replace {address(receiver)} lladdr {where} dev eth0 nud permanent")

    def ip(self, index: int, *lines: str) -> None:
        """Run commands of ip(8) in a host."""
        enter_and_run_ip(self.pids[index], *lines)


def enter_and_run_ip(pid: int, *lines: str) -> None:
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True, capture_output=True)


def address(index: int) -> str:
    """Return the address of a host's eth0, from the range for tests of network equipment."""
    return f"198.18.0.{10 + index}"


def address6(index: int) -> str:
    """Return the IPv6 address of a host's eth0."""
    return f"fd00:198:18::{10 + index}"


def hardware_address(index: int) -> str:
    """Return the hardware address of a host's eth0."""
    return f"02:00:00:00:00:{10 + index:02x}"


class Hosts:
    """Hosts 0 to ``count`` - 1, each with an eth0. Use :func:`hosts` to make them.

    ``own_name``: the address to which each hostname resolves on its own host, by default eth0's.
    """

    def __init__(self, count: int, own_name: str = "") -> None:
        self._own_name = own_name
        self.pids: list[int] = []
        self._pipes: list[int] = []
        self._ports = itertools.count(29500)
        for index in range(count + 1):  # the last namespace has the bridge
            self._start(self.name(index) if index < count else "switch", count)
        try:
            self._connect(count)
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, count: int) -> None:
        ready, tell = os.pipe()
        stay, end = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(end)
                _libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                for earlier in self._pipes:
                    os.close(earlier)
                _libc("unshare", sum(_NAMESPACES.values()))
                _libc("mount", b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None)
                _libc("mount", b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), None)
                _libc("sethostname", name.encode(), len(name))
                with open("/dev/shm/hosts", "w") as table:
                    for i in range(count):
                        own = self._own_name if self.name(i) == name else ""
                        table.write(f"{own or self.address(i)} {self.name(i)}\n")
                _libc("mount", b"/dev/shm/hosts", b"/etc/hosts", None, ctypes.c_ulong(_BIND), None)
                os.write(tell, b"1")
                if os.getppid() == parent:
                    os.read(stay, 1)
            finally:
                os._exit(0)
        os.close(tell)
        os.close(stay)
        self.pids.append(pid)
        self._pipes.append(end)
        with os.fdopen(ready, "rb") as answer:
            if answer.read(1) != b"1":
                self.close()
                raise PermissionError("new namespaces are not permitted here")

    def _connect(self, count: int) -> None:
        switch = self.pids[-1]
        enter_and_run_ip(switch, "link add br0 type bridge stp_state 0 forward_delay 0", "link set br0 up")
        for index in range(count):
            pid = self.pids[index]
            enter_and_run_ip(
                switch, f"link add p{index} type veth peer name eth0 netns {pid}", f"link set p{index} master br0 up"
            )
            enter_and_run_ip(
                pid,
                "link set lo up",
                f"link set eth0 address {hardware_address(index)} up",
                f"addr add {address(index)}/24 dev eth0",
                f"addr add {address6(index)}/64 dev eth0 nodad",
            )

    def name(self, index: int) -> str:
        """Return the hostname of a host."""
        return f"host-{'abcdefghi'[index]}"

    def address(self, index: int) -> str:
        """Return the address of a host's eth0."""
        return address(index)

    @contextlib.contextmanager
    def lossy(self, index: int, loss: float, reorder: float, seed: int = 1) -> Iterator[list[int]]:
        """Make the link of a host lose and reorder frames.

        The list gets the numbers of frames sent, lost and reordered.
        """
        from tests.support import lossy_link

        switch, found = self.pids[-1], [0, 0, 0]

        def python(pid: int, *words: str) -> list[str]:
            return ["nsenter", f"--net=/proc/{pid}/ns/net", sys.executable, lossy_link.__file__, *words]

        enter_and_run_ip(
            switch, "link add x0 type veth peer name x1", "link set x1 up", f"link set p{index} nomaster",
            "link set x0 master br0 up",
        )  # fmt: skip
        try:
            for pid, name in ((switch, "x0"), (self.pids[index], "eth0")):
                subprocess.run(python(pid, name), check=True)
            command = python(switch, f"p{index}", "x1", str(loss), str(reorder), str(seed))
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cable:
                assert cable.stdin is not None and cable.stdout is not None
                assert cable.stdout.readline() == "ready\n"
                yield found
                cable.stdin.close()
                found[:] = map(int, cable.stdout.readline().split())
        finally:
            enter_and_run_ip(switch, "link del x0", f"link set p{index} master br0")

    @property
    def cables(self) -> Cables:
        """The network between these hosts."""
        return Cables(self.pids)

    def command(self, index: int, *words: str) -> list[str]:
        """Return the command line that runs a program on a host, in the current directory."""
        namespaces = [f"--{name}" for name in ("net", "ipc", "uts", "mount")]
        stay = ["env", f"--chdir={os.getcwd()}"]
        return ["nsenter", f"--target={self.pids[index]}", *namespaces, "--", *stay, *words]

    def processes(self, index: int) -> dict[int, str]:
        """Return the command lines of the processes on a host by pid, without the process that keeps its namespaces."""
        home, found = os.readlink(f"/proc/{self.pids[index]}/ns/net"), {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if int(name) != self.pids[index] and os.readlink(f"/proc/{name}/ns/net") == home:
                    with open(f"/proc/{name}/cmdline") as words:
                        found[int(name)] = words.read().replace("\0", " ")
        return found

    def store_address(self, index: int) -> str:
        """Return an address for `init_method=` on a host. Each call returns another one."""
        return f"tcp://{self.address(index)}:{next(self._ports)}"

    def enter(self, index: int) -> None:
        """Move the calling process to a host. The process must have one thread."""
        for kind, flag in _NAMESPACES.items():
            fd = os.open(f"/proc/{self.pids[index]}/ns/{kind}", os.O_RDONLY)
            try:
                _libc("setns", fd, flag)
            finally:
                os.close(fd)
        if not self._own_name:
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def close(self) -> None:
        """End the hosts. Their namespaces and links end with them."""
        for pipe in self._pipes:
            os.close(pipe)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pipes.clear()
        self.pids.clear()


def sent_bytes() -> int:
    """Return the number of bytes that the eth0 of the calling process's host has sent."""
    with open("/proc/self/net/dev") as table:
        row = next(line for line in table if line.strip().startswith("eth0:"))
    return int(row.split(":")[1].split()[8])


@functools.cache
def refusal() -> str:
    """Return the reason why hosts cannot be made on this machine, or ''."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 and util-linux"
    try:
        with hosts(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces with a bridge and veths are not permitted here: {error}"


@contextlib.contextmanager
def hosts(count: int, own_name: str = "") -> Iterator[Hosts]:
    """Make ``count`` hosts, which end with the block. See Hosts."""
    made = Hosts(count, own_name)
    try:
        yield made
    finally:
        made.close()


def run_on_hosts(
    where: Hosts,
    placement: Sequence[int],
    fn: Callable[..., Any],
    *args: Any,
    backend: str = "monarch",
    timeout: float = HANG,
    group_timeout: float = 60.0,
    env: dict[str, str] | None = None,
    together: bool = True,
    master: str = "",
) -> list[Any]:
    """Run ``fn(rank, *args)`` on fresh ranks, each on host ``placement[rank]``. Return the results by rank.

    ``master``: the name of rank 0's host for `init_method=`, by default its address.

    ``together=False`` is for ranks that die. Then ``fn`` must make sure that rank 0, which has the store, ends last.
    """
    size, address = len(placement), where.store_address(placement[0])
    if master:
        address = address.replace(where.address(placement[0]), master)
    held: list[Any] = []

    def on_host(rank: int, _address: str) -> Any:
        where.enter(placement[rank])
        init(rank, size, address, backend, group_timeout)
        dist.barrier()
        held.append(dist.group.WORLD)  # as in run_ranks, and for the same reason
        result = fn(rank, *args)
        if dist.is_initialized():
            if together:
                dist.barrier()  # rank 0 has the store, so it must not end first
            dist.destroy_process_group()
        return result

    return run_ranks(on_host, size, backend=None, timeout=timeout, env=env)
