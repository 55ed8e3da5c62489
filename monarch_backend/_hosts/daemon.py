"""`monarch-backend up`: the daemon that makes a machine a host. It checks secrets, and starts an agent per controller.

The daemon has a fork server, so that agents and their processes start in milliseconds. agent.py defines what an agent
does. All agents end with the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from monarch_backend._core.addresses import is_loopback
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._hosts import agent, protocol
from monarch_backend._hosts.connection_settings import given_secrets, parse_address, tls_for
from monarch_backend._hosts.protocol import Ask, Ending, Unwelcome, Versions, Welcome
from monarch_backend._processes import local_sockets
from monarch_backend._processes.resource_limits import allow_descriptors
from monarch_backend._processes.spawner import Event, Exited, Spawner, SpawnFailed
from monarch_backend._transport.network.auth import user_secret
from monarch_backend._transport.network.connection import PeerConnection, Timeouts
from monarch_backend._transport.network.connection_manager import Tcp, secrets_by_name
from monarch_backend._transport.tokens import HOST_ID_LENGTH

log = logging.getLogger("monarch_backend")

AGENT_READY_TIMEOUT_S = 5.0
"""Seconds until a new agent must accept a connection that is handed over to it."""

NOTICE_POLL_S = 0.1
"""Seconds between two looks whether a host that is to end still has controllers."""

MAX_FRAME_BYTES = 64 << 10
"""Limit of a frame to a daemon. It reads only `Ask` messages, which have a few hundred bytes."""

MAX_SESSIONS = 1024
"""Limit of controllers that are connected to a daemon at one time. Together they can make it reserve 64 MiB."""

_SIGTERM: Mapping[int, str] = {signal.SIGTERM: "SIGTERM"}

PRELOAD = (
    "monarch_backend._wiring",
    "monarch_backend._actor.worker_main",
    "monarch_backend._actor.process_groups",
    "monarch_backend._hosts.agent",
    "monarch_backend._telemetry.last_messages",
    "monarch_backend.process_group",
)


class Daemon:
    def __init__(self, *known: bytes, workers: Sequence[str] = (), ignores_sigterm: bool = False) -> None:
        self._workers = tuple(workers)
        self._spawner = Spawner(self._event, preload=PRELOAD, ignores_sigterm=ignores_sigterm)
        self._closing = False
        self._lock = threading.Lock()
        self._agents: dict[int, str] = {}  # tokens of agents, by the spawner's numbers
        self._readers: set[int] = set()  # numbers of agents that are for readers
        self._last_controller_end = time.monotonic()
        self._had_controller = False  # one that has attached this host
        self.is_without_controller = False  # it ends for that reason
        self._ending: tuple[float, str] | None = None  # monotonic time of this host's end, and the reason
        self._tcp = Tcp(
            os.urandom(16),
            secrets_by_name(*known),
            self._asked,
            lambda _: None,
            lambda _: None,
            bounds=Timeouts(),
            tls=tls_for(),
            hand_over=self._hand_over,
            max_frame_bytes=MAX_FRAME_BYTES,
            max_sessions=MAX_SESSIONS,
        )

    def start(self, host: str, port: int) -> tuple[str, int]:
        address = self._tcp.listen(host, port)
        self._spawner.start()
        self._tcp.start()
        return address

    def end_without_controller(self, seconds: float, first: float = 0.0) -> None:
        """Send SIGINT to this process when no controller has been attached for ``seconds``. Returns at once.

        ``first``: seconds until the first controller must be attached, if longer. They begin again when one has tried.
        """
        with self._lock:
            limit = seconds if self._had_controller else max(first, seconds)
            attached, left = self._is_controlled(), self._last_controller_end + limit - time.monotonic()
        if attached or left > 0:
            # A controller may come and go before ``left`` is over.
            wait = seconds if attached else min(left, seconds)
            self._tcp.later(wait, lambda: self.end_without_controller(seconds, first))
            return
        log.warning("this host ends: no controller has been attached for %g s", limit)
        self.is_without_controller = True
        os.kill(os.getpid(), signal.SIGINT)

    @property
    def has_controllers(self) -> bool:
        with self._lock:
            return self._is_controlled()

    def _is_controlled(self) -> bool:
        """Return whether an agent is there for a controller. Call under the lock."""
        return len(self._agents) > len(self._readers)

    def announce_end(self, seconds: float, reason: str) -> None:
        """Report to all controllers, present and new ones, that this host ends in ``seconds``. Returns at once."""
        with self._lock:
            self._ending = time.monotonic() + seconds, reason
            tokens = list(self._agents.values())
        for token in tokens:
            self._tell_of_end(token)

    def _tell_of_end(self, token: str) -> None:
        """Report the end of this host to an agent."""
        assert self._ending is not None
        at, reason = self._ending
        self._send_to_agent(
            token, lambda way: way.sendall(protocol.encode(Ending(max(0.0, at - time.monotonic()), reason)))
        )

    def close(self) -> None:
        self._closing = True
        self._tcp.close()
        self._spawner.close()

    def _asked(self, remote: PeerConnection, _: bytes, body: memoryview) -> None:
        """Answer a request. Runs on the thread of the connections."""
        try:
            ask = protocol.decode(body)
            if not isinstance(ask, Ask):
                raise msgspec.DecodeError(f"a {type(ask).__name__} where an Ask is expected")
        except msgspec.DecodeError as error:
            log.warning("%s sent an invalid request: %s", remote, error)
            self._tcp.hang_up(remote)
            return
        self._tcp.send(remote, b"", [protocol.encode(self._answer(ask, remote.secret))])

    def _answer(self, ask: Ask, secret: bytes) -> Welcome | Unwelcome:
        """Start an agent. ``secret``: that of the job; the controller has proved that it knows it."""
        here = Versions.here()
        if differences := ask.versions.differences(here):
            return Unwelcome(f"{', '.join(differences)}: {protocol.REMEDY}")
        token = secrets.token_hex(14) + "0000"
        plan = agent.Plan(
            token=token, root=ask.root, asker=ask.token, server=self._spawner.address,
            heartbeat=ask.heartbeat, silence=ask.silence,
        )  # fmt: skip
        read, write = os.pipe()
        try:
            os.write(write, secret)
            with self._lock:  # its end may be reported before `start` returns
                number = agent.start(self._spawner, f"agent {token[:HOST_ID_LENGTH]}", plan, read)
                self._agents[number] = token
                if ask.reads:
                    self._readers.add(number)
                is_ending = self._ending is not None
        except (OSError, RuntimeError, ValueError) as error:
            return Unwelcome(f"no agent can be started: {error}")
        finally:
            os.close(write)
        if is_ending:
            self._tcp.later(0.0, lambda: self._tell_of_end(token))
        return Welcome(token, protocol.host_name(), here, self._workers)

    def _event(self, event: Event) -> None:
        if isinstance(event, (Exited, SpawnFailed)):
            with self._lock:
                token = self._agents.pop(event.id, "")
                if event.id in self._readers:
                    self._readers.remove(event.id)
                else:
                    self._last_controller_end = time.monotonic()
                    never_attached = isinstance(event, SpawnFailed) or event.returncode == agent.NEVER_ATTACHED
                    self._had_controller = self._had_controller or not never_attached
            local_sockets.remove(agent.meeting_point(token))
            is_expected = isinstance(event, Exited) and event.returncode in (0, agent.NEVER_ATTACHED)
            if not is_expected and not self._closing:
                log.warning("agent %s: %s", token[:HOST_ID_LENGTH], event)

    def _hand_over(self, receiver: bytes, connection: socket.socket, preamble: bytes) -> bool:
        """Pass a connection of another gateway on to the agent that it is for. The agent checks its proof."""
        with self._lock:
            if receiver.hex() not in self._agents.values():
                return False
        passed = connection.dup()
        self._send_to_agent(
            receiver.hex(), lambda way: socket.send_fds(way, [preamble], [passed.fileno()]), passed.close
        )
        connection.close()
        return True

    def _send_to_agent(
        self, token: str, send: Callable[[socket.socket], object], done: Callable[[], object] = lambda: None,
        until: float | None = None,
    ) -> None:  # fmt: skip
        """Connect to an agent, which may still be starting, and send to it. Call ``done`` then, or when it has ended.

        Give up at the monotonic time ``until``, by default after `AGENT_READY_TIMEOUT_S`.
        """
        end = time.monotonic() + AGENT_READY_TIMEOUT_S if until is None else until
        try:
            with local_sockets.connect(agent.meeting_point(token), 1) as way:
                send(way)
        except OSError:
            with self._lock:
                there = token in self._agents.values()
            if there and time.monotonic() < end:
                self._tcp.later(0.01, lambda: self._send_to_agent(token, send, done, end))
                return
        done()


def run_worker_loop_forever(
    address: str = "127.0.0.1",
    *,
    secret: bytes | Sequence[bytes] | None = None,
    workers: Sequence[str] = (),
    on_ready: Any = None,
    tether: float | None = None,
    notice: float = 0.0,
    notice_signal: int = signal.SIGTERM,
) -> None:
    """Make this machine a host for controllers, until SIGTERM or Ctrl-C. Then all processes on the host are killed.

    ``address`` is where to listen, as "tcp://0.0.0.0:26600"; port 0 stands for any free port. ``workers`` are addresses
    of hosts that controllers may reach through this one, with `attach`. ``on_ready(host, port)`` is called when the
    host listens. With ``tether`` the host also ends when no controller has been attached for that many seconds. A
    controller that dies is then not attached any more.

    With ``notice`` the host goes on for that many seconds after ``notice_signal``, while a controller is attached. Its
    controllers and actors receive a `HostEnding` at once. SIGTERM during the notice, or Ctrl-C at any time, ends it.

    ``secret`` is that of the job, 32 bytes, or those of several jobs, which cannot access each other. The default is
    MONARCH_SECRET or the file MONARCH_SECRET_FILE, which has one secret in each line. Without these it is the user's
    own, on loopback only.

    Raises ValueError for an invalid address, ``tether`` or ``notice``, and OSError if it is not possible to listen
    there. Raises PermissionError for an address that other machines can reach without a secret of the job. Call it on
    the main thread.

    >>> import os, signal
    >>> from monarch_backend.hosts import run_worker_loop_forever
    >>> def end(host, port):
    ...     print("listens on", host)
    ...     os.kill(os.getpid(), signal.SIGTERM)
    >>> run_worker_loop_forever("tcp://127.0.0.1:0", on_ready=end)
    listens on 127.0.0.1
    """
    serve(
        address, secret=secret, workers=workers, on_ready=on_ready, tether=tether, notice=notice,
        notice_signals={notice_signal: signal.Signals(notice_signal).name},
    )  # fmt: skip


def serve(
    address: str,
    *,
    secret: bytes | Sequence[bytes] | None = None,
    workers: Sequence[str] = (),
    on_ready: Any = None,
    tether: float | None = None,
    first_tether: float | None = None,
    notice: float = 0.0,
    notice_signals: Mapping[int, str] = _SIGTERM,
    ignores_sigterm: bool = False,
    metrics: tuple[str, int] | None = None,
) -> int:
    """Do what `run_worker_loop_forever` does. Return the number of the signal that has ended it, 0 for the tether.

    ``first_tether``: seconds to wait for the first controller, if longer than ``tether``. Each of ``notice_signals``
    begins the notice, and is reported under its name there. With ``ignores_sigterm`` this process and the processes
    that it starts ignore SIGTERM: a scheduler sends it to all of them. ``metrics``: host and port of Prometheus's text.
    """
    host, port = parse_address(address)
    tether = check_timeout(tether, "tether", zero=False)
    notice = check_timeout(notice, "notice") or 0.0
    if isinstance(workers, str):
        raise ValueError("workers is a list of addresses")
    for worker in workers:
        parse_address(worker)
    known = [secret] if isinstance(secret, bytes) else list(secret or given_secrets())
    if not is_loopback(host) and not known:
        raise PermissionError(
            f"{address} can be reached from other machines, and the job has no secret: set MONARCH_SECRET_FILE to a "
            "file of mode 600 with 64 hexadecimal digits, as of `openssl rand -hex 32`, here and for the controller"
        )
    allow_descriptors()
    reasons = {number: f"it has received {name}" for number, name in notice_signals.items()} if notice else {}
    ends = [signal.SIGINT] if ignores_sigterm else [signal.SIGTERM, signal.SIGINT]
    daemon = Daemon(*(known or [user_secret()]), workers=workers, ignores_sigterm=ignores_sigterm)
    with (
        _signals(*ends, *reasons, ignored=[signal.SIGTERM] if ignores_sigterm else []) as next_signal,
        _metrics(metrics),
    ):
        try:
            where = daemon.start(host, port)
            if on_ready is not None:
                on_ready(*where)
            if tether is not None:
                daemon.end_without_controller(tether, first_tether or 0.0)
            number = next_signal()
            if number in reasons:
                _give_notice(daemon, notice, reasons[number], ends, next_signal)
            return 0 if daemon.is_without_controller else number
        finally:
            daemon.close()


@contextlib.contextmanager
def _metrics(address: tuple[str, int] | None) -> Iterator[None]:
    """Serve the metrics of this user's programs on this machine, in the context. Raises OSError."""
    if address is None:
        yield
        return
    from monarch_backend._telemetry import program_recording  # rarely needed
    from monarch_backend._telemetry.export import prometheus
    from monarch_backend._telemetry.export.series import Collector

    collector = Collector(lambda wanted: program_recording.read(None, wanted))
    with prometheus.serving(*address, lambda: prometheus.as_text(collector.look()[0])) as url:
        print(f"monarch_backend: metrics at {url}", file=sys.stderr, flush=True)
        yield


