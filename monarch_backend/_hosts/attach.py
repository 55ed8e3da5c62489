"""The controller's side of other hosts: its own gateway, its agents on the hosts, and the HostMesh of the hosts."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from monarch_backend._actor.host_ending import HostEnding
from monarch_backend._actor.runtime_extension import RuntimeExtension
from monarch_backend._core.timeouts import check_bounded
from monarch_backend._hosts import agent as agent_module
from monarch_backend._hosts import protocol, remote_places
from monarch_backend._hosts.connection_settings import find_secret, parse_address, tls_for
from monarch_backend._hosts.host_successor import HostSuccessor
from monarch_backend._hosts.loss_reasons import K, LossReasons
from monarch_backend._hosts.protocol import Attach, Attached, AttachFailed, Ending, Finish, Hosts, Lost, Places, Started
from monarch_backend._hosts.remote_spawner import RemoteSpawner
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.host_mesh import HostMesh
from monarch_backend._mesh.runtime_protocol import program
from monarch_backend._mesh.shape import Shape
from monarch_backend._processes.spawner import Spawner
from monarch_backend._telemetry import texts
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._transport.local.frames import Agent as AgentFrame
from monarch_backend._transport.local.frames import Frame, Setting
from monarch_backend._transport.local.peer import CreditWaiter, Peer
from monarch_backend._transport.network.auth import name_of
from monarch_backend._transport.network.connection import Timeouts
from monarch_backend._transport.network.remote_links import RemoteLinks
from monarch_backend._transport.tokens import HOST_ID_LENGTH, host_of

log = logging.getLogger("monarch_backend")

CLOSE_TIMEOUT_S = 1.0
"""Seconds for the gateway to end its sessions with other hosts."""

SEARCH_END_TIMEOUT_S = 0.2
"""Seconds for searches for successors to end. One that still waits for a scheduler is left to the interpreter's end."""

DEFAULT_HEARTBEAT_S = 1.0
DEFAULT_SILENCE_S = 3.0

GATEWAY_REPORT_S = 6.0
"""Seconds after a deadline in which the gateway reports that it has passed, and why."""

GATEWAY_START_TIMEOUT_S = 120.0
"""Seconds for the start of this host's gateway, whose end is noticed at once. It may be the first process that needs
the fork server, whose imports take long on a busy machine.
"""


class Host:
    def __init__(
        self, answer: Attached, address: tuple[str, int], agent: Peer, spawner: RemoteSpawner, through: Host | None,
        secret: bytes,
    ) -> None:  # fmt: skip
        self.secret = secret
        self.id, self.token, self.name, self.address = host_of(answer.token), answer.token, answer.host_name, address
        self.agent, self.spawner, self.workers = agent, spawner, answer.workers
        self.through = through  # the host on the route to it, if this one cannot connect to it
        self.lost: str | None = None  # the reason, once it is lost
        self.ending: HostEnding | None = None  # once its end was announced
        self.explain: Callable[[Callable[[str], None]], None] | None = None  # reports a scheduler's reason later
        self.explain_limit = 0.0  # seconds until it has reported
        self.successor: HostSuccessor | None = None  # once it is lost, the host that takes its place, if one may

    def note(self, what: str, reason: str = "", *, is_failure: bool = False) -> None:
        """Record an event of its life."""
        texts.life(Kind.HOST, f"{self.name} ({self.address[0]})", what, reason, is_failure=is_failure)


