"""Uses and replacements of private parts of torch.distributed.elastic.

torch's own `run` is called while four of its names are replaced. The agent is notified of a rank's end instead of
polling. The start of ranks and the handler of a program use the fork server. A pause for many hosts is left out.
tests/launch/test_torchelastic_internals.py has a test for each, which fails when torch changes it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.multiprocessing.subprocess_handler import handlers
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.utils import _delay
from torch.distributed.launcher import api as launcher

from monarch_backend._core import env, host_watch, platform
from monarch_backend._core.limits import within
from monarch_backend._launch.peer_launchers import STORE_TIMEOUT_S, PeerLaunchers
from monarch_backend._launch.rank_processes import RankProcess, Ranks

_log = logging.getLogger("monarch_backend")

_DESCRIPTION = """torchrun, with ranks that are forked from one process that has imported torch, and failures noticed
within milliseconds. All of torchrun's options and environment variables; the same exit codes and error files."""

_CONTROLLER = """run the script once, on the first node, as the controller of all nodes: there,
monarch_backend.job.host_mesh_from_env() is the mesh of hosts, and MONARCH_NPROC_PER_NODE is --nproc-per-node"""

_AS = """gloo, nccl or gloo,nccl: groups for these backends of torch are made by this one, for programs that accept only
names they know; sets MONARCH_AS"""


def run(argv: Sequence[str], ranks: Ranks | None, why_not: str) -> None:
    """Do what torchrun does with ``argv``. ``ranks`` makes the processes; with None torch does, for ``why_not``."""
    args = _parse(argv)
    reason, unusual = _why_not_forked(args, why_not)
    if unusual:
        _log.warning("each rank starts an interpreter and imports torch by itself: %s", reason)
    with _standing_in(None if reason else ranks, one_host=args.nnodes in ("1", "1:1")):
        record(torchrun.run)(args)  # torchrun.main without the parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = torchrun.get_args_parser()
    parser.prog = "monarch-backend run"
    parser.description = _DESCRIPTION
    parser.add_argument("--controller", action="store_true", help=_CONTROLLER)
    parser.add_argument("--as", dest="names", metavar="BACKENDS", help=_AS)
    address = parser.get_default("master_addr")
    parser.set_defaults(master_addr=os.environ.get("PET_MASTER_ADDR") or None)
    args = parser.parse_args(argv)
    _check_nodes(args)
    args.master_addr = args.master_addr or address
    if args.names:
        os.environ["MONARCH_AS"] = args.names
        env.check()
    if args.controller:
        _run_once(args)
    return args


def _check_nodes(args: argparse.Namespace) -> None:
    """Exit with 2 if the numbers of nodes are invalid, or if other nodes would never meet this one.

    torch raises errors without the option's name, or waits without a message. ``args.master_addr`` is None where the
    address was not given: torch would take 127.0.0.1 on each node.
    """
    counts = re.fullmatch(r"([1-9][0-9]*)(?::([1-9][0-9]*))?", args.nnodes.strip())
    if counts is None or int(counts[2] or counts[1]) < int(counts[1]):
        _refuse(f"--nnodes={args.nnodes!r} (PET_NNODES): give a number of nodes, such as 2, or a range, such as 1:4")
    try:
        if torchrun.determine_local_world_size(args.nproc_per_node) < 1:
            raise ValueError("give a number of processes from 1 on, or gpu, cpu, auto")
    except ValueError as error:
        _refuse(f"--nproc-per-node={args.nproc_per_node!r} (PET_NPROC_PER_NODE): {error}")
    nodes = int(counts[2] or counts[1])
    if args.standalone or args.rdzv_backend != "static":
        return
    if not 0 <= args.node_rank < nodes:
        _refuse(
            f"--node-rank={args.node_rank} (PET_NODE_RANK) of --nnodes={args.nnodes} (PET_NNODES): give each node "
            f"another number from 0 to {nodes - 1}"
        )
    if nodes > 1 and not (args.master_addr or args.rdzv_endpoint):
        _refuse(
            f"--nnodes={args.nnodes} (PET_NNODES) without --master-addr (PET_MASTER_ADDR): give the address of node 0 "
            "to all nodes, or 127.0.0.1 if all are on this machine"
        )


def _refuse(reason: str) -> NoReturn:
    print(f"monarch-backend run: {reason}", file=sys.stderr)
    raise SystemExit(2)


def _run_once(args: argparse.Namespace) -> None:
    """Run one rank for each node, which becomes a host. The first one runs the script."""
    if args.no_python or args.run_path:
        raise SystemExit("monarch-backend run: --controller runs a script or, with -m, a module of Python")
    os.environ["MONARCH_NPROC_PER_NODE"] = str(torchrun.determine_local_world_size(args.nproc_per_node))
    script = ["-m", args.training_script] if args.module else [args.training_script]
    args.training_script_args = [*script, *args.training_script_args]
    args.training_script, args.module, args.nproc_per_node = "monarch_backend.cli.controller", True, "1"


