"""The ProcessGroup that torch sees for backend "monarch": its routes, its life, and answers to torch's queries.

Tensor operations are in _collectives.py, the choice of a route in _backend_selection.py, private parts of torch in
_c10d_internals.py.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError

from monarch_backend._core import debug_log, env, torch_version
from monarch_backend._telemetry import recorder
from monarch_backend.process_group import (
    _backend_selection,
    _bootstrap,
    _c10d_internals,
    _c10d_patches,
    _handshake,
    _host_guard,
    _interpreter_exit,
    _rendezvous,
    _route_recording,
)
from monarch_backend.process_group._collectives import Collectives
from monarch_backend.process_group._errors import GroupClosedError, NoRouteError, cut_reason, reason_of, where
from monarch_backend.process_group._handshake import Deadline
from monarch_backend.process_group._hierarchical.hierarchical_backend import Hierarchy
from monarch_backend.process_group._hooks import CompletionHooks
from monarch_backend.process_group._shm import messages, segment
from monarch_backend.process_group._store_host import Arrival
from monarch_backend.process_group._xla import xla_backend


@dataclass
class Options:
    """Options of the backends behind the routes, by device type: the ``pg_options=`` of ``init_process_group``.

    ``by_device["cuda"]`` takes torch's ``ProcessGroupNCCL.Options``. torch's options object may also be given alone:
    that of NCCL is used for "cuda", that of XCCL for "xpu".

    >>> from monarch_backend import Options
    >>> Options(by_device={}).for_device("cpu") is None
    True
    """

    by_device: dict[str, Any] = field(default_factory=dict)

    def for_device(self, device: str) -> Any:
        """Return the options of one device type, None if there are none."""
        return self.by_device.get(device)

    @classmethod
    def parse(cls, given: Any) -> Options:
        """Convert the ``pg_options`` of a caller: Options, an options object of torch, or None.

        Raises TypeError for any other object.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        name = type(given).__qualname__
        if name in ("ProcessGroupNCCL.Options", "ProcessGroupNCCL2.Options"):
            return cls({"cuda": given})
        if name in ("ProcessGroupXCCL.Options",):
            return cls({"xpu": given})
        raise TypeError(
            f"pg_options of type {name} belongs to no route of backend 'monarch': pass "
            "monarch_backend.Options(by_device={'cuda': ProcessGroupNCCL.Options(...)}) or a ProcessGroupNCCL.Options"
        )


def create(options: Any, pg_options: Any = None) -> MonarchProcessGroup:
    """Make the group. torch calls this on each member, in ``init_process_group`` and ``new_group``.

    ``options`` is torch's ``_DistributedBackendOptions``; ``pg_options`` is that of `Options.parse`. Waits for all
    ranks, at most for the timeout in ``options``. Then it raises ``torch.distributed.DistStoreError`` if ranks are
    missing, and DistNetworkError if connections between them are missing.

    Raises ValueError for an unknown MONARCH_ variable and for a bad value, TypeError for other ``pg_options``.
    """
    env.check()
    torch_version.remark()
    _c10d_patches.restore_new_group()
    _c10d_patches.see_attached_hooks()
    return MonarchProcessGroup(options, Options.parse(pg_options), _c10d_internals.creation())