class HostRegistry(RuntimeExtension):
    has_work = True

    def __init__(self, owner: Any, bounds: Timeouts) -> None:
        self._program = owner
        self._bounds = bounds
        self._attaching = threading.Lock()  # guards _sent, and the order of messages about new hosts
        self._sent: set[bytes] = set()  # names of the secrets that were sent to the gateway
        self.hosts: dict[str, Host] = {}
        self._lost_before: dict[str, str] = {}  # reasons of losses that were reported before the host was added
        self._answers: dict[int, Any] = {}  # answers to Attach, by its id
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # guards hosts and their loss; not held while a message is sent
        self._ended = threading.Event()  # set at the end of the gateway
        tls_for()  # raises here for wrong TLS settings, rather than in the gateway
        self.gateway = self._start_gateway()

    # ---- this host's gateway

    def _start_gateway(self) -> Peer:
        owner = self._program
        read, self._secret_pipe = os.pipe()
        token = owner.router.token[:HOST_ID_LENGTH] + secrets.token_hex(10) + "0000"
        peer: Peer = owner.router.expect(token, "the gateway of this host")
        server = owner.owner.starter.fork_server_address()
        plan = agent_module.Plan(
            token=token, root=owner.router.token, asker="", server=server,
            heartbeat=self._bounds.heartbeat, silence=self._bounds.silence,
        )  # fmt: skip
        self._spawner = Spawner(lambda event: self._gateway_event(peer, event), server)
        owner.shutdown.end_first()
        owner.router.control[AgentFrame] = self._heard
        agent_module.start(self._spawner, "gateway", plan, read)
        if (
            not self._until(lambda: peer.link >= 0 or peer.gone is not None, GATEWAY_START_TIMEOUT_S)
            or peer.gone is not None
        ):
            raise RuntimeError(f"the gateway of this host did not start: {peer.gone or 'it does not answer'}")
        go_through(owner, token)
        return peer

    def _gateway_event(self, peer: Peer, event: Any) -> None:
        if not isinstance(event, Started):
            self._ended.set()
            self._program.call_soon(lambda: self._program.router.never_came(peer, str(event)))

    def _until(self, ready: Callable[[], bool], seconds: float) -> bool:
        owner = self._program
        end = owner.clock.now() + seconds
        while not ready() and owner.clock.now() < end:
            owner.progress.wait(CreditWaiter(), min(0.05, max(0.0, end - owner.clock.now())), ready)
        return ready()

    # ---- hosts

    def attach(
        self, addresses: Sequence[tuple[str, int]], secret: bytes, source: str, patience: float, any_torch: bool,
        through: Host | None = None,
    ) -> list[Host]:  # fmt: skip
        """Attach all or raise ConnectionError, with each reason and ``source``, a sentence on the secret."""
        answers = self._request(addresses, secret, patience, any_torch, through)
        failed = [each for each in answers if isinstance(each, str)]
        if failed:
            self.dismiss([answer.token for answer in answers if isinstance(answer, Attached)])
            what = f"{len(failed)} of {len(addresses)} hosts can't be attached: {'; '.join(failed)}"
            raise ConnectionError(f"{what} ({source})")
        return [each for each in self._add_all(addresses, answers, secret, through) if isinstance(each, Host)]

    def attach_readable(self, addresses: Sequence[tuple[str, int]], secret: bytes, patience: float) -> list[Host | str]:
        """Attach, as a reader, those that can be attached. The others have the reason in place of the host."""
        return self._add_all(addresses, self._request(addresses, secret, patience, False, None, True), secret, None)

    def _request(
        self,
        addresses: Sequence[tuple[str, int]],
        secret: bytes,
        patience: float,
        any_torch: bool,
        through: Host | None,
        reads: bool = False,
    ) -> list[Attached | str]:
        """Return the answers of the hosts, or the reasons why there are none."""
        numbers = [next(self._ids) for _ in addresses]
        asked, named = self.gateway, name_of(secret)
        if through is not None:
            asked, named = through.agent, b""
        else:
            with self._attaching:
                if named not in self._sent:
                    self._sent.add(named)
                    os.write(self._secret_pipe, secret)
        for number, (host, port) in zip(numbers, addresses, strict=True):
            self._say(asked, Attach(number, host, port, patience, any_torch, named, reads))

        def over() -> bool:
            lost = through is not None and through.lost is not None
            ends = lost or self._program.closing or self.gateway.gone is not None
            return ends or all(number in self._answers for number in numbers)

        self._until(over, patience + GATEWAY_REPORT_S)
        if self.gateway.gone is not None:
            raise RuntimeError(
                f"the gateway of this host has ended, and with it all ways to others: {self.gateway.gone}"
            )
        if through is not None and through.lost is not None:
            raise ConnectionError(through.lost)
        answers = [self._answers.pop(number, None) for number in numbers]
        return [
            answer
            if isinstance(answer, Attached)
            else answer.reason
            if answer is not None
            else f"{address[0]}:{address[1]}: no answer within {patience:g} s"
            for answer, address in zip(answers, addresses, strict=True)
        ]

    def _add_all(
        self, addresses: Sequence[tuple[str, int]], answers: Sequence[Attached | str], secret: bytes,
        through: Host | None,
    ) -> list[Host | str]:  # fmt: skip
        with self._attaching:
            made = [
                answer if isinstance(answer, str) else self._add(answer, address, through, secret)
                for answer, address in zip(answers, addresses, strict=True)
            ]
            self._tell_everybody()
        return made

    def _say(self, agent: Peer, message: Any) -> None:
        self._program.router.tell(agent, AgentFrame(), protocol.encode(message))

    def dismiss(self, agents: Sequence[str]) -> None:
        """End agents because other hosts could not be attached."""
        for token in agents:
            self._say(self._program.router.peer(token), Finish(attach_failed=True))

    def _add(self, answer: Attached, address: tuple[str, int], through: Host | None, secret: bytes) -> Host:
        owner = self._program
        agent = owner.router.peer(answer.token)
        agent.label = f"the agent of {answer.host_name}"

        spawner = RemoteSpawner(functools.partial(self._say, agent), owner.owner.exits.on_event)
        host = Host(answer, address, agent, spawner, through, secret)
        with self._lock:
            self.hosts[host.id] = host
            why = self._lost_before.pop(host.id, None)
        host.note("ready")
        if why is not None:
            self.lost(host.id, why)
        return host

    def _alive(self) -> list[Host]:
        with self._lock:
            return [host for host in self.hosts.values() if host.lost is None]

    def _tell_everybody(self) -> None:
        alive = self._alive()
        known = {host.id: (*host.address, host.token, host.name) for host in alive}
        self._say(self.gateway, Hosts(known, {h.id: h.through.id for h in alive if h.through is not None}))
        for host in alive:
            self._say(host.agent, Hosts(known, self._ways_of(host, alive)))
        for host in alive:
            if host.lost is not None:  # meanwhile: the other agents may have had the report before the host's address
                self._tell_of_loss(host)

    def _ways_of(self, host: Host, alive: Sequence[Host]) -> dict[str, str]:
        """Return routes to the hosts that ``host`` cannot connect to. Both directions take one route, and break
        together.

        A host behind a gateway reaches all others through it. The gateway connects to the hosts behind it, and reaches
        others through the controller's own host, as these reach it. Hosts of another job have another secret. The
        controller's host has both secrets and is the route between them.
        """
        home = host_of(self._program.router.token)
        if host.through is not None:
            gateway = host.through.id
            return {home: gateway} | {h.id: gateway for h in alive if h.id != gateway and h.through is not host.through}
        gateways = [h.through for h in alive if h.through is not None]
        if host in gateways:
            return {h.id: home for h in alive if h is not host and h.through is not host}
        return {h.id: home for h in alive if h.through is not None or h in gateways or h.secret != host.secret}

    def _heard(self, peer: Peer, _: AgentFrame, frame: Frame) -> None:
        host = self.hosts.get(host_of(peer.token))
        if peer is not self.gateway and (host is None or host.agent is not peer):
            return
        message = protocol.decode(frame.body)
        if isinstance(message, (Attached, AttachFailed)):
            self._answers[message.id] = message
            self._program.progress.wake()
        elif isinstance(message, Lost):
            self.lost(message.host, message.reason)
        elif isinstance(message, Places):
            remote_places.of_runtime(self._program).heard(message)
        elif host is not None and isinstance(message, Ending):
            host.ending = HostEnding(host.name, message.reason, time.time() + message.seconds)
            log.warning("host %s: %s", host.name, host.ending)
        elif host is not None:
            host.spawner.heard(message)

    def on_disconnected(self, peer: Peer) -> None:
        host = self.hosts.get(host_of(peer.token))
        if host is not None and host.agent is peer:
            self.lost(host.id, f"host {host.name} ({host.address[0]}) is lost: {peer.gone}")

    def lost(self, number: str, why: str) -> None:
        with self._lock:
            host = self.hosts.get(number)
            if host is None:
                self._lost_before[number] = why
            if host is None or host.lost is not None:
                return
            host.lost = why
        if host.explain is None:
            self._report_loss(host)
        else:
            host.explain(functools.partial(self._report_reason, host))

    def _report_reason(self, host: Host, why: str) -> None:
        """Add the scheduler's reason to the loss, and report it then."""
        if why:
            host.lost = f"{host.lost}; {why}"
        self._program.call_soon(lambda: self._report_loss(host))

    def _report_loss(self, host: Host) -> None:
        host.note("failed", host.lost or "", is_failure=True)
        host.spawner.host_lost(host.lost or "")
        self._tell_of_loss(host)

    def _tell_of_loss(self, host: Host) -> None:
        """Report the loss to all agents: they may have no session with the host, or not notice that it is lost."""
        for agent in (self.gateway, *(other.agent for other in self._alive())):
            self._say(agent, Lost(host.id, host.lost or ""))

    def kill(self) -> None:
        """End the gateway of this host, which tells the agents to end, and the searches for successors."""
        with self._lock:
            searches = [host.successor for host in self.hosts.values() if host.successor is not None]
        for each in searches:
            each.stop()
        for host in self._alive():
            host.note("stopped", "the program ends")
        self._say(self.gateway, Finish())
        self._ended.wait(CLOSE_TIMEOUT_S)
        self._spawner.close()
        pipe, self._secret_pipe = self._secret_pipe, -1
        if pipe >= 0:
            os.close(pipe)
        until = time.monotonic() + SEARCH_END_TIMEOUT_S
        for each in searches:
            each.join(until - time.monotonic())