def _why_not_forked(args: argparse.Namespace, why_not: str) -> tuple[str, bool]:
    """Return why torch must start the ranks itself, or "", and whether the user did not request that."""
    if args.no_python:
        return "--no-python", False
    if args.run_path:
        return "--run-path", False
    if os.environ.get("PYTHON_EXEC", sys.executable) != sys.executable:
        return f"PYTHON_EXEC={os.environ['PYTHON_EXEC']} is another interpreter than the launcher's", True
    if getattr(args, "numa_binding", None) is not None:  # not in every torch
        return "--numa-binding starts ranks with numactl", True
    return why_not, bool(why_not) and platform.HAS_SAFE_FORK


@contextlib.contextmanager
def _standing_in(ranks: Ranks | None, one_host: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(launcher, "LocalElasticAgent", Agent))
        stack.enter_context(_replaced(handlers, "SubprocessHandler", _ResumedProgram))
        if ranks is not None:
            stack.enter_context(_replaced(local_elastic_agent, "start_processes", _start_processes(ranks)))
        if one_host:
            stack.enter_context(_replaced(dynamic_rendezvous, "_delay", _but_the_first(_delay)))
        yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, ours: Any) -> Iterator[None]:
    original = getattr(module, name, None)
    if original is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no {module.__name__}.{name}, for which `monarch-backend run` has its own: "
            "torchrun takes the same arguments"
        )
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, original)


_FIRST_DELAY = (0, 0.3)


def _but_the_first(delay: Callable[..., None]) -> Callable[..., None]:
    """Skip the first random wait of the rendezvous. It spreads the arrival of many hosts; here is only one."""

    def wait(seconds: float | tuple[float, float]) -> None:
        if seconds != _FIRST_DELAY:
            delay(seconds)

    return wait


class Agent(LocalElasticAgent):
    """torch's agent, but its monitoring call waits for the end of a rank.

    torch sleeps for --monitor-interval between two calls. Here a call takes at most that long: then it is time to check
    whether a host wants to join.
    """

    def __init__(self, spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(spec, *args, **kwargs)
        self._interval: float = spec.monitor_interval
        spec.monitor_interval = 0.0
        self._ends = _Ends()
        self._watch = host_watch.HostWatch()
        self._peers: PeerLaunchers | None = None
        self._had_peers = False
        self._bound_calls(spec.rdzv_handler)

    def _bound_calls(self, handler: Any) -> None:
        """Let calls to the rendezvous end without its store, which may be on a host that is cut off.

        torch waits a minute for an answer of the store. Both calls are only advice: whether a node wants to join, and
        that this one leaves.
        """
        if not host_watch.silence():
            return
        pending = threading.Lock()

        def waiting() -> int:
            with pending:
                return int(count())

        def num_nodes_waiting() -> int:
            if self._peers is None:
                return int(count())
            if pending.locked():
                return 0
            with contextlib.suppress(TimeoutError):
                return within(STORE_TIMEOUT_S, waiting, thread_name="monarch_nodes_waiting")
            return 0

        def shutdown() -> bool:
            if not self._had_peers:
                return bool(end())
            with contextlib.suppress(TimeoutError):
                return within(STORE_TIMEOUT_S, lambda: bool(end()), thread_name="monarch_leave_rendezvous")
            return False

        count, end = handler.num_nodes_waiting, handler.shutdown
        handler.num_nodes_waiting, handler.shutdown = num_nodes_waiting, shutdown

    def run(self, role: str = "default") -> Any:
        """Run the ranks, and send a failure of this host to the other launchers."""
        try:
            result = super().run(role)
            if result is not None and result.is_failed():
                ranks = ", ".join(map(str, sorted(result.failures)))
                self._notify(f"rank{'s' if len(result.failures) > 1 else ''} {ranks} failed")
            return result
        except SystemExit as error:
            self._notify(str(error))
            raise
        finally:
            self._leave_peers()

    def _notify(self, reason: str) -> None:
        if self._peers is not None:
            self._peers.notify(reason)

    def _leave_peers(self) -> None:
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _rendezvous(self, worker_group: Any) -> None:
        self._leave_peers()
        super()._rendezvous(worker_group)
        count = worker_group.group_world_size
        if count > 1 and host_watch.silence():
            root = worker_group.store
            while isinstance(root, PrefixStore):
                root = root.underlying_store
            if isinstance(root, TCPStore):
                self._had_peers = True
                ranks = [worker.global_rank for worker in worker_group.workers]
                attempt = f"launchers/{worker_group.spec.max_restarts - self._remaining_restarts}"
                store = PrefixStore(attempt, worker_group.store.clone())
                self._peers = PeerLaunchers(self._watch, store, root.host, worker_group.group_rank, count, ranks)

    def _restart_workers(self, worker_group: Any) -> None:
        """Restart. Raises SystemExit if another host is lost and the store of the rendezvous cannot be reached."""
        if self._peers is not None:
            reached = self._peers.reach_store()
            if not reached and (reason := self._peers.reason):
                raise SystemExit(f"monarch-backend run: {reason}. No restart: the rendezvous cannot be reached")
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: Any) -> Any:
        context = self._pcontext
        if isinstance(context, ForkedContext):
            context.wait_for_end(self._interval)
        elif context is not None:
            self._ends.wait(context.pids().values(), self._interval)
        result = super()._monitor_workers(worker_group)
        reason = self._peers.failure() if self._peers is not None and result.state == WorkerState.HEALTHY else ""
        if not reason:
            return result
        if not self._remaining_restarts:
            raise SystemExit(f"monarch-backend run: {reason}. The ranks of this host are ended")
        return RunResult(state=WorkerState.UNHEALTHY)


