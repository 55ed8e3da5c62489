"""`RayJob`: hosts on the nodes of a Ray cluster that exists. Each host is the child of a Ray actor.

The actors are in bundles of placement groups (`ray_placement`). Ray restarts an actor whose node is lost on another
node, and the host then has a new address. Ray carries the job's secret to the actors. All other messages and tensors
take this package's connections.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from monarch_backend._core.errors import first_line
from monarch_backend._core.limits import within
from monarch_backend._job import state_file
from monarch_backend._job.base import Plan, check_host_count, check_mesh_name, read_job_secret
from monarch_backend._job.errors import JobError
from monarch_backend._job.host_launcher import ARGUMENTS, Launch
from monarch_backend._job.ray_placement import (
    Group,
    Place,
    check_can_add,
    create_group,
    find_groups,
    misplaced,
    selector_beside,
)
from monarch_backend._job.scheduled import NotRemovedError, Replica, ScheduledJob
from monarch_backend._job.state_file import JobFile

NAMESPACE = "monarch_backend"
"""Ray's namespace of the actors, so that a second program finds them in whatever namespace it is."""
STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
ANSWER_TIMEOUT_S = 2.0
"""Seconds for the actors of running hosts to tell their addresses."""
HOST_START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
CLUSTER_TIMEOUT_S = 15.0
"""Seconds for Ray's GCS to answer. Ray ends a program that does not reach the GCS for 60 seconds."""

_T = TypeVar("_T")


class HostInfo(NamedTuple):
    """A running host: its address, its node, and the identity of this start."""

    address: str
    node: str
    incarnation: str


class RayHost:
    """Ray actor that runs a host as its child. The host ends with the actor's process, and that with the host.

    Ray restarts the actor then. A host that cannot start is an error of `info`, and is not started again.
    """

    def __init__(self, label: str, secret: str) -> None:
        import ray

        node = ray.util.get_node_ip_address()
        command = [sys.executable, "-m", "monarch_backend.cli", *ARGUMENTS, "--address", f"{node}:0"]
        self._launch: Launch | None = None
        self._is_ending = False
        try:
            self._launch = Launch(label, command, bytes.fromhex(secret))
            up = self._launch.ready(time.monotonic() + HOST_START_TIMEOUT_S)
        except JobError as error:
            self._info: HostInfo | JobError = error
            return
        self._info = HostInfo(up.address, node, uuid.uuid4().hex)
        threading.Thread(target=self._end_with_host, name="monarch-host", daemon=True).start()

    def _end_with_host(self) -> None:
        assert self._launch is not None
        code = self._launch.wait()
        if self._is_ending:
            return
        print(f"monarch_backend: the host has ended (exit {code})", file=sys.stderr, flush=True)
        os._exit(1)

    def info(self) -> HostInfo:
        """Return where the host listens. Raises JobError if it could not start."""
        if isinstance(self._info, JobError):
            raise self._info
        return self._info

    def end(self) -> None:
        """End the host, and the actor with it. Ray does not start an actor again that exits by this call."""
        import ray

        self._is_ending = True
        if self._launch is not None:
            self._launch.give_up()
        ray.actor.exit_actor()