def _give_notice(
    daemon: Daemon, seconds: float, reason: str, ends: Sequence[int], next_signal: Callable[..., int]
) -> None:
    """Announce the host's end, and return when it has to end: in time, without controllers, or by one of ``ends``."""
    until = time.monotonic() + seconds
    if daemon.has_controllers:
        log.warning("this host ends in %g s: %s", seconds, reason)
        daemon.announce_end(seconds, reason)
    while daemon.has_controllers and (left := until - time.monotonic()) > 0:
        if next_signal(min(left, NOTICE_POLL_S)) in ends:
            return


@contextlib.contextmanager
def _signals(*numbers: int, ignored: Sequence[int] = ()) -> Iterator[Callable[..., int]]:
    """Yield a function that waits for one of these signals, also an earlier one, and returns its number.

    It returns 0 after ``seconds``, its argument. It reads a socket: a lock would miss some signals.
    """
    told, tell = socket.socketpair()
    with told, tell:
        tell.setblocking(False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in {*numbers, *ignored}}
        before = signal.set_wakeup_fd(tell.fileno())
        # A host inherits the blocked signals of the thread that starts it.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

        def wait(seconds: float | None = None) -> int:
            until = None if seconds is None else time.monotonic() + seconds
            while True:
                left = None if until is None else max(0.0, until - time.monotonic())
                if not select.select([told], [], [], left)[0]:
                    return 0
                if (number := told.recv(1)[0]) in numbers:
                    return int(number)

        try:
            yield wait
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
