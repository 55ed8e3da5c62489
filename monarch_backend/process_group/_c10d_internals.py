"""Uses of torch's private c10d parts by process_group/.

Each function names the private parts that it uses. tests/process_group/test_c10d_internals.py fails when torch changes
them. Replacements of torch's functions are in _c10d_patches.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack
from torch._C._distributed_c10d import Backend as C10DBackend
from torch._C._distributed_c10d import (
    BarrierOptions,
    DebugLevel,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    _allow_inflight_collective_as_graph_input,
    _DistributedBackendOptions,
    get_debug_level,
)
from torch._C._dynamo import eval_frame
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from monarch_backend import _native
from monarch_backend._core.limits import within
from monarch_backend._core.torch_version import torch_version
from monarch_backend.process_group import _own_address
from monarch_backend.process_group._collective_specs import COLLECTIVES
from monarch_backend.process_group._handshake import Deadline

BackendType = dist.ProcessGroup.BackendType

# Default timeout of c10d's methods: "use the group's timeout".
UNSET_TIMEOUT = c10d.AllreduceOptions().timeout

_COPIED_OPTIONS = (
    "group_rank",
    "group_size",
    "timeout",
    "group_id",
    "global_ranks_in_group",
    "process_group",
    "split_from",
    "enable_reconfigure",
)


@dataclass(frozen=True)
class Creation:
    """Arguments of torch's group creation that torch does not pass to a backend's creator."""

    # device type -> backend name as the user wrote it; None: unknown, all devices use "monarch"
    device_map: dict[str, str] | None = None
    device_id: torch.device | None = None
    split_from: Any = None


def creation() -> Creation:
    """Read the locals of ``distributed_c10d._new_process_group_helper``, which is calling our creator.

    torch passes a creator neither the user's "cpu:monarch,cuda:gloo" nor `device_id`. Before 2.14 it does not pass the
    group to split from either. It calls a creator that returns a ProcessGroup once for all devices. Returns an empty
    Creation if another function is calling.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_new_process_group_helper":
            local = frame.f_locals
            config = local.get("backend_config")
            device_map = {k: str(v) for k, v in config.get_device_backend_map().items()} if config else None
            return Creation(device_map, local.get("device_id"), local.get("split_from"))
        frame = frame.f_back
    return Creation()


def watched() -> bool:
    """True while torch's dispatcher has observers, so that a collective must go through it.

    Observers are dispatch modes (FakeTensorMode, CommDebugMode, LocalTensorMode), the profiler, and compiled code that
    keeps collectives in flight. Uses torch._C._len_torch_dispatch_stack, profiler._is_profiler_enabled and
    _distributed_c10d._allow_inflight_collective_as_graph_input.
    """
    return (
        _len_torch_dispatch_stack() > 0 or profiler._is_profiler_enabled or _allow_inflight_collective_as_graph_input()
    )


def fast_path_torch_names(ops: dict[str, int], dtypes: dict[torch.dtype, int]) -> tuple[Any, ...]:
    """Return what the compiled fast paths need from torch (csrc/shm/python/fast_paths.h: TorchNames).

    ``ops`` and ``dtypes`` have the core's codes.
    """
    kinds = dist.ReduceOp.RedOpType
    codes = {int(getattr(kinds, name)): code for name, code in ops.items()}
    watches = [_len_torch_dispatch_stack, _allow_inflight_collective_as_graph_input]
    types = torch.Tensor, torch.nn.Parameter
    return *types, torch.strided, dist.ReduceOp.SUM, codes, dtypes, watches, vars(profiler)


def profiled(title: str, tensors: list[torch.Tensor]) -> AbstractContextManager[Any]:
    """Return a profiler range that shows the shapes of ``tensors``, which torch.profiler.record_function can't do."""
    return _RecordFunctionFast(title, tensors)


_NON_BLOCKING = frozenset(getattr(f, "__wrapped__", f).__code__ for f in (dist.isend, dist.irecv))
_BLOCKING = frozenset(getattr(f, "__wrapped__", f).__code__ for f in (dist.send, dist.recv))


