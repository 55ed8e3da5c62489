"""A controller's agent on a host: the gateway of that controller there. It starts the host's processes and ends with
it.

The agent is one process, forked from the host's fork server. All processes that it started are killed at its end. On
the controller's own host it is the gateway only. protocol.py defines its messages.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import msgspec

from monarch_backend._actor import host_ending
from monarch_backend._core import env, platform
from monarch_backend._hosts import protocol
from monarch_backend._hosts.connection_settings import tls_for
from monarch_backend._hosts.log_forwarding import OutputReader
from monarch_backend._hosts.protocol import (
    Ask,
    AskPlaces,
    Attach,
    Attached,
    AttachFailed,
    Ending,
    Exited,
    Finish,
    Hosts,
    Kill,
    KillIfUnresponsive,
    Lost,
    Output,
    OutputTaken,
    Spawn,
    SpawnFailed,
    Started,
    Unwelcome,
    Versions,
    Welcome,
)
from monarch_backend._hosts.remote_places import Answers
from monarch_backend._processes import local_sockets, system_calls
from monarch_backend._processes.resource_limits import allow_descriptors
from monarch_backend._processes.spawner import RANKS_HERE, Event, ProcessSpec, Spawner
from monarch_backend._transport.local.event_loop import ProgressLoop, release
from monarch_backend._transport.local.frames import Agent as AgentFrame
from monarch_backend._transport.local.frames import Frame, FrameError, Replaced, Setting
from monarch_backend._transport.local.links import LocalLinks, few_processors
from monarch_backend._transport.local.peer import CreditWaiter, Peer
from monarch_backend._transport.local.router import Router
from monarch_backend._transport.network import envelope
from monarch_backend._transport.network.auth import SECRET_BYTES
from monarch_backend._transport.network.connection import PeerConnection, Timeouts
from monarch_backend._transport.network.connection_manager import Tcp, secrets_by_name
from monarch_backend._transport.network.envelope import Envelope
from monarch_backend._transport.network.gateway import Gateway
from monarch_backend._transport.network.multicast import DEFAULT_FANOUT
from monarch_backend._transport.network.remote_links import RemoteLinks
from monarch_backend._transport.tokens import HOST_ID_LENGTH, host_of

log = logging.getLogger("monarch_backend")

NEVER_ATTACHED = 3
"""Exit code of an agent whose controller has not attached this host, such as because another host did not answer."""

LOOPBACK_LINK = -9
"""Link on which the agent's own router receives frames from other hosts that are addressed to the agent."""


CONTROLLER_TIMEOUT_S = 10.0
"""Seconds in which the controller that requested an agent must connect to it: it may have died or given up meanwhile.
"""


AGENT_START_MIN_S = 5.0
"""Minimum of seconds for the start of an agent whose host has answered: its fork server may be importing torch."""


AGENT_REPLY_MIN_S = 3.0
"""Minimum of seconds for another host's agent to answer the first connection. After them this host counts it as lost.
"""


class Plan(NamedTuple):
    """Configuration of an agent. ``server``: address of the host's fork server.

    ``asker``: the gateway that requested this agent, and its route to the controller; "" on the controller's own host.
    The plan does not contain the job's secret: workers inherit the memory of the fork server, which reads the plan.
    """

    token: str
    root: str
    asker: str
    server: str
    heartbeat: float
    silence: float

    @property
    def home(self) -> bool:
        """Whether this agent runs on the controller's own host."""
        return not self.asker


def meeting_point(token: str) -> str:
    """Return the address of the socket on which the host's daemon hands connections over to its agent."""
    return local_sockets.address_of(f"agent-{token}")


