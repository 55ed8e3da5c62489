"""Rendezvous of the default group: from its address to a store that all ranks have reached in time.

torch's client of a TCPStore tries for several times the timeout where no process listens. It tries without limit where
a process accepts and does not reply. The process with the server counts its clients without their ranks.

_c10d_patches.py makes `init_process_group` call this module. The handshake at the store is in _handshake.py. No route
is chosen and no group is made here.

Uses torch/distributed/rendezvous.py; tests/process_group/test_rendezvous.py fails when it changes.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import _get_use_libuv_from_query_dict, _torchelastic_use_agent_store

from monarch_backend._core.launcher_environment import complete
from monarch_backend._core.limits import within
from monarch_backend.process_group import _handshake
from monarch_backend.process_group._handshake import GRACE_S, Deadline
from monarch_backend.process_group._store_host import Arrival

_ADDRESS_TIMEOUT_S = 5.0  # for one address of a name to answer before the next one is tried
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25  # seconds between two attempts to connect


@dataclass(frozen=True)
class StoreAddress:
    """Store address of a default group, and this process's rank."""

    host: str
    port: int
    rank: int
    size: int
    libuv: bool
    agent: bool  # torchrun's agent hosts the store, so every rank is a client

    @property
    def address(self) -> str:
        """Return ``"host:port"``, with the brackets that an IPv6 address needs."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def who(self) -> str:
        """Return the part of a message that names this process; there is no group yet."""
        return f"[rank {self.rank} of {self.size}, host {socket.gethostname()}, pid {os.getpid()}]"

    @property
    def server(self) -> str:
        return "torchrun's agent on node 0" if self.agent else "rank 0"


def place(url: object, rank: int, size: int) -> StoreAddress | None:
    """Parse ``tcp://`` and ``env://`` as torch's rendezvous does; None for other URLs and for invalid ones."""
    if not isinstance(url, str):
        return None
    try:
        parts = urlsplit(url)
        query = dict(pair.split("=") for pair in parts.query.split("&") if pair)
        said: dict[str, Any] = dict(query)
        if rank != -1 or size != -1:
            if "rank" in query or "world_size" in query:
                return None
            said |= ({"rank": rank} if rank != -1 else {}) | ({"world_size": size} if size != -1 else {})
        host, port = parts.hostname, parts.port
        if parts.scheme == "env":
            for name in ("rank", "world_size"):
                said.setdefault(name, os.environ[name.upper()])
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        elif parts.scheme != "tcp":
            return None
        number, of = int(said["rank"]), int(said["world_size"])
    except (KeyError, ValueError):
        return None
    if not host or not port or not 0 < port < 1 << 16 or not 0 <= number < of:
        return None
    return StoreAddress(host, port, number, of, _get_use_libuv_from_query_dict(query), _agent_hosts_store(host, port))


def _agent_hosts_store(host: str, port: int) -> bool:
    """Decide as `_create_c10d_store` does; since torch 2.14 it also compares the agent's address."""
    serves = getattr(sys.modules["torch.distributed.rendezvous"], "_agent_store_serves", None)
    return bool(_torchelastic_use_agent_store() if serves is None else serves(host, port))


def forget_group_name() -> None:
    """Reset torch's count of groups, so that the next attempt has the group name that the other ranks expect.

    Uses distributed_c10d._world.group_count, which is 0 before there is a default group.
    """
    if c10d.GroupMember.WORLD is None:
        c10d._world.group_count = 0


