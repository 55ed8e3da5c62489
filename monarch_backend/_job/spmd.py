"""`SPMDJob`: ranks of torchrun, or of another launcher, become hosts, and rank 0 becomes their controller.

The first rank of each node runs a host in a child process. All ranks but 0 wait for the end of rank 0. They meet in the
TCPStore of torch's rendezvous, and stay connected to rank 0. The end of that connection reports the end of rank 0 at
once, even while rank 0 computes.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

from monarch_backend._core import env
from monarch_backend._core.launcher_environment import NAMES, OF_A_RANK, complete
from monarch_backend._core.timeouts import check_bounded
from monarch_backend._hosts.attach import attach_to_workers
from monarch_backend._hosts.connection_settings import given_secret
from monarch_backend._job.base import STOP_TIMEOUT_S, JobState, check_mesh_name
from monarch_backend._job.errors import JobError
from monarch_backend._job.host_launcher import ARGUMENTS, Launch
from monarch_backend._mesh.host_mesh import HostMesh
from monarch_backend._transport.network.auth import new_secret, parse_secret

START_TIMEOUT_S = 120.0
PREFIX = "monarch_backend/spmd/"


class Ranks(NamedTuple):
    """The launcher's variables of one rank."""

    rank: int
    size: int
    local_rank: int
    master: str
    master_port: int

    @classmethod
    def from_env(cls) -> Ranks:
        try:
            complete(os.environ)
        except ValueError as error:
            raise JobError(str(error)) from None
        missing = [name for name in NAMES if not os.environ.get(name)]
        if missing:
            wanted = ", ".join(NAMES)
            raise JobError(
                f"{', '.join(missing)} not set: start the script by torchrun, srun or mpirun, or another launcher that "
                f"sets {wanted}"
            )
        numbers = []
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            try:
                numbers.append(int(os.environ[name]))
            except ValueError:
                raise JobError(f"{name}={os.environ[name]!r} is not a number: correct or unset it") from None
        return cls(numbers[0], numbers[1], numbers[2], os.environ["MASTER_ADDR"], numbers[3])


def host_mesh_from_env(name: str = "hosts", *, timeout: float = START_TIMEOUT_S) -> HostMesh:
    """Return a HostMesh with a host for each node, in a script under torchrun or srun. Rank 0 is the controller.

    Every rank calls it. Under torchrun, srun, or mpiexec on one node, no variable has to be set. In ranks other
    than 0 it does not return: they wait for the end of rank 0. Then they exit with status 0, or with 1 if rank 0 has
    died. The job's secret is MONARCH_SECRET's or MONARCH_SECRET_FILE's, or a new one. A new one goes through the
    rendezvous, which must be as trusted as torchrun requires it to be.

    Raises JobError if the launcher's variables are missing, if not all nodes have a host within ``timeout`` seconds, or
    after `SPMDJob.kill`. A script for ``torchrun --nnodes 2 --nproc-per-node 1 train.py`` begins with::

        hosts = host_mesh_from_env()
        procs = hosts.spawn_procs({"gpus": 8})

    >>> from monarch_backend.job import JobError, host_mesh_from_env
    >>> try:
    ...     host_mesh_from_env()
    ... except JobError:
    ...     print("start this script by torchrun")
    start this script by torchrun
    """
    env.check()
    timeout = check_bounded(timeout)
    if _ended:
        raise JobError("the ranks have been ended: the launcher has to start them again")
    if _mesh:
        return _mesh[0]
    ranks = Ranks.from_env()
    store = _store(ranks, timeout)
    try:
        mesh = (_Controller if ranks.rank == 0 else _Waiting)(ranks, store, time.monotonic() + timeout).run(name)
    except (RuntimeError, OSError) as error:
        if isinstance(error, JobError):
            raise
        raise JobError(f"rank {ranks.rank}: the ranks did not find each other: {error}") from error
    _mesh.append(mesh)
    return mesh


_mesh: list[HostMesh] = []
_ended: list[bool] = []
_controller: list[_Controller] = []


