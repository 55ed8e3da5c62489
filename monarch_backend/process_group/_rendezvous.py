"""How the ranks of a new group meet: at its store, within the timeout, and with the names of those that do not come.

torch's client of a TCPStore tries for several times the timeout where nobody listens, and for ever where somebody
accepts and says nothing; the process with the server counts its clients without knowing who they are. _torch_patches.py
brings `init_process_group` here. No route is chosen here and no group is made.

Leans on torch/distributed/rendezvous.py; tests/process_group/test_rendezvous.py fails when it changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import _get_use_libuv_from_query_dict, _torchelastic_use_agent_store

from monarch_backend._core.limits import start_thread
from monarch_backend.process_group import _torch
from monarch_backend.process_group._errors import where

if TYPE_CHECKING:
    from monarch_backend.process_group._collectives import Collectives

_T = TypeVar("_T")

_GRACE = 0.5  # seconds beyond the timeout: for the others to hear why, and for a server found at the last moment
_ONE_ADDRESS = 5.0  # seconds for one address of a name to answer before the next one has its turn
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25  # seconds between two attempts to connect


@dataclass(frozen=True)
class Place:
    """Where the ranks of a default group meet, and which of them this process is."""

    host: str
    port: int
    rank: int
    size: int
    libuv: bool
    agent: bool  # torchrun's agent hosts the store: every rank is a client

    @property
    def address(self) -> str:
        """``"host:port"``, with the brackets that an IPv6 address needs."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def who(self) -> str:
        """The part of a message that names this process; there is no group yet."""
        return f"[rank {self.rank} of {self.size}, host {socket.gethostname()}, pid {os.getpid()}]"

    @property
    def server(self) -> str:
        """Who should listen there."""
        return "torchrun's agent on node 0" if self.agent else "rank 0"


def place(url: object, rank: int, size: int) -> Place | None:
    """Read ``tcp://`` and ``env://`` as torch's rendezvous does; None for all else, and for what it will refuse."""
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
    return Place(host, port, number, of, _get_use_libuv_from_query_dict(query), _agent_hosts_store(host, port))


def _agent_hosts_store(host: str, port: int) -> bool:
    """As `_create_c10d_store` decides; torch 2.14 came to ask for the agent's own address as well."""
    serves = getattr(sys.modules["torch.distributed.rendezvous"], "_agent_store_serves", None)
    return bool(_torchelastic_use_agent_store() if serves is None else serves(host, port))


def _forget_group_name() -> None:
    """After a failure the next attempt must have the name that the other ranks' first one has, which torch counts on.

    Leans on distributed_c10d._world.group_count being 0 before there is a default group.
    """
    if c10d.GroupMember.WORLD is None:
        c10d._world.group_count = 0