class _Ends:
    """Waits for the end of processes that other code reaps, once for each process."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def wait(self, pids: Iterable[int], timeout: float) -> None:
        """Wait until one of ``pids`` ends that had not ended at the last call."""
        if not platform.HAS_PIDFD:
            time.sleep(timeout)
            return
        poll, by_descriptor = select.poll(), {}
        try:
            for pid in set(pids) - self._seen:
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:  # it has been reaped
                    self._seen.add(pid)
                    return
                by_descriptor[descriptor] = pid
                poll.register(descriptor, select.POLLIN)
            self._seen.update(by_descriptor[descriptor] for descriptor, _ in poll.poll(timeout * 1000))
        finally:
            for descriptor in by_descriptor:
                os.close(descriptor)


def _start_processes(ranks: Ranks) -> Callable[..., PContext]:
    """Replacement of torch's function of this name, for ``python -u ...`` only."""

    def start_processes(*, start_method: str, **kwargs: Any) -> PContext:  # noqa: ARG001 # of functions, not programs
        context = ForkedContext(ranks, **kwargs)
        try:
            context.start()
        except Exception:
            context.close()
            raise
        return context

    return start_processes


class _HeldSignals:
    """Delays signals from ``hold`` to ``let_go``: torch's handler raises, and would not reach ranks that start."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []

    def hold(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            if callable(signal.getsignal(number)):
                self._handlers[number] = signal.signal(number, lambda came, _: self._came.append(came))

    def let_go(self) -> None:
        held, self._handlers = self._handlers, {}
        for number, handler in held.items():
            signal.signal(number, handler)
        for number in self._came[:1]:  # its handler ends all ranks
            self._came.clear()
            held[number](number, None)


class ForkedContext(SubprocessContext):
    """torch's bookkeeping of programs, for processes of the fork server."""

    def __init__(self, ranks: Ranks, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ranks = ranks
        self._ends_seen = 0
        self._held = _HeldSignals()

    def _start(self) -> None:
        self._held.hold()
        try:
            everyone = range(self.nprocs)
            started = self._ranks.start(
                [[str(word) for word in self.args[rank]] for rank in everyone],
                [self.envs[rank] for rank in everyone],
                [self.stdouts[rank] for rank in everyone],
                [self.stderrs[rank] for rank in everyone],
            )
        except BaseException:
            self._held.let_go()
            raise
        made: dict[int, Any] = {rank: _Handler(process) for rank, process in enumerate(started)}
        self.subprocess_handlers = made

    def wait(self, timeout: float = -1, period: float = 1) -> Any:
        """Replacement of torch's method, for an agent that has this context."""
        self._held.let_go()
        return super().wait(timeout, period)

    def wait_for_end(self, timeout: float) -> None:
        self._held.let_go()
        self._ends_seen = self._ranks.wait_for_end(self._ends_seen, timeout)


class _ResumedProgram(handlers.SubprocessHandler):
    """torch's handler of a program. SIGCONT follows each signal, as in `RankProcess.send_signal`."""

    def close(self, death_sig: signal.Signals | None = None) -> None:
        super().close(death_sig)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, signal.SIGCONT)


class _Handler:
    """Handler of a program for ForkedContext, as SubprocessHandler is for torch's SubprocessContext."""

    def __init__(self, process: RankProcess) -> None:
        self.proc = process

    def close(self, death_sig: signal.Signals | None = None) -> None:
        self.proc.send_signal(death_sig or signal.SIGTERM)