def _store(ranks: Ranks, timeout: float) -> Any:
    """Return the store of the launcher, or that of rank 0."""
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        within = timedelta(seconds=timeout)
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.size, timeout=within))
    except (RuntimeError, OSError, ValueError) as error:
        at = f"{ranks.master}:{ranks.master_port}"
        raise JobError(f"rank {ranks.rank}: no rendezvous at {at} within {timeout:g} s: {error}") from error
    return PrefixStore(PREFIX, store)


class _Rank:
    def __init__(self, ranks: Ranks, store: Any, until: float) -> None:
        self._ranks, self._store, self._until = ranks, store, until
        self._host: Launch | None = None

    def _left(self) -> float:
        return max(0.1, self._until - time.monotonic())

    def _get(self, key: str) -> str:
        self._store.set_timeout(timedelta(seconds=self._left()))
        return str(bytes(self._store.get(key)).decode())

    def _start_host(self, address: str, secret: bytes) -> str:
        """Start a host on this node that ends with this rank, and return its address."""
        where = f"[{address}]" if ":" in address else address
        command = [sys.executable, "-m", "monarch_backend.cli", *ARGUMENTS, "--address", f"{where}:0"]
        environment = {name: value for name, value in os.environ.items() if not OF_A_RANK.fullmatch(name)}
        self._host = Launch(f"the host of rank {self._ranks.rank}", command, secret, environment)
        return self._host.ready(self._until).address

    def _end_host(self) -> None:
        if self._host is not None:
            self._host.give_up()
            self._host = None