def rendezvous(original: Callable[..., Any], url: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """torch's ``rendezvous``, which yields (store, rank, world size), for the default group of backend "monarch"."""
    here = place(url, rank, world_size)
    if here is None:
        return original(url, rank, world_size, timeout=timeout)
    try:
        if here.rank == 0 and not here.agent:
            return iter([(_as_host(here, timeout), here.rank, here.size)])
        deadline = time.monotonic() + timeout.total_seconds()
        _wait_for_server(here, deadline, timeout)
        store = _connect(here, deadline, timeout, lambda left: next(original(url, rank, world_size, timeout=left)))
        if not here.agent:
            _answer_host(here, store, deadline, timeout)
        return iter([(store, here.rank, here.size)])
    except Exception:
        _forget_group_name()
        raise


# A client's way to the store --------------------------------------------------------------------------------


def _wait_for_server(here: Place, deadline: float, timeout: timedelta) -> None:
    """Return once somebody accepts connections there; raise at the deadline, with the last attempt's reason."""
    pause, tries = _FIRST_PAUSE, 0
    problem: Exception | None = None
    while True:
        tries += 1
        try:
            return _knock(here, deadline)
        except (OSError, UnicodeError) as error:
            # At the end there is no time for a good answer: then an earlier one says more.
            problem = error if problem is None or not isinstance(error, TimeoutError) else problem
        left = deadline - time.monotonic()
        if left <= 0:
            raise DistNetworkError(
                f"no store answers at {here.address}: {_reason(problem)} ({tries} attempts in "
                f"{timeout.total_seconds():g} s). It is {here.server} that must listen there before the timeout ends: "
                f"start it, check the address (init_method=, or MASTER_ADDR and MASTER_PORT) and what may stand "
                f"between the hosts, or give a longer timeout=. {here.who}"
            ) from problem
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _knock(here: Place, deadline: float) -> None:
    """Connect to one of the addresses and hang up: the server sees a client that came and went."""

    def seconds() -> float:
        return max(deadline - time.monotonic(), 0.001)

    try:
        found = socket.getaddrinfo(here.host, here.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:  # a name: whoever resolves it may take longer than we have
        found = _within(seconds(), lambda: socket.getaddrinfo(here.host, here.port, type=socket.SOCK_STREAM))
    problem: OSError = OSError("the name has no address")
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(min(seconds(), _ONE_ADDRESS))
                probe.connect(address)
                if probe.getsockname() != probe.getpeername():
                    return
            # TCP lets a socket connect to itself, where the port is one that the system gives to clients.
            problem = ConnectionRefusedError("connection refused")
        except OSError as error:
            problem = error
    raise problem


def _reason(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error)
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return f"the name does not resolve ({said})"
    return said.lower()


def _connect(
    here: Place, deadline: float, timeout: timedelta, client: Callable[[timedelta], tuple[Store, int, int]]
) -> Store:
    """torch's client, which itself waits for ever where the other side accepts and does not speak."""
    seconds = max(deadline - time.monotonic(), _GRACE)
    try:
        return _within(seconds, lambda: client(timedelta(seconds=seconds)))[0]
    except (OSError, RuntimeError) as error:
        raise DistNetworkError(
            f"something accepts connections at {here.address}, but no store of torch answers there within "
            f"{timeout.total_seconds():g} s: {str(error).partition(chr(10))[0]}. Look whether {here.server} is "
            f"stopped, or another service has the port; then choose another one. {here.who}"
        ) from error


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """What ``call()`` gives, or TimeoutError: it then goes on in its thread, and nobody hears of it any more."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="monarch-rendezvous", daemon=True)
    start_thread(thread)
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:.3g} s")
    return results[0]


# Who is here ------------------------------------------------------------------------------------------------
#
# Where rank 0 hosts the store, it waits for all others and tells each what came of it: the same error on all, while
# the server still lives. torch's own server only counts, and its clients learn nothing but that it has gone.


def _as_host(here: Place, timeout: timedelta) -> Store:
    """The store of rank 0, as torch makes it, but that it knows who has come."""
    # As `_create_c10d_store` does, which would wait here for as many clients as there are ranks.
    store = TCPStore(
        here.host,
        here.port,
        here.size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        use_libuv=here.libuv,
    )
    book = PrefixStore("monarch", store)
    keys = _keys("here", range(here.size))
    try:
        book.set(keys[0], "")
        book.wait(keys, timeout)
        absent: list[int] = []
    except DistStoreError:
        absent = _absent(book, here.size)
    book.set("absent", json.dumps(absent))
    if not absent:
        return store
    came = [rank for rank in range(1, here.size) if rank not in absent]
    with contextlib.suppress(DistStoreError):
        book.wait(_keys("told", came), timedelta(seconds=_GRACE))
    for key in ["absent", *keys, *_keys("told", came)]:  # the server lives on if somebody holds it
        book.delete_key(key)
    raise _not_come(absent, here.size, timeout, f"at the store {here.address}", here.who)


def _answer_host(here: Place, store: Store, deadline: float, timeout: timedelta) -> None:
    """Tell rank 0 that this rank has come, and hear from it whether all have."""
    book = PrefixStore("monarch", store)
    mine = f"here/{here.rank}"
    try:
        book.set(mine, "")
        try:
            # A little longer than rank 0, which started its clock when it came.
            book.wait(["absent"], timedelta(seconds=max(deadline - time.monotonic(), 0) + _GRACE))
            absent = json.loads(book.get("absent"))
            if absent:
                book.set(f"told/{here.rank}", "")
        except DistStoreError:
            absent = _absent(book, here.size)
            if absent:
                book.delete_key(mine)
    except DistNetworkError as error:
        raise DistNetworkError(
            f"the store at {here.address} closed while this rank waited there for the others: {here.server} gave up or "
            f"ended. Its own error says why. {here.who}"
        ) from error
    if absent:
        raise _not_come(absent, here.size, timeout, f"at the store {here.address}", here.who)


@contextlib.contextmanager
def roll_call(group: Collectives, options: Any) -> Iterator[None]:
    """Around the making of a group whose ranks wait for each other: its failure names the ranks that did not come.

    Each rank leaves a key in the group's store before; who fails looks for the others' keys. Costs one key. Where all
    ranks have left theirs the error stays as it is; so it does where keys of an earlier attempt lie in the store.
    """
    book = PrefixStore(f"{_torch._attempt()}monarch", options.store)
    book.set(f"here/{group.rank()}", "")
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        _forget_group_name()
        absent: list[int] = []
        with contextlib.suppress(RuntimeError):  # the store may have gone with the process that hosts it
            absent = _absent(book, group.size())
        if not absent:
            raise
        waited = timedelta(seconds=round(time.monotonic() - start, 1))
        raise _not_come(absent, group.size(), waited, "in the group's store", f"[{where(group)}]") from error


def _keys(name: str, ranks: Any) -> list[str]:
    return [f"{name}/{rank}" for rank in ranks]


def _absent(book: Store, size: int) -> list[int]:
    return [rank for rank, key in enumerate(_keys("here", range(size))) if not book.check([key])]


def _not_come(absent: list[int], size: int, waited: timedelta, at: str, who: str) -> DistStoreError:
    named = ", ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    ranks, have = ("rank", "has") if len(absent) == 1 else ("ranks", "have")
    return DistStoreError(
        f"{ranks} {named} of {size} {have} not come: nothing was heard of {'it' if len(absent) == 1 else 'them'} "
        f"{at} within {waited.total_seconds():g} s. Look there for an error or a process that never started; all "
        f"ranks need the same address and world size; a longer timeout= waits longer. {who}"
    )