def callers_of_messages() -> tuple[tuple[CodeType, ...], tuple[CodeType, ...]]:
    """Return what `is_waited_for` looks for, for the compiled fast paths: code that waits, and code that it calls."""
    return tuple(_BLOCKING), tuple(_NON_BLOCKING)


def is_waited_for(caller: FrameType | None) -> bool:
    """True if ``caller`` waits at once for the work that it requests, and passes it to no other code.

    torch.distributed.send and recv do so; they call isend and irecv. Uses these functions beneath torch's logging
    decorator. If they change, messages only take longer.
    """
    while caller is not None and caller.f_code in _NON_BLOCKING:
        caller = caller.f_back
    return caller is not None and caller.f_code in _BLOCKING


_Class = TypeVar("_Class", bound=type)


def hide_from_dynamo(cls: _Class) -> _Class:
    """Class decorator: TorchDynamo neither traces nor compiles the methods and the functions that they call.

    C++ (DDP's buffer broadcast, its reducer) calls the methods while TorchDynamo watches every Python frame.
    TorchDynamo would compile them as separate programs. torch.compiler.disable would prevent that, but imports
    TorchDynamo. Its mark on a code object, set by torch._C._dynamo.eval_frame, costs nothing.
    """
    skip = eval_frame._FrameAction.SKIP
    for member in vars(cls).values():
        function: Any = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)
        while isinstance(function, FunctionType):  # a decorated one and what it calls
            # The context managers of all packages share one code object.
            if function.__code__.co_filename != contextlib.__file__:
                eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
            function = getattr(function, "__wrapped__", None)
    return cls


class UntracedMode(TorchDispatchMode):
    """Dispatch mode that compiled code does not trace.

    torch's own base class for this imports TorchDynamo, which takes half a second.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
        hide_from_dynamo(cls)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps `__torch_dispatch__` itself. Uses TorchDispatchMode.__init_subclass__."""
        return False