class RayJob(ScheduledJob):
    """Meshes of hosts in a Ray cluster: ``meshes`` has the number of hosts of each.

    Each host takes ``resources_per_host``, such as ``{"CPU": 8, "GPU": 8}``, from its node. ``strategy`` is Ray's
    strategy of a placement group; the default puts each host on a node of its own. ``address`` is that of `ray.init`:
    "auto", "HOST:PORT", or "ray://HOST:PORT" for Ray Client. A program that has called `ray.init` before keeps its
    connection. ``runtime_env`` is Ray's, and must have this package. The hosts run until `kill`. With ``tether`` they
    also end with the program that has started them, even if it is killed. With Ray Client that takes until the server
    gives up the connection: RAY_CLIENT_RECONNECT_GRACE_PERIOD, by default 30 s.

    `resize` gives each added host a placement group of its own. Its resources are free again when it ends. The hosts of
    `apply` share one group, whose resources stay reserved until `kill`. STRICT_SPREAD and STRICT_PACK hold for added
    hosts, too, and need Ray 2.49 for that. SPREAD and PACK do not apply to them. Only the program that has applied a
    job with ``tether`` adds hosts to it. Others get JobError.

    Needs the package ray, and ray[client] for "ray://". Messages between hosts are encrypted, but Ray carries the job's
    secret to them. Use a cluster that only trusted users reach, or give it Ray's TLS.

    Raises ValueError for an invalid name, number, resource or strategy.

    >>> from monarch_backend.job import RayJob
    >>> job = RayJob({"trainers": 2}, resources_per_host={"CPU": 8, "GPU": 8})
    >>> [str(host) for host in job.status()]
    ['trainers[0]: not started', 'trainers[1]: not started']
    >>> job.resize("trainers", 3)
    >>> len(job.status())
    3
    """

    kind: ClassVar[str] = "ray"

    def __init__(
        self, meshes: Mapping[str, int], *, resources_per_host: Mapping[str, float] | None = None,
        strategy: str = "STRICT_SPREAD", address: str = "auto", runtime_env: Mapping[str, Any] | None = None,
        tether: bool = False, name: str = "job", path: str | os.PathLike[str] | None = None,
        secret_file: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, path, secret_file)
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy {strategy!r} is not one of {', '.join(STRATEGIES)}")
        self._meshes = {check_mesh_name(mesh): check_host_count(mesh, count) for mesh, count in meshes.items()}
        self._resources = {"CPU": 1} if resources_per_host is None else dict(resources_per_host)
        for resource, amount in self._resources.items():
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not amount > 0:
                raise ValueError(f"resource {resource!r}: {amount!r} is not an amount above 0")
        if not self._resources:
            raise ValueError("resources_per_host has no resource: a host without one has no place")
        self._strategy, self._address, self._tether = strategy, address, tether
        self._runtime_env = None if runtime_env is None else dict(runtime_env)

    def _sizes(self) -> Mapping[str, int]:
        return self._meshes

    def _set_size(self, mesh: str, count: int) -> None:
        self._meshes[mesh] = count

    def _description(self) -> dict[str, Any]:
        return {
            "meshes": self._meshes, "resources_per_host": self._resources, "strategy": self._strategy,
            "address": self._address, "runtime_env": self._runtime_env, "tether": self._tether,
        }  # fmt: skip

    def _ray(self) -> Any:
        """Return the module ray, connected to the cluster."""
        try:
            import ray
        except ImportError as error:
            raise JobError(f"a RayJob needs the package ray (pip install ray): {error}") from None
        try:
            if not ray.is_initialized():
                self._init_ray(ray)
        except Exception as error:  # Ray raises many kinds
            raise JobError(f"no Ray cluster at {self._address!r}: {first_line(error)}") from error
        return ray

    def _init_ray(self, ray: Any) -> None:
        where = _resolved(self._address)
        self._check_that_it_listens(where)
        options: dict[str, Any] = {}
        if _is_client(where):
            if ray.util.client.ray.get_context().client_worker is not None:
                ray.shutdown()  # Ray Client keeps a lost connection, and then refuses a new one
            if self._runtime_env is not None:
                options["runtime_env"] = self._runtime_env  # the server imports this package, too
        try:
            ray.init(self._address, namespace=NAMESPACE, log_to_driver=False, logging_level="WARNING", **options)
        except ConnectionAbortedError as error:  # the server's traceback, such as of a failed runtime_env
            raise OSError(str(error).strip().splitlines()[-1]) from error
        except ConnectionError as error:
            if _is_client(where):
                raise OSError(f"{first_line(error)}; {_CLIENT_PORT}") from error
            raise
        if _is_client(where):  # the server's log arrives here, with the warnings that `_start_actor` leaves out
            logging.getLogger("ray.util.client.logsclient").setLevel(logging.ERROR)

    def _check_that_it_listens(self, address: str) -> None:
        """Raise OSError if there is nothing at the cluster's address: `ray.init` would try for a quarter of an hour."""
        if (where := _host_and_port(address)) is None:
            return
        try:
            socket.create_connection(where, CLUSTER_TIMEOUT_S).close()
        except OSError as error:
            cure = "is its head node up (ray status)?"
            if _is_client(address):
                cure += f" {_CLIENT_PORT}"
            elif self._address == "auto":
                cure += " A cluster that was killed leaves its address: `ray stop` removes it"
            raise OSError(f"{where[0]}:{where[1]}: {first_line(error)}; {cure}") from error

    def _within(self, seconds: float, call: Callable[[], _T]) -> _T:
        """Return ``call()``, which asks Ray. Its many errors, and its silence while its GCS is down, are a JobError."""
        try:
            return within(seconds, call, thread_name="monarch-ray")
        except JobError:
            raise
        except Exception as error:
            cure = "Ray ends a program that does not reach it for a minute."
            if _is_client(_resolved(self._address)):
                cure = (
                    "Ray Client tries its connection again for 30 s (RAY_CLIENT_RECONNECT_GRACE_PERIOD); a later call "
                    f"makes a new one. The hosts {'end after that, too' if self._tether else 'run on'}."
                )
            raise JobError(
                f"the Ray cluster at {self._address!r} cannot be asked about job {self.name!r}: {first_line(error)}. "
                f"Is its head node up (ray status)? {cure} If the cluster is gone, so are the hosts: remove {self.path}"
            ) from error

    def _submit(self, file: JobFile, secret: bytes) -> dict[str, Any]:
        ray, is_given_up = self._ray(), threading.Event()
        try:
            driver = self._within(CLUSTER_TIMEOUT_S, lambda: self._start_actors(ray, file, secret, is_given_up))
        except BaseException as error:
            is_given_up.set()
            try:
                self._remove(file)
            except JobError as left:
                raise NotRemovedError(
                    f"job {self.name!r} may be submitted in part: end it with kill() ({first_line(error)}; {left})"
                ) from error
            if isinstance(error, JobError):
                raise JobError(f"Ray refuses job {self.name!r}: {first_line(error.__cause__ or error)}") from error
            raise
        return {"placement_group": _group_name(file), "meshes": dict(self._meshes), "driver": driver}

    def _start_actors(self, ray: Any, file: JobFile, secret: bytes, is_given_up: threading.Event) -> str:
        plans = self._plans()
        group = create_group(ray, _group_name(file), [self._resources] * len(plans), self._strategy, self._lifetime)
        for bundle, plan in enumerate(plans):
            if is_given_up.is_set():  # Ray has answered too late
                ray.util.remove_placement_group(group)
                break
            self._start_actor(ray, file, secret, plan, group, bundle)
        return _driver(ray)

    def _start_actor(self, ray: Any, file: JobFile, secret: bytes, plan: Plan, group: Any, bundle: int) -> None:
        # Ray warns that an actor ends with its placement group, which is intended here.
        with _without_warnings("ray.actor"):
            actor = self._actor_class(ray, _actor_name(file, plan), group, bundle).remote(plan.label, secret.hex())
        if self._tether:
            _tethered.append(actor)

    @property
    def _lifetime(self) -> str | None:
        return None if self._tether else "detached"

    def _actor_class(self, ray: Any, name: str, group: Any, bundle: int) -> Any:
        """Return the class of the actor for a bundle of the placement group."""
        rest = dict(self._resources)
        return ray.remote(RayHost).options(
            name=name, namespace=NAMESPACE, lifetime=self._lifetime, max_restarts=-1,
            num_cpus=rest.pop("CPU", 0), num_gpus=rest.pop("GPU", 0), memory=rest.pop("memory", None), resources=rest,
            runtime_env=self._runtime_env,
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        )  # fmt: skip

    def _find(self, file: JobFile) -> Sequence[Replica]:
        ray = self._ray()
        return self._within(CLUSTER_TIMEOUT_S, lambda: self._replicas(ray, file))

    def _replicas(self, ray: Any, file: JobFile) -> Sequence[Replica]:
        groups = find_groups(ray, _group_name(file))
        if _group_name(file) not in groups:
            return [
                Replica(p.mesh, p.index, "gone", reason="its placement group was removed", is_final=True)
                for p in self._plans()
            ]
        places = self._places(file, groups)
        free = functools.cache(lambda: _free(ray))
        asked: dict[Any, Plan] = {}
        found: list[Replica] = []
        for plan, actor in self._actors(ray, self._plans(), file):
            place = places.get(plan.label)
            if place is None:
                found.append(_misplaced(plan, "it has no placement group yet"))
            elif place.group.state == "PENDING":
                found.append(_pending(plan, self._why_pending(place.group, free())))
            elif actor is None:
                found.append(Replica(plan.mesh, plan.index, "gone", reason="its Ray actor has ended", is_final=True))
            else:
                asked[actor.info.remote()] = plan
        answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_TIMEOUT_S) if asked else ([], [])
        lost = f"its node was lost: it takes {self._resources} of another node"
        for each in late:
            is_lost = places[asked[each].label].is_lost
            found.append(_pending(asked[each], f"{lost}, and {free()}" if is_lost else "its Ray actor starts"))
        for each in answered:
            is_lost = places[asked[each].label].group.state == "RESCHEDULING"
            restart = f"{lost}, and {free()}" if is_lost else "its Ray actor restarts"
            found.append(_answer(ray, each, asked[each], restart))
        first = groups[_group_name(file)]
        own = [label for label, place in places.items() if place.group is not first]
        return self._without_misplaced(file, found, places, own)

    def _why_pending(self, group: Group, free: str) -> str:
        return f"{group.scheduling}: each host takes {self._resources} with {self._strategy}, and {free}"

    def _places(self, file: JobFile, groups: Mapping[str, Group]) -> dict[str, Place]:
        """Return the bundle of each host that has one, by the host's label."""
        applied = [Plan(mesh, index, "", ()) for mesh, n in _applied_meshes(file).items() for index in range(n)]
        bundles = {plan.label: number for number, plan in enumerate(applied)}
        places = {}
        for plan in self._plans():
            if (own := groups.get(_actor_name(file, plan))) is not None:
                places[plan.label] = Place(own, 0)
            elif plan.label in bundles and (group := groups.get(_group_name(file))) is not None:
                places[plan.label] = Place(group, bundles[plan.label])
        return places

    def _without_misplaced(
        self, file: JobFile, found: Sequence[Replica], places: Mapping[str, Place], own: Sequence[str]
    ) -> list[Replica]:  # fmt: skip
        """Return the replicas, where those in a wrong place are `_Misplaced`."""
        known = {each.incarnation for each in file.hosts}
        labels = {f"{each.mesh}[{each.index}]": each for each in found}
        kept = [label for label, each in labels.items() if each.incarnation and each.incarnation in known]
        wrong = misplaced(self._strategy, places, own, kept)
        return [
            _Misplaced(each.mesh, each.index, "pending", reason=wrong[label]) if label in wrong else each
            for label, each in labels.items()
        ]

    def _actors(self, ray: Any, plans: Sequence[Plan], file: JobFile) -> Iterator[tuple[Plan, Any]]:
        """Yield the actor of each host, None where Ray has none."""
        for plan in plans:
            try:
                yield plan, ray.get_actor(_actor_name(file, plan), namespace=NAMESPACE)
            except ValueError:
                yield plan, None

    def _remove(self, file: JobFile) -> None:
        ray = self._ray()
        self._within(CLUSTER_TIMEOUT_S + 2 * END_TIMEOUT_S, lambda: self._end_job(ray, file))

    def _end_job(self, ray: Any, file: JobFile) -> None:
        # The plans of the file, because another program may have resized the job.
        sizes = dict(file.description["meshes"])
        self._end_actors(ray, file, [Plan(mesh, index, "", ()) for mesh, n in sizes.items() for index in range(n)])
        for group in find_groups(ray, _group_name(file)).values():
            ray.util.remove_placement_group(group.handle)

    def _end_actors(self, ray: Any, file: JobFile, plans: Sequence[Plan]) -> None:
        """End these hosts, remove their own placement groups, and return when Ray has no actor of them."""
        actors = [actor for _, actor in self._actors(ray, plans, file) if actor is not None]
        ends = [each.end.remote() for each in actors]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=END_TIMEOUT_S)
        for each in actors:
            ray.kill(each, no_restart=True)
        groups = find_groups(ray, _group_name(file))
        for plan in plans:
            if (group := groups.get(_actor_name(file, plan))) is not None:
                ray.util.remove_placement_group(group.handle)
        until = time.monotonic() + END_TIMEOUT_S
        while left := [plan.label for plan, actor in self._actors(ray, plans, file) if actor is not None]:
            if time.monotonic() > until:
                raise JobError(f"not ended: {', '.join(left)}")
            time.sleep(0.05)

    # ---- resizing

    def _scale(self, file: JobFile, mesh: str, count: int) -> None:
        """End the hosts of a mesh from index ``count`` on. Raises JobError if Ray cannot add the missing ones."""
        if not file.submitted:
            raise JobError(f"job {self.name!r} is not submitted in whole: end it by kill(), and apply it again")
        ray, before = self._ray(), int(file.description["meshes"][mesh])
        if count > before:
            check_can_add(ray, self._strategy)
            if not self._can_start_hosts(ray, file):
                raise JobError(
                    f"job {self.name!r} is tethered: only the program that has applied it adds hosts, because they end "
                    "with it. Resize it there"
                )
        surplus = [Plan(mesh, index, "", ()) for index in range(count, before)]
        if surplus:
            self._within(CLUSTER_TIMEOUT_S + 2 * END_TIMEOUT_S, lambda: self._end_actors(ray, file, surplus))

    def _can_start_hosts(self, ray: Any, file: JobFile) -> bool:
        """Return whether this program starts hosts. Those of a tethered job end with the program that does."""
        return not self._tether or self._within(CLUSTER_TIMEOUT_S, lambda: _driver(ray)) == file.submitted.get("driver")

    def _start_missing(self, file: JobFile, plans: Sequence[Plan], until: float) -> None:  # noqa: ARG002
        """Start an actor for each host that has none, in the bundle of a host that was removed or in a new group."""
        ray = self._ray()
        if self._can_start_hosts(ray, file):
            self._start_more(file, lambda secret, is_given_up: self._start_absent(ray, file, secret, is_given_up))

    def _correct(self, file: JobFile, replicas: Sequence[Replica], until: float) -> None:
        if not any(isinstance(each, _Misplaced) for each in replicas):
            return
        ray = self._ray()
        if not self._can_start_hosts(ray, file):
            return
        with state_file.locked(self.path, "apply", until):
            current = self._read()
            if current is not None and current.id == file.id:
                self._start_more(
                    current, lambda secret, is_given_up: self._place_anew(ray, current, secret, is_given_up)
                )

    def _start_more(self, file: JobFile, call: Callable[[bytes, threading.Event], None]) -> None:
        secret = read_job_secret(self.name, Path(file.secret_file), is_own=file.own_secret)
        is_given_up = threading.Event()
        try:
            self._within(CLUSTER_TIMEOUT_S + 2 * END_TIMEOUT_S, lambda: call(secret, is_given_up))
        except BaseException:
            is_given_up.set()
            raise

    def _start_absent(self, ray: Any, file: JobFile, secret: bytes, is_given_up: threading.Event) -> None:
        groups = find_groups(ray, _group_name(file))
        places = self._places(file, groups)
        for plan in [plan for plan, actor in self._actors(ray, self._plans(), file) if actor is None]:
            if (place := places.get(plan.label)) is None:
                self._add_host(ray, file, secret, plan, is_given_up)
            elif not is_given_up.is_set():
                self._start_actor(ray, file, secret, plan, place.group.handle, place.bundle)

    def _place_anew(self, ray: Any, file: JobFile, secret: bytes, is_given_up: threading.Event) -> None:
        """Give hosts in a wrong place a placement group of their own. A bundle of the first group stays reserved."""
        wrong = {(each.mesh, each.index) for each in self._replicas(ray, file) if isinstance(each, _Misplaced)}
        plans = [plan for plan in self._plans() if (plan.mesh, plan.index) in wrong]
        self._end_actors(ray, file, plans)
        for plan in plans:
            self._add_host(ray, file, secret, plan, is_given_up)

    def _add_host(self, ray: Any, file: JobFile, secret: bytes, plan: Plan, is_given_up: threading.Event) -> None:
        """Start a host in a placement group of its own, where the job's strategy allows one. See `ray_placement`."""
        groups = find_groups(ray, _group_name(file)).values()
        selector = selector_beside(self._strategy, [node for group in groups for node in group.nodes.values()])
        if selector is None or is_given_up.is_set():
            return
        name = _actor_name(file, plan)
        group = create_group(ray, name, [self._resources], self._strategy, self._lifetime, selector)
        self._start_actor(ray, file, secret, plan, group, 0)
        if is_given_up.is_set():  # Ray has answered too late: kill() may not have found the group
            ray.util.remove_placement_group(group)