class _Controller(_Rank):
    """Rank 0 of the launcher's ranks."""

    def run(self, name: str) -> HostMesh:
        given = given_secret()
        self._secret = given or new_secret()
        self._listener = self._listen()
        self._waiting: list[socket.socket] = []
        self._lock = threading.Condition()
        threading.Thread(target=self._accept, name="monarch-spmd", daemon=True).start()
        atexit.register(self.end)  # before the program's own exit hook, which then runs earlier
        try:
            self._store.set("secret", "" if given else self._secret.hex())
            self._store.set("port", str(self._listener.getsockname()[1]))
            addresses = self._addresses()
            mesh = attach_to_workers(addresses, name, secret=self._secret, timeout=self._left())
            _controller.append(self)
            return mesh
        except BaseException:
            atexit.unregister(self.end)
            self._close(b"")
            raise

    def _listen(self) -> socket.socket:
        """Listen on the host of the rendezvous if it is this one, else on all addresses: only the end is sent here."""
        with contextlib.suppress(OSError):
            for family, kind, _, _, at in socket.getaddrinfo(self._ranks.master, 0, type=socket.SOCK_STREAM):
                listener = socket.socket(family, kind)
                try:
                    listener.bind(at)
                    listener.listen(self._ranks.size)
                    return listener
                except OSError:
                    listener.close()
        return socket.create_server(("", 0), backlog=self._ranks.size)

    def _accept(self) -> None:
        """Accept one connection of each rank, on a thread. Others are limited in number and receive nothing."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if len(self._waiting) >= 4 * self._ranks.size:
                    connection.close()
                    continue
                self._waiting.append(connection)
                self._lock.notify_all()

    def _addresses(self) -> list[str]:
        """Return addresses of the hosts, in the order of their first ranks."""
        with self._lock:
            self._lock.wait_for(lambda: len(self._waiting) >= self._ranks.size - 1, self._left())
        addresses = {}
        if self._ranks.local_rank == 0:
            addresses[0] = self._start_host(self._seen_as(), self._secret)
        for rank in range(1, self._ranks.size):
            try:
                said = json.loads(self._get(f"rank/{rank}"))
            except RuntimeError as error:
                raise JobError(f"rank {rank} did not connect: {error}") from None
            if said["error"]:
                raise JobError(f"rank {rank}: {said['error']}")
            if said["address"]:
                addresses[rank] = said["address"]
        if not addresses:
            raise JobError("no rank has LOCAL_RANK=0: there is no host")
        return [addresses[rank] for rank in sorted(addresses)]

    def _seen_as(self) -> str:
        """Return this host's address as a rank of another node has reached it, or loopback if all ranks are here."""
        with self._lock:
            pairs = [(c.getsockname()[0], c.getpeername()[0]) for c in self._waiting]
        away = [mine for mine, theirs in pairs if mine != theirs]
        seen = away[0] if away else pairs[0][0] if pairs else "127.0.0.1"
        return str(seen).removeprefix("::ffff:")

    def end(self) -> None:
        """Tell the other ranks to end, at exit or before."""
        atexit.unregister(self.end)
        self._close(_stop_digest(self._secret))

    def _close(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._waiting:
                with contextlib.suppress(OSError):
                    each.sendall(word)
                each.close()
            self._waiting.clear()
        self._end_host()


class _Waiting(_Rank):
    """Ranks other than 0."""

    def run(self, name: str) -> HostMesh:  # noqa: ARG002
        secret = given_secret() or parse_secret(self._get("secret"), "what rank 0 says")
        connection = self._connect()
        address = error = ""
        try:
            if self._ranks.local_rank == 0:
                address = self._start_host(connection.getsockname()[0].removeprefix("::ffff:"), secret)
        except JobError as failed:
            error = str(failed)
        self._store.set(f"rank/{self._ranks.rank}", json.dumps({"address": address, "error": error}))
        del self._store
        try:
            well = self._until_the_end(connection, secret)
        finally:
            connection.close()
            self._end_host()
        if not well:
            print(f"monarch_backend: rank {self._ranks.rank} ends: rank 0 is gone", file=sys.stderr)
        raise SystemExit(0 if well else 1)

    def _connect(self) -> socket.socket:
        at = (self._ranks.master, int(self._get("port")))
        connection = socket.create_connection(at, self._left())
        connection.settimeout(None)
        for option, value in (("SO_KEEPALIVE", 1), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            level = socket.SOL_SOCKET if option.startswith("SO_") else socket.IPPROTO_TCP
            connection.setsockopt(level, getattr(socket, option), value)
        return connection

    def _until_the_end(self, connection: socket.socket, secret: bytes) -> bool:
        """Return whether rank 0 has reported a regular end."""
        said = b""
        with contextlib.suppress(OSError):
            while data := connection.recv(64):
                said += data
        return hmac.compare_digest(said, _stop_digest(secret))


def _stop_digest(secret: bytes) -> bytes:
    return hmac.digest(secret, b"monarch_backend: rank 0 has ended", "sha256")


class SPMDJob:
    """Job for a launcher's ranks: ``SPMDJob().apply()`` in every rank, then ``state().hosts`` in rank 0.

    It has no file, and no second program can use it, because the launcher owns its processes. ``timeout`` is in
    seconds. Raises ValueError for an invalid name of the mesh, or a negative timeout.

    >>> from monarch_backend.job import SPMDJob
    >>> job = SPMDJob("trainers", timeout=60.0)  # then job.apply() in every rank, and job.state().trainers in rank 0
    """

    def __init__(self, mesh: str = "hosts", *, timeout: float = START_TIMEOUT_S) -> None:
        self._mesh, self._timeout = check_mesh_name(mesh), check_bounded(timeout)

    def apply(self) -> None:
        """Start the hosts as `host_mesh_from_env` does, with its errors. Returns in rank 0 only."""
        host_mesh_from_env(self._mesh, timeout=self._timeout)

    def state(self) -> JobState:
        """Return the mesh of all nodes. Raises JobError as `host_mesh_from_env` does."""
        return JobState("spmd", {self._mesh: host_mesh_from_env(self._mesh, timeout=self._timeout)})

    def kill(self) -> None:
        """Stop this program's processes on the hosts; then hosts and other ranks end. It cannot be applied again."""
        if _mesh:
            with contextlib.suppress(Exception):
                _mesh[0].shutdown().get(STOP_TIMEOUT_S)
            _controller[0].end()
            _mesh.clear()
            _ended.append(True)