class _PassOn(UntracedMode):
    """Dispatch mode that calls each operator again from Python, where the call releases the GIL."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def through_dispatcher() -> AbstractContextManager[Any]:
    """Return a context for the ``super()`` calls of an overridden collective.

    torch's trampolines (PyProcessGroup.hpp) hold the GIL while they call the C++ base. Gloo's threads free a finished
    work under a lock that the next operation needs, and take the GIL for its tensors. Both threads then deadlock. A
    dispatch mode takes the operator through Python, where its call releases the GIL. A mode that is already active does
    the same.
    """
    return nullcontext() if _len_torch_dispatch_stack() > 0 else _PassOn()  # type: ignore[no-untyped-call]


class _Beneath(UntracedMode):
    """Dispatch mode that calls ``run(name, args)`` in place of torch's kernel for c10d operators."""

    def __init__(self, run: Callable[[str, tuple[Any, ...]], Any], kernel: DispatcherShimBackend | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run, self._kernel = run, kernel
        self._works: list[Any] = []  # C++ keeps a boxed work alive, but not its Python object

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or _len_torch_dispatch_stack() > 0:
            return func(*args, **(kwargs or {}))  # not our operator, or FakeTensorMode and similar modes follow
        for kind in types:
            if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                with self:  # it calls the operator again with a substitute
                    return kind.__torch_dispatch__(func, types, args, kwargs or {})
        run = functools.partial(self._run, func._schema.name.partition("::")[2], args)
        self._works.append(
            run() if self._kernel is None else self._kernel.call(run, lambda: func(*args, **(kwargs or {})))
        )
        work = self._works[-1].boxed()
        return (args[0], work) if len(func._schema.returns) == 2 else work


class DispatcherShimBackend(C10DBackend):
    """CPU backend that torch >= 2.14 finds while its kernels call hooks before and after an operation.

    The kernel of a c10d operator calls the hooks and, in between, a method of the backend. Here that method runs the
    function given to `call`. C++ callers without a trampoline reach ``inner`` instead. Uses py/PyBackend.hpp, which
    allows backends in Python.
    """

    def __init__(self, rank: int, size: int, inner: Any, group_name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg,unused-ignore]
        self._set_group_uid(group_name)  # type: ignore[attr-defined,unused-ignore]  # a group has its backends' name
        self._inner = inner
        self._pending = threading.local()

    def call(self, run: Callable[[], Any], operator: Callable[[], Any]) -> Any:
        """Return the work of ``run``; ``operator`` calls it through its kernel."""
        state = self._pending.__dict__
        outer = dict(state)  # a hook may call another operation of the group
        state["run"] = run
        try:
            operator()
            return state["work"]
        finally:
            state.clear()
            state.update(outer)

    def getBackendName(self) -> str:  # torch's C++ name
        """Return a name other than "gloo", which the flight recorder skips because Gloo has its own recorder."""
        return "shm"

    def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        run = self._pending.__dict__.pop("run", None)
        if run is None:
            return getattr(self._inner, name)(*args)
        self._pending.work = run()
        return self._pending.work


def _answering(name: str) -> Callable[..., Any]:
    def method(self: DispatcherShimBackend, *args: Any) -> Any:
        return self._answer(name, args)

    return method


for _spec in COLLECTIVES:
    if _spec.operator:
        setattr(DispatcherShimBackend, _spec.methods[-1], _answering(_spec.methods[-1]))


def free_backend_type(taken: set[Any]) -> Any:
    """Return a `ProcessGroup.BackendType` that no backend of the group has; c10d keeps one backend for each type."""
    return next(kind for kind in (BackendType.CUSTOM, BackendType.UCC, BackendType.MPI) if kind not in taken)


@contextmanager
def beneath_dispatch_modes(
    run: Callable[[str, tuple[Any, ...]], Any], kernel: DispatcherShimBackend | None = None
) -> Iterator[None]:
    """In this context ``run(name, args)`` replaces the kernels of c10d's operators on plain tensors.

    With a ``kernel``, torch's kernels are called and find it as their backend.

    Active dispatch modes, tensor subclasses and the profiler get the operators first, and may change or consume them.
    So the dispatcher does all its work for an operation that is not the registered group's. Uses
    torch.utils._python_dispatch, whose stack has torch's own modes (fake tensors, tracing) at its bottom.
    """
    users = []
    while (
        _get_current_dispatch_mode_stack()
        and getattr(_get_current_dispatch_mode_stack()[-1], "_mode_key", None) is None
    ):
        users.append(_pop_mode())
    ours = _Beneath(run, kernel)
    _push_mode(ours)
    for mode in reversed(users):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in range(len(users) + 1):
            _pop_mode()
        for mode in reversed(users):
            _push_mode(mode)


def creator_options(options: Any, store: Store, split_from: Any) -> Any:
    copy = _DistributedBackendOptions()
    for name in _COPIED_OPTIONS:
        if hasattr(options, name) and hasattr(copy, name):
            setattr(copy, name, getattr(options, name))
    copy.store = store
    if hasattr(copy, "split_from"):
        copy.split_from = split_from
    return copy


def own_connection(store: Store) -> Store:
    """Return the same store over a new connection: a TCPStore's connection is blocked while a thread waits for a key.

    Uses PrefixStore.underlying_store and Store.clone.
    """
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return store.clone() if isinstance(inner, TCPStore) and hasattr(store, "clone") else store


def close_gloo_links(gloo: Any) -> None:
    """End a Gloo group for all of its ranks: ranks that wait for this one get "connection closed" at once.

    Gloo closes all connections of a group when a message times out. So this waits for a message that is never sent.
    A connection that is broken already fails at once and closes no other one, so each rank is tried.
    """
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
    for other in range(gloo.size()):
        if other != gloo.rank():
            with suppress(RuntimeError):
                gloo.recv([nothing], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))


_UNUSED_TAG = (1 << 31) - 1