def go_through(owner: Any, gateway: str) -> None:
    """Connect this process, and those that it has started, to other hosts through this gateway."""
    links, router = owner.links, owner.router
    while (link := links.mailbox.connect(gateway)) < 0:
        if link == -1:
            raise RuntimeError("the gateway of this host can't be reached")
        owner.progress.wait(CreditWaiter(), 0.01)

    def to_gateway(frame: Any) -> bool:
        return bool(links.mailbox.send(link, *frame))

    remote_links = RemoteLinks(
        links, os.getpid(), gateway, link, to_gateway, lambda send: router.keep(send), router.take_early_frames
    )
    links.go_through(remote_links)
    owner.progress.later(0.0, lambda: router.handle(links.translate(())))  # the frames that came before
    owner.gateway = gateway
    owner.owner.starter.tell_all(Setting("gateway", gateway))


def attach_to_workers(
    workers: Sequence[str], name: str = "hosts", *, secret: bytes | None = None, timeout: float = 15.0,
    heartbeat: float = DEFAULT_HEARTBEAT_S, silence: float = DEFAULT_SILENCE_S, any_torch: bool = False,
) -> HostMesh:  # fmt: skip
    """Return a HostMesh of machines on which `monarch-backend up` runs. Its one dimension is "hosts".

    ``workers`` are their addresses, as "tcp://10.0.0.2:26600". ``name`` is used in messages. ``secret`` is the job's,
    32 bytes. The default is that of MONARCH_SECRET or MONARCH_SECRET_FILE, or else the user's own, which only hosts on
    this machine know. Hosts with several secrets may be attached: each secret is used for connections to its own hosts
    only.

    Each host sends a heartbeat every ``heartbeat`` seconds. A host is lost after ``silence`` seconds without any
    message. The values of the first call hold for the whole program.

    With ``any_torch=True`` hosts may have another release of torch than the controller, as hosts with TPUs have.
    Tensors and code can be sent all the same. An object of torch whose pickled form differs between the two releases
    raises on arrival.

    Raises ConnectionError, with all reasons, unless all hosts are reached within ``timeout`` seconds, prove that they
    know the secret, and have the same versions. Raises ValueError for an invalid address, and for ``silence`` below
    three heartbeats. Raises RuntimeError if this process is not the main program, or if this program's own gateway has
    ended.

    >>> import subprocess, sys
    >>> from monarch_backend.hosts import attach_to_workers
    >>> command = [sys.executable, "-m", "monarch_backend.cli", "up", "--address", "127.0.0.1:0"]
    >>> daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    >>> address = daemon.stdout.readline().split()[-1]
    >>> attach_to_workers([address], timeout=60.0)
    HostMesh('hosts', hosts=1)
    >>> daemon.terminate()
    >>> daemon.wait()
    0
    """
    addresses, timeout = _addresses(workers), check_bounded(timeout)
    with _attaching:
        found, source = find_secret(secret)
        registry = _registry(heartbeat, silence)
    made = registry.attach(addresses, found, source, timeout, any_torch)
    return _mesh_of(made, name)