@dataclass(frozen=True)
class _Misplaced(Replica):
    """A host that a waiting program places anew."""


@contextlib.contextmanager
def _without_warnings(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


_CLIENT_PORT = "Ray Client listens on the port of `ray start --head --ray-client-server-port`, by default 10001"

_tethered: list[Any] = []
"""Actors of tethered jobs. Ray ends them when this program has no handle of them."""


def _resolved(address: str) -> str:
    """Return the address that `ray.init` takes for this one. "" if it is not known: it looks for a cluster here."""
    if address != "auto":
        return address
    if given := os.environ.get("RAY_ADDRESS", ""):
        return given
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        return Path(folder, "ray", "ray_current_cluster").read_text().strip()
    return ""


def _is_client(address: str) -> bool:
    """Return whether Ray Client connects to this address."""
    return address.startswith("ray://")


def _host_and_port(address: str) -> tuple[str, int] | None:
    url = urllib.parse.urlsplit(address if "://" in address else f"ray://{address}")
    try:
        return (url.hostname, url.port) if url.hostname and url.port else None
    except ValueError:  # not a port
        return None


def _group_name(file: JobFile) -> str:
    return f"monarch-{file.id}"


def _actor_name(file: JobFile, plan: Plan) -> str:
    return f"monarch-{file.id}-{plan.mesh}-{plan.index}"


def _applied_meshes(file: JobFile) -> Mapping[str, int]:
    """Return the sizes of the meshes when the job was applied: the bundles of its first placement group."""
    sizes: Mapping[str, int] = (file.submitted or {}).get("meshes", file.description["meshes"])
    return sizes


def _driver(ray: Any) -> str:
    """Return Ray's id of this program, with which tethered hosts end."""
    return str(ray.get_runtime_context().get_job_id())


def _free(ray: Any) -> str:
    free = {key: amount for key, amount in ray.available_resources().items() if ":" not in key}
    nodes = sum(node["Alive"] for node in ray.nodes())
    return f"{nodes} nodes have {free} free in all"


def _pending(plan: Plan, reason: str) -> Replica:
    return Replica(plan.mesh, plan.index, "pending", reason=reason)


def _misplaced(plan: Plan, reason: str) -> Replica:
    return _Misplaced(plan.mesh, plan.index, "pending", reason=reason)


def _answer(ray: Any, reference: Any, plan: Plan, restart: str) -> Replica:
    try:
        info: HostInfo = ray.get(reference)
    except ray.exceptions.ActorUnavailableError:
        return _pending(plan, restart)
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
        cause = getattr(error, "cause", None)
        reason = str(cause) if isinstance(cause, JobError) else str(error).strip().splitlines()[-1]
        return Replica(plan.mesh, plan.index, "gone", reason=reason, is_final=True)
    return Replica(plan.mesh, plan.index, "up", info.incarnation, info.node, info.address)