def rendezvous(original: Callable[..., Any], url: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Yield (store, rank, world size) for the default group of backend "monarch", as torch's ``rendezvous`` does."""
    if isinstance(url, str) and url.startswith("env://") and rank == world_size == -1:
        complete(os.environ)  # torch reads them there, too
    here = place(url, rank, world_size)
    if here is None:
        return original(url, rank, world_size, timeout=timeout)
    deadline = Deadline(timeout)
    try:
        if here.rank == 0 and not here.agent:
            arrival = _serve(here, deadline)
        else:
            client = functools.partial(original, url, rank, world_size)
            arrival = _join(here, deadline, lambda left: next(client(timeout=left))[0])
    except Exception:
        forget_group_name()
        raise
    _last.arrival = arrival
    return iter([(arrival.store, here.rank, here.size)])


_last = threading.local()  # `arrival` per thread, until its group is made


def take_arrival(store: Store) -> Arrival | None:
    """Return the rendezvous that led to ``store``, for the group that is made right after it; None for other groups."""
    arrival: Arrival | None = _last.__dict__.pop("arrival", None)
    return arrival if arrival is not None and arrival.is_of(store) else None


_USED = "used"  # in a server's store after a group used it: its end then says nothing about the next group


def _serve(here: StoreAddress, deadline: Deadline) -> Arrival:
    """Host the store and wait for all other ranks there."""
    listener = _ipv4_listener(here)
    # Like `_create_c10d_store`, which would wait here for as many clients as there are ranks.
    server = TCPStore(
        here.host,
        here.port,
        here.size,
        is_master=True,
        timeout=deadline.timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
        use_libuv=here.libuv,
    )
    name = _agree(here, server, deadline)
    PrefixStore("monarch", server).set(_USED, "")
    return Arrival(server, name, here.rank, here.size, deadline, hosted=True)


def _ipv4_listener(here: StoreAddress) -> socket.socket | None:
    """Return a socket for the server if its address is IPv4; None if torch makes the socket or has it already.

    torch's own socket is an IPv6 one. The server asks the resolver for the name of each client, and serves nothing
    meanwhile. For ``::ffff:127.0.0.1`` the resolver asks the network, for 127.0.0.1 it reads /etc/hosts.
    """
    try:
        socket.inet_pton(socket.AF_INET, here.host)
        return socket.create_server(("0.0.0.0", here.port), backlog=2048)
    except OSError:
        return None


def _join(here: StoreAddress, deadline: Deadline, client: Callable[[timedelta], Store]) -> Arrival:
    """Connect to the store and wait for all other ranks there. Tries again if the store was the previous group's."""
    while True:
        _wait_for_server(here, deadline)
        used = True
        try:
            store = _connect(here, deadline, client)
            used = here.agent or PrefixStore("monarch", store).check([_USED])
            name = _agree(here, store, deadline)
            return Arrival(store, name, here.rank, here.size, deadline, hosted=not here.agent)
        except DistNetworkError as error:
            if deadline.passed():
                raise
            if not used:
                raise DistNetworkError(
                    f"the store at {here.address} closed while this rank waited there for the others: {here.server} "
                    f"gave up or ended; see its error. {here.who}"
                ) from error


def _agree(here: StoreAddress, store: Store, deadline: Deadline) -> str:
    return _handshake.agree(store, here.rank, here.size, deadline, f"at the store {here.address}", here.who)


# A client's connection to the store -------------------------------------------------------------------------


def _wait_for_server(here: StoreAddress, deadline: Deadline) -> None:
    """Return once a process accepts connections at the address; at the deadline, raise the last attempt's reason."""
    pause, tries = _FIRST_PAUSE, 0
    problem: Exception | None = None
    while True:
        tries += 1
        try:
            return _probe_server(here, deadline)
        except (OSError, UnicodeError) as error:
            # Just before the deadline an attempt has no time for a good reason; an earlier one says more.
            problem = error if problem is None or not isinstance(error, TimeoutError) else problem
        if deadline.passed():
            seconds = deadline.timeout.total_seconds()
            raise DistNetworkError(
                f"no store answers at {here.address}: {_reason(problem)} ({tries} attempts in "
                f"{seconds:g} s). It is {here.server} that must listen there before the timeout ends: "
                f"start it, check the address (init_method=, or MASTER_ADDR and MASTER_PORT) and what may stand "
                f"between the hosts, or give a longer timeout=. {here.who}"
            ) from problem
        time.sleep(min(pause, deadline.seconds()))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _probe_server(here: StoreAddress, deadline: Deadline) -> None:
    """Connect to one of the addresses and disconnect. The server sees a client that came and left."""
    try:
        found = socket.getaddrinfo(here.host, here.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name, which may take longer to resolve than the time left
        found = within(deadline.seconds(), lambda: socket.getaddrinfo(here.host, here.port, type=socket.SOCK_STREAM))
    problem: OSError = OSError("the name has no address")
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(min(deadline.seconds(), _ADDRESS_TIMEOUT_S))
                probe.connect(address)
                if probe.getsockname() != probe.getpeername():
                    return
            # TCP lets a socket connect to itself, if the port is one that the system gives to clients.
            problem = ConnectionRefusedError("connection refused")
        except OSError as error:
            problem = error
    raise problem


def _reason(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error)
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return f"the name does not resolve ({said})"
    return said.lower()


def _connect(here: StoreAddress, deadline: Deadline, client: Callable[[timedelta], Store]) -> Store:
    """Make torch's client, which waits without limit if the other side accepts and does not reply."""
    seconds, timeout = max(deadline.seconds(), GRACE_S), deadline.timeout.total_seconds()
    try:
        return within(seconds, lambda: client(timedelta(seconds=seconds)))
    except (OSError, RuntimeError) as error:
        raise DistNetworkError(
            f"something accepts connections at {here.address}, but no store of torch answers there within "
            f"{timeout:g} s: {str(error).partition(chr(10))[0]}. Look whether {here.server} is "
            f"stopped, or another service has the port; then choose another one. {here.who}"
        ) from error