def attach_as_reader(
    workers: Sequence[tuple[str, str]], *, secret: bytes, timeout: float
) -> list[HostMesh | str]:  # fmt: skip
    """Attach each of some hosts, given by name and address, as a mesh of its own, all at the same time.

    This program becomes a reader of the hosts, not a controller: a host with a tether or a notice ends all the same.
    Return for each host its mesh, or the reason why it was not attached within ``timeout`` seconds.
    Raises as `attach_to_workers` does, except for a host that is not attached.
    """
    addresses = [parse_address(address) for _, address in workers]
    with _attaching:
        registry = _registry(DEFAULT_HEARTBEAT_S, DEFAULT_SILENCE_S)
    made = registry.attach_readable(addresses, secret, timeout)
    return [
        each if isinstance(each, str) else _mesh_of([each], name) for each, (name, _) in zip(made, workers, strict=True)
    ]


def attach(
    address: str, workers: Sequence[str] | None = None, name: str = "hosts", *, secret: bytes | None = None,
    timeout: float = 15.0, heartbeat: float = DEFAULT_HEARTBEAT_S, silence: float = DEFAULT_SILENCE_S,
    any_torch: bool = False,
) -> HostMesh:  # fmt: skip
    """Return a HostMesh of machines that can be reached from one machine only, such as the login node of a cluster.

    ``address`` is that machine, on which `monarch-backend up` runs as on the others. All messages to the others go
    through it. ``workers`` are their addresses, as seen from there. The default is the list that it was started with
    (``--workers``). The machine itself is in the mesh only if it is in the list. The other parameters are those of
    `attach_to_workers`, with ``timeout``, ``heartbeat`` and ``silence`` in seconds.

    Raises as `attach_to_workers` does, and ValueError if there is no list of workers.

    >>> import subprocess, sys
    >>> from monarch_backend.hosts import attach
    >>> command = [sys.executable, "-m", "monarch_backend.cli", "up", "--address", "127.0.0.1:0"]
    >>> daemons = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    >>> login, worker = [daemon.stdout.readline().split()[-1] for daemon in daemons]
    >>> attach(login, [worker], timeout=60.0)
    HostMesh('hosts', hosts=1)
    >>> for daemon in daemons:
    ...     daemon.terminate()
    ...     daemon.wait()
    0
    0
    """
    addresses, timeout = [] if workers is None else _addresses(workers), check_bounded(timeout)
    with _attaching:
        found, source = find_secret(secret)
        registry = _registry(heartbeat, silence)
    [gateway] = registry.attach([parse_address(address)], found, source, timeout, any_torch)
    try:
        if workers is None and not gateway.workers:
            raise ValueError(
                f"{address} was started without --workers, and attach was called without workers: give the "
                "hosts that can be reached through it in one of both places"
            )
        behind = addresses or _addresses(gateway.workers)
        made = registry.attach(behind, found, source, timeout, any_torch, gateway)
    except BaseException:
        registry.dismiss([gateway.token])
        raise
    return _mesh_of(made, name)