@_c10d_internals.hide_from_dynamo
class MonarchProcessGroup(Collectives):
    """A group of ranks in which each tensor takes the route of its device. torch makes it, see `create`.

    Each collective serves a function of torch.distributed, and returns a ``torch.distributed.Work``. It takes either of
    c10d's call forms: lists of tensors with an options object, or single tensors with root, op and timeout. All tensors
    of a call are on one device. ``N`` in the shapes below is the size of the group.

    CPU tensors are checked before anything is sent. CollectiveArgumentError is raised for unsuitable arguments, and
    TypeError for another call form. NoRouteError is raised for a device without a route. The call, or ``wait()`` of its
    work, raises CollectiveMismatchError, CollectiveTimeoutError, RankFailedError and GroupClosedError.

    >>> import torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("monarch", store=dist.HashStore(), rank=0, world_size=1)
    >>> group = dist.group.WORLD
    >>> group.getBackendName(), group.size()
    ('monarch', 1)
    >>> x = torch.ones(2)
    >>> group.allreduce([x]).wait(), x.tolist()
    (True, [1.0, 1.0])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        options: Any,
        pg_options: Options,
        creation: _c10d_internals.Creation,
        only: Sequence[str] | None = None,
    ) -> None:
        # The constructor without a store: the other one can't construct a Python subclass before torch 2.14.
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._creator_options = options
        self._pg_options = pg_options
        self._creation = creation
        self._label = str(options.group_id)
        self._closed = ""
        self._arrival: Arrival | None = None
        self._deadline: Deadline | None = None  # while the group is made
        _living.add(self)
        self._splits = 0
        self._hooks = CompletionHooks()
        self._observed: set[str] = set()
        self._spared: set[str] | None = None  # routes without observers; None: no observers at all
        self._routes: dict[str, _backend_selection.Route] = {}
        self._inner: dict[str, Any] = {}
        self._backends: dict[str, str] = {}  # device -> name of its inner group, whatever its route is called
        self._shm = None
        self._rdma_p2p = None
        self._recordings = {}
        self._fast_paths: dict[str, Any] = {}  # fast paths that replace methods while the group has no observers
        if creation.device_id is not None:
            self.bound_device_id = creation.device_id
        self._open_eager_routes(only)

    # Routes -----------------------------------------------------------------------------------------------

    def _eager_devices(self) -> list[str]:
        """Return the devices whose inner groups are made with this group.

        Gloo's constructor is a rendezvous of all ranks. On first use it would hang whenever only some ranks use the
        group, as in a send between two of four ranks. An accelerator's group must exist before a C++ caller asks the
        base class for it. NCCL still connects on first use.
        """
        devices = ["cpu"] if _backend_selection.choose("cpu", self._creation.device_map).available else []
        if torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
            kind = accelerator.type if accelerator is not None else "cpu"
            if kind != "cpu" and _backend_selection.choose(kind, self._creation.device_map).available:
                devices.append(kind)
        return devices

    def _open_eager_routes(self, only: Sequence[str] | None) -> None:
        try:
            self._agree()
            for device in self._eager_devices():
                if only is None or device in only:
                    self._open_route(device)
            self._deadline = None
            default = "cuda" if "cuda" in self._inner else next(iter(self._inner), "cpu")
            self._set_default_backend(_c10d_internals.backend_type(self._backends[default]))
        except BaseException as error:
            if self._rdma_p2p is not None:
                self._rdma_p2p.close()  # it uses the process's NICs; no other code closes it
            if isinstance(error, (RuntimeError, TimeoutError)):
                _rendezvous.forget_group_name()
            if isinstance(error, TimeoutError):
                seconds = self._creator_options.timeout.total_seconds()
                raise DistNetworkError(
                    f"all ranks came, but the connections between them were not there within {seconds:g} s ({error}). "
                    f"Look for a stopped rank and for what may stand between the hosts, or give a longer timeout=. "
                    f"[{where(self)}]"
                ) from error
            raise

    def _agree(self) -> None:
        """Set the store and deadline of this attempt to make the group; all ranks get the same store."""
        options = self._creator_options
        self._arrival = _rendezvous.take_arrival(options.store)
        if self._arrival is not None:
            self._store, self._deadline = options.store, self._arrival.deadline
            return
        self._deadline = Deadline(options.timeout)
        at, who = "in the group's store", f"[{where(self)}]"
        name = _handshake.agree(options.store, self.rank(), self.size(), self._deadline, at, who)
        self._store = PrefixStore(name, options.store)

    def _open_route(self, device: str) -> Any:
        """Make, register and announce the inner group of a device type; raises NoRouteError if there is none."""
        if self._closed:
            raise GroupClosedError(f"the process group was {self._closed}; make a new one. [{where(self)}]")
        route = _backend_selection.choose(device, self._creation.device_map)
        if not route.available:
            raise self._no_route(route)
        options = self._pg_options.for_device(device)
        deadline = self._deadline or Deadline(self._creator_options.timeout)

        def make() -> Any:
            creation = self._creation
            return _c10d_internals.make_inner(
                route.backend, self._creator_options, self._store, options, creation, device, deadline
            )

        # One Gloo group serves "cpu:monarch,cuda:gloo", because c10d keeps one backend per kind.
        shared = [d for d, backend in self._backends.items() if backend == route.backend]
        if shared:
            inner = self._inner[shared[0]]
        elif route.backend == "xla":
            inner = xla_backend.make(self, make, list(self._creator_options.global_ranks_in_group), options)
        else:
            inner = make()
        self._adopt(device, route, inner, deadline)
        return inner

    def _adopt(self, device: str, route: _backend_selection.Route, inner: Any, deadline: Deadline) -> None:
        if _c10d_internals.is_c10d_backend(inner):
            self._register_backend(torch.device(device), _c10d_internals.backend_type(route.backend), inner)
            if device == "cpu":
                _interpreter_exit.outlives(self, inner)
        self._inner[device] = inner
        self._backends[device] = route.backend
        named = _backend_selection.was_named(device, self._creation.device_map)
        if device == "cpu" and route.backend == "gloo" and not named and _bootstrap.wanted():
            store = PrefixStore("cpu:shm", self._store)
            timeout = functools.partial(_c10d_internals.timeout_of, inner)
            who = f"[{where(self)}]"
            result = _bootstrap.connect_ranks(
                store,
                self.rank(),
                self.size(),
                deadline,
                timeout,
                inner,
                who,
                _backend_selection.debug_line(self),
                f"group {self._label}",
            )
            self._shm, self._rdma_p2p = result.memory, result.rdma_p2p
            of_world = list(self._creator_options.global_ranks_in_group) or range(self.size())
            recorder.process_group(f"group {self._label}", [of_world[rank] for rank in result.here])
            if result.memory is not None and result.memory.has_fast_paths and not self._hooks:
                self._fast_paths = result.memory.fast_paths(self, _FAST_PATH_METHODS)
                self._fast_paths |= messages.fast_paths(result.memory, self, _FAST_PATH_METHODS)
                self.__dict__.update(self._fast_paths)
            why = f"{route.why}; {result.why}" if result.memory is None else result.why
            route = replace(route, backend=result.route, why=why)
        if device == "cpu" and self._backends[device] == "gloo" and route.backend != "shm":
            store = PrefixStore("cpu:hosts", self._store)
            who = f"[{where(self)}]"
            self._guard = _host_guard.guard(store, self.rank(), self.size(), deadline, who, inner, self._lose_hosts)
            if self._guard is not None and isinstance(self._shm, Hierarchy):
                self._shm.lost_host = self._guard.cause
        self._routes[device] = route
        if (device != "cpu" or self._shm is None) and id(inner) not in self._recordings:
            self._record_route(device, route, inner)
        self._let_see()
        _backend_selection.announce(self, route)

    def _record_route(self, device: str, route: _backend_selection.Route, inner: Any) -> None:
        """Record the collectives of a route from now on. Those in shared memory are recorded by the core."""
        recorder.start_rank(os.environ.get("RANK", str(self.rank())))
        if not recorder.is_recording():
            return
        name = f"group {self._label}" if device == "cpu" else f"group {self._label} on {device}"
        try:
            identity = _route_recording.agree_on_identity(PrefixStore(device, self._store))
        except RuntimeError as error:  # a store of the user without this method
            debug_log.write(f"group {self._label}: collectives on {device} are not recorded: {error}")
            return
        self._recordings[id(inner)] = _route_recording.RouteRecording(name, self.rank(), identity, route.backend)

    def _lose_hosts(self, cause: tuple[str, int, str]) -> None:
        """Fail pending operations on the CPU after a host was lost. Later ones ask the guard."""
        if isinstance(self._shm, Hierarchy):
            self._shm.lose(cause)
        elif self._guard is not None:
            self._guard.links.close()

    def _end_fast_paths(self) -> None:
        """Remove the fast paths, so that every call takes its method."""
        for name, fast_path in self._fast_paths.items():
            fast_path.end()  # other code may have kept a reference
            if self.__dict__.get(name) is fast_path:
                del self.__dict__[name]
        self._fast_paths = {}

    def _no_route(self, route: _backend_selection.Route) -> NoRouteError:
        here = ", ".join(str(r) for r in self._routes.values()) or "none"
        return NoRouteError(
            f"no route for tensors on device {route.device!r}: {route.missing}. Routes of this group: {here}; "
            f"`monarch-backend doctor` explains the machine. [{where(self)}]"
        )

    def _known_routes(self) -> dict[str, _backend_selection.Route]:
        return {**_backend_selection.survey(self._creation.device_map), **self._routes}

    # Coalescing -------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        inner = self._get_backend(device)
        if not getattr(inner, "supports_coalescing", False):
            _c10d_internals.forget_coalescing(self)
            # Gloo runs its operations one by one anyway, so collecting their works is enough.
            raise NotImplementedError(
                f"coalescing on {device.type} is not supported by its route, {self._routes[device.type].backend}: "
                f"call the coalescing manager without a device. [{where(self)}]"
            )
        inner._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._get_backend(device)._end_coalescing()

    # The group itself -------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # torch's C++ name
        """Return "monarch", for torch's C++ base."""
        return "monarch"

    def get_group_store(self) -> Store:
        """Return the store that all ranks of the group share. torch's C++ base has none."""
        store: Store = self._creator_options.store
        return store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._inner]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the inner group of a device, and open its route if needed. Raises a RuntimeError if there is none."""
        kind = torch.device(device).type
        return self._inner.get(kind) or self._open_route(kind)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of every route's operations that start from now on."""
        for inner in self._inner.values():
            inner.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        inner = self._inner.get("cuda") or self._get_backend(torch.device("cpu"))
        ours = self._shm.sequence if self._shm is not None and inner is self._inner.get("cpu") else 0
        return int(inner._get_sequence_number_for_group()) + ours

    def _set_sequence_number_for_group(self) -> None:
        for inner in self._inner.values():
            inner._set_sequence_number_for_group()

    def _register_on_completion_hook(self, hook: Callable[[Any], None]) -> None:
        """Call ``hook(work_info)`` after every collective, on each route. NCCL brings its own hooks."""
        self._hooks.add(hook)
        self._end_fast_paths()
        for device, inner in self._inner.items():
            if device != "cpu" and hasattr(inner, "_register_on_completion_hook"):
                inner._register_on_completion_hook(hook)

    def observe(self, but: Collection[str] = ()) -> None:
        """Send all operations through torch's dispatcher from now on, so that its hooks are called.

        ``but``: names of backends whose routes are not changed.
        """
        self._spared = set(but) if self._spared is None else self._spared.intersection(but)
        self._let_see()

    def _let_see(self) -> None:
        if self._spared is None:
            return
        self._observed = {device for device, route in self._routes.items() if route.backend not in self._spared}
        if "cpu" not in self._observed:
            return
        self._end_fast_paths()
        if (self._shm is not None or self._rdma_p2p is not None) and self._kernel is None:
            taken = {_c10d_internals.backend_type(backend) for backend in self._backends.values()}
            self._kernel = _c10d_internals.DispatcherShimBackend(
                self.rank(), self.size(), self._inner["cpu"], self.group_name
            )
            self._register_backend(torch.device("cpu"), _c10d_internals.free_backend_type(taken), self._kernel)

    if hasattr(dist.ProcessGroup, "register_pre_hook"):

        def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
            """Call ``hook`` before every collective. All of them use torch's dispatcher from now on, which calls it."""
            self.observe()
            super().register_pre_hook(hook_id, hook)  # type: ignore[misc]

        def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
            """Call ``hook`` after every collective was started."""
            self.observe()
            super().register_post_hook(hook_id, hook)  # type: ignore[misc]

    def _has_hooks(self) -> bool:
        return bool(self._hooks)

    def _wait_for_pending_works(self) -> None:
        self._hooks.wait()

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> MonarchProcessGroup | None:
        """Make a group of some ranks of this group, for torch.distributed.split_group.

        All ranks call it, and those outside ``ranks`` get None. ``ranks`` are ranks of this group. NCCL's communicator
        is split from this group's; Gloo's is made anew. Raises DistStoreError and DistNetworkError as `create` does.
        """
        ranks = sorted(ranks)
        accelerators = [d for d in self._inner if d != "cpu" and _c10d_internals.splits(self._inner[d])]
        if self.rank() not in ranks:
            for device in accelerators:
                _c10d_internals.peel(self._inner[device]).perform_nocolor_split(self.bound_device_id)
            return None
        self._splits += 1
        name = group_name or f"{self._label}:split{self._splits}:{'-'.join(map(str, ranks))}"
        options = _c10d_internals.split_options(self, self._creator_options, ranks, timeout, name)
        source = _c10d_internals.peel(self._inner[accelerators[0]]) if accelerators else None
        creation = replace(self._creation, device_id=self.bound_device_id, split_from=source)
        pg_options = Options({accelerators[0]: opts}) if accelerators and opts is not None else self._pg_options
        only = None if device_types is None else [torch.device(d).type for d in device_types]
        group = MonarchProcessGroup(options, pg_options, creation, only)
        group._set_group_name(name)  # type: ignore[arg-type,unused-ignore]  # a NewType in some releases
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    def shutdown(self) -> None:
        """Close every route, for torch.distributed.destroy_process_group. Later operations raise GroupClosedError."""
        self._close("destroyed", lambda inner: inner.shutdown())

    def abort(self, why: str = "") -> None:
        """Close every route at once. NCCL ends pending operations with an error, Gloo at their timeout.

        Later operations raise GroupClosedError, with ``why`` in the message. On a route with shared memory, other ranks
        that wait for this one raise RankFailedError, also with ``why``.
        """
        for ours in (self._shm, self._rdma_p2p):
            if ours is not None and why:
                ours.closed_why = why
        how = f"aborted: {why}" if why else "aborted"
        self._close(how, lambda inner: inner.abort(), reason=cut_reason(how) if why else "")

    def _close(self, how: str, end: Callable[[Any], None], reason: str = "") -> None:
        if self._closed:
            return
        if how == "destroyed":
            self._hooks.wait()
        self._closed = how
        if self._arrival is not None:
            failed = (self._shm is not None and self._shm.failed) or (
                self._guard is not None and self._guard.error() is not None
            )
            self._arrival.leave(stay=how == "destroyed" and not failed)
        self._end_fast_paths()
        if self._shm is not None:
            reason = reason or reason_of(sys.exc_info()[1])
            if reason:
                self._shm.set_reason(reason)
            self._shm.close()
        if self._rdma_p2p is not None:
            self._rdma_p2p.close()
        for recording in self._recordings.values():
            recording.close()
        self._recordings = {}
        inners = list({id(i): i for i in self._inner.values()}.values())
        self._inner.clear()
        for inner in inners:
            if hasattr(inner, "shutdown"):
                end(inner)
        if self._guard is not None:  # last: an abort has to be prompt
            self._guard.close()