def make_inner(
    name: str, options: Any, store: Store, pg_options: Any, creation: Creation, device: str, deadline: Deadline
) -> Any:
    """Make torch's group ``name`` ("gloo", "nccl", a plugin) as `_new_process_group_helper` does.

    Its keys are in ``store``. Raises TimeoutError after the deadline.
    """
    store = PrefixStore(f"{device}:{name}", store)
    opts = creator_options(options, store, creation.split_from)
    ensure = getattr(dist.Backend, "_ensure_backend_registered", None)
    if ensure is not None:
        ensure(name)
    plugin = dist.Backend._plugins.get(name.upper())
    if name == "gloo" and _is_torchs_gloo(plugin, opts):
        inner = _make_gloo(opts, deadline)
    elif plugin is not None and plugin.extended_api:
        inner = plugin.creator_fn(opts, pg_options)
    elif plugin is not None:
        inner = plugin.creator_fn(store, opts.group_rank, opts.group_size, opts.timeout)
    elif name == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
        inner = _make_nccl(opts, pg_options, creation.split_from)
    elif name == "xccl":
        inner = _make_xccl(opts, pg_options)
    else:
        # NotImplementedError is a RuntimeError, which torch's callers of `_get_backend` expect.
        raise NotImplementedError(f"this torch has no backend {name!r} for device {device!r}")
    _wait_for_connections(inner, deadline)
    return _debug_wrapper(inner, opts) if isinstance(inner, C10DBackend) else inner


def _wait_for_connections(inner: Any, deadline: Deadline) -> None:
    """Wait until all ranks of a new Gloo group are connected.

    The constructor returns when this rank's connections are made. A rank that destroys the group right then closes them
    for the others. Their constructors would fail with "connection closed by peer".
    """
    if dist.is_gloo_available() and isinstance(inner, c10d.ProcessGroupGloo):
        options = BarrierOptions()
        options.timeout = deadline.left()
        inner.barrier(options).wait()  # type: ignore[attr-defined]


def _is_torchs_gloo(plugin: Any, opts: Any) -> bool:
    """Return whether "gloo" is torch's own group, which torch >= 2.14 registers as a plugin.

    Torch's creator makes the groups that can be reconfigured.
    """
    is_own = plugin is None or plugin.creator_fn is getattr(c10d, "_create_gloo_process_group", None)
    return is_own and not getattr(opts, "enable_reconfigure", False)


_living: set[weakref.ref[Any]] = set()
"""Gloo groups of this process."""


def _keep_at_exit(gloo: Any) -> None:
    """Let the destructor of a Gloo group not run when the interpreter ends.

    One of Gloo's threads may need the GIL then, to release a tensor. It never gets it and keeps a lock, for which the
    destructor waits.
    """
    _living.add(weakref.ref(gloo, _living.discard))


@atexit.register
def _keep_living() -> None:
    for reference in list(_living):
        if (gloo := reference()) is not None:
            _native.keep_for_ever(gloo)


def _make_gloo(opts: Any, deadline: Deadline) -> Any:
    """Make a Gloo group, with an address that the other hosts reach.

    Runs in a thread, because the constructor waits for each of the other ranks for its whole timeout.
    """
    own = _own_address.agree(opts.store, opts.group_size, deadline)
    left = deadline.left()
    chosen: dict[str, Any] = {"timeout": left}
    if own:
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = left
        chosen = {"options": options}
    gloo = within(
        left.total_seconds(), lambda: c10d.ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, **chosen)
    )
    _keep_at_exit(gloo)
    gloo.set_timeout(opts.timeout)
    gloo.options.global_ranks_in_group = opts.global_ranks_in_group
    gloo.options.group_name = opts.group_id
    if torch_version() < (2, 14):  # later ones begin with 0, and warn
        gloo._set_sequence_number_for_group()
    return gloo


def _make_nccl(opts: Any, pg_options: Any, split_from: Any) -> Any:
    """Make an NCCL group inline, as torch < 2.14 does; later releases have a plugin creator."""
    nccl = c10d.ProcessGroupNCCL
    chosen = nccl.Options() if pg_options is None else pg_options
    if pg_options is None:
        chosen.is_high_priority_stream = False
    chosen._timeout = opts.timeout
    if split_from is not None:
        chosen.split_from = split_from
        chosen.split_color = c10d._process_group_color(opts.global_ranks_in_group)
    chosen.global_ranks_in_group = opts.global_ranks_in_group
    chosen.group_name = opts.group_id
    group = nccl(opts.store, opts.group_rank, opts.group_size, chosen)
    group._set_sequence_number_for_group()
    return group