class AgentProcess:
    """The main object of an agent's process. `run` returns when the agent has to end."""

    def __init__(self, plan: Plan, next_secret: Callable[[], bytes]) -> None:
        """``next_secret`` reads this host's secret first; on the controller's host it reads those of all jobs."""
        self._plan, self._next_secret = plan, next_secret
        self._secrets: dict[bytes, bytes] = {}  # by name
        self._secret = b"" if plan.home else next_secret()  # this host's
        self._pid = os.getpid()
        self._links = LocalLinks(plan.token, oversubscribed=few_processors())
        self._progress = ProgressLoop(self._links.mailbox, self._handle)
        self._gateway = Gateway(
            self._links.mailbox, plan.token, self._pid, self._to_host, self._to_me, self._progress.later,
            branches=int(env.get("MONARCH_TREE_FANOUT") or DEFAULT_FANOUT), way=self._way,
        )  # fmt: skip
        remote_links = RemoteLinks(
            self._links, self._pid, plan.token, LOOPBACK_LINK, self._gateway.send, lambda send: self._router.keep(send)
        )
        self._remote_links = remote_links
        self._router = Router(remote_links, self._wait)
        self._router.wake = self._progress.wake  # type: ignore[method-assign]
        self._router.later = self._progress.later  # type: ignore[method-assign]
        self._router.on_gone = self._gone
        self._router.on_met = self._met
        self._router.control[AgentFrame] = self._told
        self._router.control.update(dict.fromkeys((Replaced, Setting), lambda *_: None))  # they are for all processes
        self._root = self._router.peer(plan.root)
        self._secrets_of: dict[str, bytes] = {}  # by host, where they are not this host's own
        bounds = Timeouts(heartbeat=plan.heartbeat, silence=plan.silence)
        accepted = {} if plan.home else secrets_by_name(self._secret)
        self._tcp = Tcp(
            bytes.fromhex(plan.token), accepted, self._arrived, self._up, self._lost, bounds=bounds,
            tls=tls_for(), offers_rdma=True,
        )  # fmt: skip
        # Guards the sessions and all that is waited for: _hosts, _known, _ways, _attached, _asking, _until, _awaited.
        self._lock = threading.RLock()
        self._hosts: dict[
            str, list[PeerConnection]
        ] = {}  # sessions by host; there are two where both sides have called
        self._known: dict[str, tuple[str, int, str, str]] = {}  # addresses of hosts
        self._places = Answers(self._router, self._known, plan.asker)
        self._ways: dict[str, str] = {}  # the next host on the route to a host
        self._attached: set[str] = set()  # hosts that this agent has attached
        if plan.asker and host_of(plan.asker) != host_of(plan.root):
            self._ways[host_of(plan.root)] = host_of(plan.asker)
        self._asking: dict[PeerConnection, Attach] = {}  # requests to daemons for an agent
        self._until: dict[int, float] = {}  # deadlines of these requests, by id
        self._awaited: dict[PeerConnection, Attached] = {}  # first connections to agents, and the messages to send then
        self._starting = threading.Lock()  # held until a new process has its entry in _numbers
        self._spawner: Spawner | None = None
        self._numbers: dict[int, int] = {}  # the spawner's numbers, by the controller's
        self._names: dict[int, int] = {}  # the controller's numbers, by the spawner's
        self._pids: dict[int, int] = {}  # by the controller's numbers
        self._stopped: set[int] = set()  # the controller has sent them a signal; by its numbers
        self._output: OutputReader | None = None
        self._end = CreditWaiter()
        self._ending: tuple[float, str] | None = None  # monotonic time of this host's end, and the reason
        self._ending_is_reported = False
        self._listener: socket.socket | None = None
        self.was_attached = False

    def run(self) -> None:
        self._progress.start()
        self._tcp.start()
        if self._plan.home:
            self._stay_with_the_controller()
        else:
            self._listener = local_sockets.listen_at(meeting_point(self._plan.token), 64)
            threading.Thread(target=self._take_over, name="monarch-take-over", daemon=True).start()
            self._progress.later(CONTROLLER_TIMEOUT_S, self._end_if_nobody_came)
        self._progress.wait(self._end)
        if self._spawner is not None:
            self._spawner.close()
        self._tcp.close()
        self._links.host.leave()

    def _end_if_nobody_came(self) -> None:
        if host_of(self._plan.asker) not in self._hosts:
            self._finish("its controller has never connected")

    def _stay_with_the_controller(self) -> None:
        while self._router.link_to(self._root) < 0 and self._root.gone is None:
            self._progress.wait(CreditWaiter(), 0.02, lambda: self._root.link >= 0)
        if self._root.gone is not None or not self._links.host.die_with_peer(self._plan.root):
            raise SystemExit(1)

    def _take_over(self) -> None:
        """Accept connections that the daemon of this host hands over."""
        assert self._listener is not None
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):
                    return
                time.sleep(0.1)  # out of descriptors at present
                continue
            with connection:
                if local_sockets.peer(connection)[1] != os.geteuid():
                    continue
                connection.settimeout(5)
                with contextlib.suppress(OSError):
                    preamble, fds, flags, _ = socket.recv_fds(connection, 4096, 1)
                    for fd in fds:
                        self._tcp.take_over(socket.socket(fileno=fd), preamble)
                    if preamble and not fds and not flags & socket.MSG_CTRUNC:  # truncated: out of descriptors
                        self._hear_daemon(preamble)

    def _hear_daemon(self, data: bytes) -> None:
        try:
            message = protocol.decode(data)
        except msgspec.DecodeError as error:
            log.error("the daemon of this host has sent an invalid message: %s", error)
            return
        if isinstance(message, Ending):
            until, reason = time.monotonic() + message.seconds, message.reason
            self._progress.later(0.0, lambda: self._announce(until, reason))

    def _announce(self, until: float, reason: str) -> None:
        """Report the end of this host to the controller, and to all processes here."""
        self._ending = until, reason
        self._report_ending()
        for token in self._gateway.local_processes():
            self._met(self._router.peer(token))

    def _report_ending(self) -> None:
        """Report the end of this host to the controller, once it has been announced and the controller takes it."""
        if self._ending is not None and self.was_attached and not self._ending_is_reported:
            until, reason = self._ending
            self._tell(Ending(until - time.monotonic(), reason))
            self._ending_is_reported = True

    def _met(self, peer: Peer) -> None:
        """Report the end of this host to a process here, if it was announced."""
        if self._ending is not None and host_of(peer.token) == host_of(self._plan.token):
            until, reason = self._ending
            notice = [protocol.host_name(), reason, until - time.monotonic()]
            self._router.tell(peer, Setting(host_ending.SETTING, notice))

    def _finish(self, why: str) -> None:
        if not self._end.ready:
            log.info("the agent ends: %s", why)
            self._end.ready = True
            release(self._end)
            self._progress.wake()

    # ---- frames

    def _wait(self, room: CreditWaiter, seconds: float | None, _whole: bool) -> bool:
        return self._progress.wait(room, seconds)

    def _handle(self, events: list[Any]) -> None:
        for event in events:  # one by one: a message that tells a route comes before the frame that takes it
            rest = self._gateway.handle((event,))
            if rest:
                self._router.handle(rest)

    def _to_me(self, frame: Envelope) -> None:
        self._progress.later(0.0, lambda: self._router.handle(self._remote_links.translate([(LOOPBACK_LINK, *frame)])))

    def _way(self, host: str) -> str:
        return self._ways.get(host, host)

    def _to_host(self, host: str, frame: Envelope) -> bool:
        host = self._way(host)
        with self._lock:
            remotes = self._hosts.get(host)
            if remotes is None:
                known = self._known.get(host)
                if known is None:
                    return False
                patience = max(AGENT_REPLY_MIN_S, self._plan.silence)
                secret = self._secrets_of.get(host, self._secret)
                remotes = [self._tcp.call(known[:2], secret, bytes.fromhex(known[2]), patience=patience)]
                self._hosts[host] = remotes
        self._tcp.send(remotes[0], *envelope.pack(frame), len(frame.buffers or ()))
        return True

    def _arrived(self, remote: PeerConnection, prefix: bytes, body: memoryview) -> None:
        if remote in self._asking:
            self._answered(remote, body)
            return
        try:
            self._gateway.arrived(prefix, body, functools.partial(self._learn_way, remote))
        except FrameError as error:
            log.error("host %s: %s; its messages are not read any more", self._name_of(remote), error)
            self._tcp.hang_up(remote)
            remote.lost = str(error)
            self._lost(remote)

    def _learn_way(self, remote: PeerConnection, caller: str) -> None:
        """Answer ``caller`` on the route of its call: the controller's message about its host may come later."""
        with self._lock:
            if caller not in self._known and caller not in self._hosts:
                self._ways.setdefault(caller, _host_of(remote))

    # ---- start and loss of hosts

    def _name_of(self, remote: PeerConnection) -> str:
        host = _host_of(remote)
        return self._name_of_host(host) if host in self._known else str(remote)

    def _up(self, remote: PeerConnection) -> None:
        asked = self._asking.get(remote)
        if asked is not None:
            plan = self._plan
            here = Versions.here(asked.any_torch)
            ask = Ask(plan.token, plan.root, here, plan.heartbeat, plan.silence, asked.reads)
            self._tcp.send(remote, b"", [protocol.encode(ask)])
            return
        with self._lock:
            remotes = self._hosts.setdefault(_host_of(remote), [])
            if remote not in remotes:
                remotes.append(remote)
            attached = self._awaited.pop(remote, None)
        if attached is not None:
            self._tell(attached)

    def _lost(self, remote: PeerConnection) -> None:
        asked = self._asking.pop(remote, None)
        if asked is not None:
            self._tell(AttachFailed(asked.id, f"{asked.host}:{asked.port}: {remote.lost}"))
            return
        host = _host_of(remote)
        with self._lock:
            awaited = self._awaited.pop(remote, None)
            if awaited is not None:
                self._hosts.pop(host, None)
                self._known.pop(host, None)
                self._attached.discard(host)
            elif remote not in self._hosts.get(host, []):
                return
        if awaited is not None:  # without the lock: the route to the controller may be another host of this agent
            self._tell(AttachFailed(awaited.id, f"{remote}: no connection to the host's agent: {remote.lost}"))
            return
        self._lost_host(host, f"host {self._name_of_host(host)} is lost: {remote.lost}", host in self._attached)

    def _lost_host(self, host: str, why: str, for_good: bool) -> None:
        """Drop a host, and those behind it. ``for_good``: they are lost to all hosts, not only to this one."""
        with self._lock:
            remotes = self._hosts.pop(host, [])
        for remote in remotes:  # all its connections end, so that it loses this host as a whole, too
            if remote.lost is None:
                self._tcp.hang_up(remote)
        if host == host_of(self._plan.asker):
            self._finish(why)
        for each in (host, *(other for other, way in list(self._ways.items()) if way == host)):
            if for_good:
                self._known.pop(each, None)
                self._ways.pop(each, None)
            if host in self._attached:
                self._tell(Lost(each, why))
            self._gateway.lost_host(each, why)
        if for_good:
            self._attached.discard(host)

    def _name_of_host(self, host: str) -> str:
        known = self._known.get(host)
        return f"{known[3]} ({known[0]})" if known else host

    def _gone(self, peer: Peer) -> None:
        if peer is self._root:
            self._finish(f"its controller is gone: {peer.gone}")

    def _answered(self, remote: PeerConnection, body: memoryview) -> None:
        asked = self._asking.pop(remote)
        self._tcp.hang_up(remote)
        try:
            answer = protocol.decode(body)
        except msgspec.DecodeError as error:
            answer = Unwelcome(f"it answered with an invalid message: {error}")
        here = Versions.here(asked.any_torch)
        if isinstance(answer, Welcome) and not (differences := here.differences(answer.versions)):
            self._known[host_of(answer.token)] = (asked.host, asked.port, answer.token, answer.host_name)
            self._call_agent(asked, answer)
            return
        if isinstance(answer, Welcome):
            answer = Unwelcome(f"{', '.join(differences)}: {protocol.REMEDY}")
        self._tell(AttachFailed(asked.id, f"{asked.host}:{asked.port}: {answer.reason}"))

    def _call_agent(self, asked: Attach, answer: Welcome) -> None:
        """Connect to the new agent. Its host counts as attached when the agent answers."""
        receiver = bytes.fromhex(answer.token)
        with self._lock:
            left = max(AGENT_START_MIN_S, self._until.pop(asked.id, 0.0) - time.monotonic())
            secret = self._secret_for(asked)
            remote = self._tcp.call((asked.host, asked.port), secret, receiver, patience=left)
            self._secrets_of[host_of(answer.token)] = secret
            self._hosts[host_of(answer.token)] = [remote]
            self._attached.add(host_of(answer.token))
            self._awaited[remote] = Attached(asked.id, answer.token, answer.host_name, answer.workers)

    # ---- requests of the controller

    def _tell(self, message: Any) -> None:
        self._router.tell(self._root, AgentFrame(), protocol.encode(message))

    def _told(self, peer: Peer, _: AgentFrame, frame: Frame) -> None:
        try:
            message = protocol.decode(frame.body)
        except msgspec.DecodeError as error:
            raise FrameError(f"not a message for an agent: {error}") from None
        if isinstance(message, AskPlaces):  # from any process of the program
            self._places.take(message)
            return
        if peer is not self._root:
            raise FrameError("only the controller can send this request to an agent")
        if isinstance(message, Attach):
            self._until[message.id] = time.monotonic() + message.patience
            self._tcp.call_soon(lambda: self._ask(message))
        elif isinstance(message, Finish):
            self.was_attached = self.was_attached and not message.attach_failed
            self._finish("its controller ends")
        elif isinstance(message, Hosts):
            self._known.update(message.known)
            self._ways.update(message.ways)
            self.was_attached = True  # the first message after the controller has added this host
            self._report_ending()
        elif isinstance(message, Lost):
            self._lost_host(message.host, message.reason, for_good=True)
        elif isinstance(message, Spawn):
            self._spawn(message)
        elif isinstance(message, Kill):
            number = self._numbers.get(message.id)
            if number is not None and self._spawner is not None:
                self._stopped.add(message.id)
                self._spawner.kill(number, message.signal)
        elif isinstance(message, KillIfUnresponsive):
            self._kill_if_unresponsive(message)
        elif isinstance(message, OutputTaken) and self._output is not None:
            self._output.taken(message.count)

    def _ask(self, message: Attach) -> None:
        """Connect to a daemon. On the thread of the connections: it must be in `_asking` before an event of it."""
        remote = self._tcp.call((message.host, message.port), self._secret_for(message), patience=message.patience)
        self._asking[remote] = message

    def _secret_for(self, message: Attach) -> bytes:
        if not message.secret_name:
            return self._secret
        while message.secret_name not in self._secrets:  # written before the message was sent
            self._secrets.update(secrets_by_name(self._next_secret()))
        return self._secrets[message.secret_name]

    def _kill_if_unresponsive(self, message: KillIfUnresponsive) -> None:
        number, pid = self._numbers.get(message.id), self._pids.get(message.id)
        if number is None or pid is None or self._spawner is None:
            return
        unread = self._gateway.unread(pid)
        if unread and (not message.stop_read or system_calls.stands_still(pid)):
            self._spawner.kill(number)

    def _spawn(self, message: Spawn) -> None:
        pipes: list[int] = []
        try:
            if self._output is None:
                self._output = OutputReader(lambda number, stream, data: self._tell(Output(number, stream, data)))
            if self._spawner is None:
                self._spawner = Spawner(self._event, self._plan.server)
            for _ in range(2):
                pipes += os.pipe()
            with self._starting:  # events wait until their process has its entry
                [number] = self._spawner.spawn([self._spec(message, pipes[1], pipes[3])])
                self._numbers[message.id], self._names[number] = number, message.id
                self._output.add(message.id, 1, pipes[0])
                self._output.add(message.id, 2, pipes[2])
        except Exception as error:
            for fd in pipes:
                os.close(fd)
            self._tell(SpawnFailed(message.id, str(error) or type(error).__name__))
            return
        os.close(pipes[1])
        os.close(pipes[3])

    def _spec(self, message: Spawn, stdout: int, stderr: int) -> ProcessSpec:
        """Merge this host's environment and paths with the controller's; its directory counts if it exists here."""
        environment = {**os.environ, **{os.fsdecode(k): os.fsdecode(v) for k, v in message.environment.items()}}
        here = int(env.get(RANKS_HERE, environment))
        environment.pop(RANKS_HERE, None)
        theirs = [os.fsdecode(entry) for entry in message.path]
        added = [entry for entry in theirs if entry not in sys.path and _is_code(entry)]
        cwd = os.fsdecode(message.cwd)
        return ProcessSpec(
            label=message.label, main=message.main, environment=environment, path=[*added, *sys.path],
            argv=[os.fsdecode(word) for word in message.argv], cwd=cwd if os.path.isdir(cwd) else os.getcwd(),
            bootstrap=message.bootstrap, cpus=None if message.cpus is None else frozenset(message.cpus),
            threads=max(1, platform.usable_cpus() // here), stdout=stdout, stderr=stderr,
            imports=message.imports,
        )  # fmt: skip

    def _event(self, event: Event) -> None:
        """Forward an event to the controller. Runs on the spawner's thread."""
        with self._starting:
            number = self._names.get(event.id)
        if number is None:
            return
        if isinstance(event, Started):
            self._pids[number] = event.pid
            self._tell(msgspec.structs.replace(event, id=number))
            return
        assert isinstance(event, (Exited, SpawnFailed))
        if self._output is not None:
            self._output.end(number)
        self._names.pop(event.id, None)
        self._numbers.pop(number, None)
        self._pids.pop(number, None)
        if isinstance(event, Exited) and event.returncode != 0 and number not in self._stopped:
            from monarch_backend._telemetry import last_messages  # its imports are preloaded here, not in the daemon

            event = msgspec.structs.replace(event, messages=last_messages.of_started(event.pid))
        self._stopped.discard(number)
        self._tell(msgspec.structs.replace(event, id=number))


def _host_of(remote: PeerConnection) -> str:
    """Return the host that this connection reaches, or is meant to reach."""
    return (remote.who if remote.up else remote.wanted).hex()[:HOST_ID_LENGTH]


def start(spawner: Spawner, label: str, plan: Plan, secrets: int) -> int:
    """Start an agent's process, and return its number at the spawner. Raises as `Spawner.spawn` does.

    ``secrets`` is the read end of a pipe, which is closed here. The fork server does not read it: each process that is
    forked later would have a copy of the secret.
    """
    try:
        spec = ProcessSpec(
            label=label, main=cloudpickle.dumps(functools.partial(main, plan)),
            environment=env.without_secrets(os.environ), path=sys.path, argv=sys.argv, cwd=os.getcwd(), threads=1,
            stdin=secrets,
        )  # fmt: skip
        [number] = spawner.spawn([spec])
    finally:
        os.close(secrets)
    return number


def main(plan: Plan) -> None:
    """Run an agent in a process of the fork server. Standard input is the pipe with secrets, see `start`."""
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def next_secret() -> bytes:
        secret = os.read(pipe, SECRET_BYTES)
        if len(secret) != SECRET_BYTES:
            raise EOFError("the pipe with secrets has ended")
        return secret

    allow_descriptors()  # each process here needs two pipes, a link and a pidfd
    process = AgentProcess(plan, next_secret)
    process.run()
    if not plan.home and not process.was_attached:
        raise SystemExit(NEVER_ATTACHED)


def _is_code(entry: str) -> bool:
    """Return whether the path exists here and has no other torch, as paths of a controller with another torch do."""
    if not os.path.exists(entry):
        return False
    try:
        with open(os.path.join(entry, "torch", "version.py"), encoding="utf-8", errors="replace") as said:
            return f"__version__ = '{Versions.here().torch}" in said.read()
    except OSError:
        return True