def routes(group: dist.ProcessGroup | None = None) -> dict[str, _backend_selection.Route]:
    """Return the available routes: of ``group``, by default of the default group, or of this machine without a group.

    The keys are device types. In a group the CPU's backend is "shm" (all ranks share a host), "shm+gloo" (some do)
    or "gloo". Without a group it is "shm+gloo", or "gloo" where this machine can't share memory; ``why`` says so.
    Raises TypeError if ``group`` is not a group of backend "monarch".

    >>> import monarch_backend
    >>> print(monarch_backend.routes()["cpu"])
    cpu -> shm+gloo (shared memory between ranks of one host, torch's Gloo between hosts)
    """
    if group is None and dist.is_initialized():
        default = dist.group.WORLD
        group = default if isinstance(default, MonarchProcessGroup) else None
    if group is not None and not isinstance(group, MonarchProcessGroup):
        raise TypeError(f"routes() takes a process group of backend 'monarch', not {type(group).__name__}")
    found = group._known_routes() if group is not None else _backend_selection.survey()
    return {device: route for device, route in found.items() if route.available}


_living: weakref.WeakSet[MonarchProcessGroup] = weakref.WeakSet()


def _tell_end() -> None:
    """Send the exception that ends this program to the other ranks of groups that are alive."""
    interactive = hasattr(sys, "ps1")  # there, an earlier exception is not the reason of the end
    error = sys.exc_info()[1]  # in a child of multiprocessing, this runs while the exception is handled
    if error is None and not interactive:
        error = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    reason = reason_of(error)
    for group in list(_living) if reason else ():
        if group._shm is not None and not group._closed:
            group._shm.tell_end(reason)


segment.before_end.append(_tell_end)


def abort_all(why: str) -> None:
    """Abort each group of this process, with the operations that are under way in it.

    Later operations of these groups raise GroupClosedError, with ``why`` in the message.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from monarch_backend.process_group import abort_all
    >>> dist.init_process_group("monarch", store=dist.HashStore(), rank=0, world_size=1)
    >>> abort_all("the loss is NaN")
    >>> dist.all_reduce(torch.ones(2))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    monarch_backend.GroupClosedError: the process group was aborted: the loss is NaN; make a new one. [rank 0 of 1 ...]
    >>> dist.destroy_process_group()
    """
    for group in list(_living):
        group.abort(why)


def waited_in(thread: int) -> int:
    """Return the identity, in recordings, of the group in whose collective a thread waits for other ranks of its host.

    Return 0 if it waits in none, and for groups over several hosts. ``thread``: its `threading.get_ident`.
    """
    for group in list(_living):
        shm = group._shm
        if shm is not None and shm.waiting_thread == thread:
            return shm.identity
    return 0


_FAST_PATH_METHODS = {name: member for name, member in vars(Collectives).items() if callable(member)}
"""Methods that fast paths may replace, before any code changes a class."""