def _make_xccl(opts: Any, pg_options: Any) -> Any:
    """Make an XCCL group inline, as torch < 2.14 does; later releases have a plugin creator."""
    xccl = c10d.ProcessGroupXCCL
    chosen = xccl.Options() if pg_options is None else pg_options
    chosen._timeout = opts.timeout
    chosen.global_ranks_in_group = opts.global_ranks_in_group
    chosen.group_name = opts.group_id
    return xccl(opts.store, opts.group_rank, opts.group_size, chosen)


def debug_detail() -> bool:
    return bool(get_debug_level() == DebugLevel.DETAIL)


def _debug_wrapper(inner: Any, opts: Any) -> Any:
    """Return the backend in the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL; torch wraps no custom ProcessGroup."""
    if not debug_detail() or not dist.is_gloo_available():
        return inner
    return c10d._create_process_group_wrapper(
        wrapped_pg=inner,
        store_prefix=opts.group_id,
        store=opts.store,
        rank=opts.group_rank,
        world_size=opts.group_size,
        timeout=opts.timeout,
    )


def finished_work(result: Any) -> Any:
    """Return a completed Work whose future holds ``result``; torch_xla's collectives return such works."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


@functools.cache
def _alone(_pid: int) -> Any:  # of one process: a fork has no threads to run it
    gloo = c10d.ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=30))
    _keep_at_exit(gloo)
    return gloo


def future_of_tensors(tensors: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
    """Return a completed future that holds ``tensors`` as a C++ list; a future made in Python can't.

    Uses the works of a Gloo group of one rank, whose broadcast leaves its tensors unchanged.
    """
    work = _alone(os.getpid()).broadcast(tensors[:1], c10d.BroadcastOptions())
    work.wait()
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future


def forget_coalescing(group: dist.ProcessGroup) -> None:
    """Undo what `_coalescing_manager` recorded before it asked the group; else later all_reduces wait for its end.

    Uses distributed_c10d._world.pg_coalesce_state.
    """
    c10d._world.pg_coalesce_state.pop(group, None)


def backend_type(name: str) -> Any:
    """Return the `ProcessGroup.BackendType` of a backend's name; CUSTOM for plugins."""
    return dist.Backend.backend_type_map.get(name, BackendType.CUSTOM)


def is_c10d_backend(inner: Any) -> bool:
    """True for a compiled `c10d::Backend`, which C++ callers of the group can reach without Python."""
    return isinstance(inner, C10DBackend)


def peel(inner: Any) -> Any:
    """Return the group inside the DETAIL wrapper, or ``inner`` itself."""
    wrapper = getattr(c10d, "_ProcessGroupWrapper", None)
    while wrapper is not None and isinstance(inner, wrapper):
        inner = inner.wrapped_pg
    return inner


def timeout_of(inner: Any) -> timedelta:
    """Return a Gloo group's present timeout. Uses its ``options._timeout``."""
    timeout: timedelta = peel(inner).options._timeout
    return timeout


def splits(inner: Any) -> bool:
    """True if the group can split its communicator (NCCL). Gloo claims so too, but has no communicator to keep."""
    return bool(getattr(peel(inner), "supports_splitting", False)) and hasattr(peel(inner), "perform_nocolor_split")


def split_options(
    group: dist.ProcessGroup, options: Any, ranks: list[int], timeout: timedelta | None, name: str
) -> Any:
    """Return `_DistributedBackendOptions` for a group of some of ``group``'s ranks; ``options`` are the group's own."""
    store = PrefixStore(f"{name}/", options.store)
    made = creator_options(options, store, None)
    # torch knows global ranks of registered groups only. Before that, the group's own ranks have to do.
    registered = group in c10d._world.pg_group_ranks
    members = dist.get_process_group_ranks(group) if registered else list(range(group.size()))
    made.group_rank, made.group_size = ranks.index(group.rank()), len(ranks)
    made.global_ranks_in_group = [members[rank] for rank in ranks]
    made.group_id = name
    if timeout is not None:
        made.timeout = timeout
    return made