def explain_losses(mesh: HostMesh, reasons: LossReasons[K], hosts: Sequence[K]) -> None:
    """Report losses of a mesh's hosts with their reasons. ``hosts`` has each host as ``reasons`` takes it."""
    runtime: Any = program()
    for host_id, host in zip(mesh.hosts or (), hosts, strict=True):
        attached = runtime.hosts.find(host_id)
        attached.explain = functools.partial(reasons.find, host, later=runtime.progress.later)
        attached.explain_limit = reasons.limit


def expect_successors(
    mesh: HostMesh, find: Callable[[K, threading.Event], HostMesh | None], hosts: Sequence[K]
) -> None:
    """Let ranks of a lost host be restarted on the host that takes its place.

    ``hosts`` has each host as ``find`` takes it. ``find`` waits for the successor, and returns it as a mesh of one
    host, or None if there will be none. It is given up when its second argument is set, at the end of the program.
    """
    runtime: Any = program()

    def search(host: K, stopping: threading.Event) -> str | None:
        try:
            found = find(host, stopping)
        except RuntimeError:
            if runtime.closing:
                return None
            raise
        return None if found is None or not found.hosts else found.hosts[0]

    def search_and_note(lost: Host, host: K, stopping: threading.Event) -> str | None:
        successor = search(host, stopping)
        if successor is not None:
            address = runtime.hosts.find(successor).address[0]
            lost.note("restarted", f"{address} takes its place")
        return successor

    for host_id, host in zip(mesh.hosts or (), hosts, strict=True):
        attached = runtime.hosts.find(host_id)
        attached.successor = HostSuccessor(functools.partial(search_and_note, attached, host))


def _addresses(workers: Sequence[str]) -> list[tuple[str, int]]:
    if isinstance(workers, str) or not workers:
        raise ValueError("workers is a list of addresses, of one or more hosts")
    return [parse_address(worker) for worker in workers]


def _registry(heartbeat: float, silence: float) -> HostRegistry:
    if not 0 < heartbeat <= silence / 3:  # one heartbeat may be late, and one may be lost
        raise ValueError(f"heartbeat={heartbeat:g} and silence={silence:g}: silence is at least three heartbeats")
    runtime: Any = program()
    if runtime.root is not None:
        raise RuntimeError("hosts are attached by the main program; it can send the mesh to its actors")
    registry: HostRegistry = runtime.extensions.extend(
        HostRegistry, lambda: HostRegistry(runtime, Timeouts(heartbeat, silence))
    )
    return registry


def _mesh_of(hosts: Sequence[Host], name: str) -> HostMesh:
    return HostMesh(Shape.of(Extent(("hosts",), (len(hosts),))), tuple(host.id for host in hosts), name)


_attaching = threading.Lock()
"""Held while the first call makes the registry, but not while hosts are called."""
