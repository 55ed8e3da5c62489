"""Engine of transfers: which thread runs them. transfer.py has the state of one, and how it ends.

The caller's thread runs small transfers on fast routes at once. Some routes advance a transfer without a thread, and
the waiting thread polls it. A thread pool runs all others. A future is done when its transfer does not touch memory any
more, whether it succeeded or not. The caller may then use the buffers again.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from monarch_backend import _native
from monarch_backend._actor.calls.future import DoneFuture, Future
from monarch_backend._actor.runtime import Runtime, program
from monarch_backend._actor.runtime_extension import RuntimeExtension
from monarch_backend._rdma.control_rpc import DROP, TOPICS
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.local_memory import CPU, LocalMemory
from monarch_backend._rdma.registrations import Handle, Registry, registry
from monarch_backend._rdma.routes import cuda_ipc, gpu_staged
from monarch_backend._rdma.routes.gpu_staged import gathered
from monarch_backend._rdma.routes.protocol import (
    DONE,
    AtomicOp,
    InFlightTransfer,
    NicRoute,
    ReadWriteOp,
    Route,
    as_async_route,
    cancel_scope,
    of_nics,
)
from monarch_backend._rdma.routes.same_host import INLINE_MAX_BYTES, SameHost
from monarch_backend._rdma.routes.selection import Routes, refuse_the_parents
from monarch_backend._rdma.routes.verbs import Kept, refusal_of
from monarch_backend._rdma.transfers import recording
from monarch_backend._rdma.transfers.future import SingleFuture, TransferFuture
from monarch_backend._rdma.transfers.transfer import Transfer, run_part
from monarch_backend._transport.local.frames import Setting
from monarch_backend._transport.local.peer import Peer
from monarch_backend._verbs import Allocation

MAX_THREADS = 64
"""Threads for transfers and for peers that do not answer. A second pool of the same size repeats or explains failed
parts.
"""

T = TypeVar("T")


def nothing() -> None:
    """Return None, the result of a read or write."""


Job = Callable[[], None]


class Workers:
    """Pool of up to ``most`` threads. Threads never end; idle ones sleep."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._idle = 0

    def submit(self, job: Job, *, at_once: bool = False) -> None:
        """Queue a job for the next free thread. Long jobs may delay it, unless it runs ``at_once``, as below.

        Raises RDMAError during interpreter shutdown, when threads do not run any more.
        """
        # During shutdown threads stop anywhere, perhaps with our lock, and starting a thread would block without end.
        if sys.is_finalizing():
            raise RDMAError(
                "Python is ending, and runs no threads any more: nothing can be transferred now. Do it before, in an "
                "atexit function for example, and not in a __del__ that runs last"
            )
        with self._lock:
            free = self._idle > self._jobs.qsize()
            more = not free and self._threads < self._most
            self._threads += more
            if free or more or not at_once:
                self._jobs.put(job)
        if more:
            threading.Thread(target=self._work, name="monarch-memory", daemon=True).start()
        elif at_once and not free:
            threading.Thread(target=job, name="monarch-memory-extra", daemon=True).start()

    def submit_at_once(self, job: Job) -> None:
        """Run a job without a delay by other jobs, if necessary on an extra thread. Raises as `submit`.

        Connections use this, because a waiting caller does not depend on the jobs that occupy the pool.
        """
        self.submit(job, at_once=True)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
            job()
            del job


class Engine(RuntimeExtension):
    def __init__(self, owner: Runtime, registered: Registry) -> None:
        self.program, self.registry = owner, registered
        self.movers, self.menders = Workers(MAX_THREADS), Workers(MAX_THREADS)
        # A connection has one request at a time, so there are few of these jobs.
        self.routes = Routes(owner, registered, self.movers.submit_at_once)

    def start(
        self,
        parts: Sequence[ReadWriteOp | AtomicOp],
        keep: Any,
        timeout: float | None,
        result: Callable[[], Any] = nothing,
    ) -> Future[Any]:
        """Start all parts. Return a Future of ``result()``. ``keep`` holds the memory of the local addresses.

        Raises RDMAError if no route exists.
        """
        routed = [(part, self.routes.to(part.handle)) for part in parts]
        record = recording.begin(routed)
        if len(routed) == 1:
            part, route = routed[0]
            nics = of_nics(route)
            if nics is None and _is_quick(part, route):
                return self._at_once(part, route, keep, timeout, result, record)
            if nics is not None and timeout is None:
                single = self.single(part, nics, keep, result, record=record)
                if single is not None:
                    return single
        else:
            routed, keep = gathered(routed), Kept(keep or ())
        self.guard()
        transfer = Transfer(self, len(routed), keep, timeout, result, record=record)
        if all(_is_quick(part, route) for part, route in routed):
            for part, route in routed:
                transfer.run(part, route)
            return transfer.future
        transfer.watch()
        for number, (part, route) in enumerate(routed):
            if transfer.start_async(number, part, as_async_route(route)):
                continue
            if transfer.queue(number):
                self.movers.submit(lambda n=number, p=part, r=route: transfer.run_queued(n, p, r))  # type: ignore[misc]
        return transfer.future

    def single(
        self,
        part: ReadWriteOp | AtomicOp,
        route: NicRoute,
        keep: Any,
        result: Callable[[], T],
        plan: Any = None,
        record: recording.Record | None = None,
    ) -> Future[T] | None:
        """Start one part by NICs on the caller's thread.

        Return None if it needs another thread. ``plan``: from the route, if it has one.
        """
        self.guard()
        future = SingleFuture(self, part, route, keep, result, record)
        if plan is None:
            in_flight = route.begin(part, None, keep, future.landed)
        else:
            in_flight = route.begin_planned(part, plan, future.landed)
        return None if in_flight is None else future.flies(in_flight)

    def is_gone(self, token: str) -> bool:
        """Return whether the process has ended earlier: its end is not reported again."""
        peer = self.program.router.peers.get(token)
        return peer is not None and peer.gone is not None

    def taking_over(
        self,
        future: TransferFuture[Any],
        part: ReadWriteOp | AtomicOp,
        in_flight: InFlightTransfer | None,
        keep: Any,
        result: Any,
        record: recording.Record | None,
    ) -> Transfer:
        made = Transfer(self, 1, keep, None, result, future, record)
        made.watch()
        made.adopt(part, in_flight)
        return made

    def guard(self) -> None:
        """Defer Ctrl-C until after the start of a transfer, also before the first wait."""
        interrupts = self.program.interrupts
        if threading.get_ident() == interrupts.main:
            interrupts.guard()

    def at_once(self, handle: Handle, write: bool, memory: LocalMemory, nbytes: int) -> bool:
        """Run a small copy on this host now, because a future would cost more than the copy.

        Return False if `start` has to run it. `start` also reports errors.
        """
        if nbytes > INLINE_MAX_BYTES or handle.token not in self.routes.reached:
            return False
        record = None if nbytes < recording.MIN_BYTES else recording.begin_copy(SameHost.name, handle, write, nbytes)
        native = self.registry.native
        is_done: bool = native.at_once(handle.token, handle.ticket, write, handle.offset, memory.address, nbytes)
        if is_done and record is not None:
            record.end(None)
        return is_done

    def again(
        self, parts: Sequence[ReadWriteOp | AtomicOp], memories: Sequence[LocalMemory]
    ) -> Callable[[float | None], Future[None] | None] | None:
        """Return a function that repeats these parts, as `start` would, while the memory stays where it is.

        The function takes a timeout. It returns None if it can't repeat them any more. `again` itself returns None if
        repeating saves nothing. ``memories``: the local memory of each part, which has one segment.
        """
        copies = self._copies(parts, memories)
        if copies is not None:
            run, first = copies.run, parts[0]
            nbytes = sum(memory.nbytes for memory in memories)
            recorded = first if nbytes >= recording.MIN_BYTES and isinstance(first, ReadWriteOp) else None

            def copy_again(timeout: float | None) -> Future[None] | None:
                if timeout is not None and timeout <= 0:
                    return None
                record = None
                if recorded is not None:
                    record = recording.begin_copy(SameHost.name, recorded.handle, recorded.write, nbytes)
                if not run():
                    return None
                if record is not None:
                    record.end(None)
                return DoneFuture()

            return copy_again
        if len(parts) != 1 or not isinstance(parts[0], ReadWriteOp):
            return None
        part, keep = parts[0], tuple(memories)
        route = of_nics(self.routes.to(part.handle))
        plan = None if route is None else route.planned(part, keep)
        if route is None or plan is None:
            return None

        def repeat(timeout: float | None) -> Future[None] | None:
            if timeout is not None:
                return None
            return self.single(part, route, keep, nothing, plan, recording.begin(((part, route),)))

        return repeat

    def _copies(self, parts: Sequence[ReadWriteOp | AtomicOp], memories: Sequence[LocalMemory]) -> Any:
        """Return a native Copies that repeats many `at_once` copies. None if one of them is unsuitable."""
        copies = []
        for part, memory in zip(parts, memories, strict=True):
            if not isinstance(part, ReadWriteOp) or part.handle.token not in self.routes.reached:
                return None
            # memory that is held can't be resized between two submits
            if memory.device != CPU or memory.hold is not None:
                return None
            (segment,) = part.segments
            copies.append((part.handle.token, part.handle.ticket, part.write, *segment))
        if sum(copy[-1] for copy in copies) > INLINE_MAX_BYTES:
            return None
        return _native.Copies(self.registry.native, copies)

    def _at_once(
        self,
        part: ReadWriteOp | AtomicOp,
        route: Route,
        keep: Any,
        timeout: float | None,
        result: Callable[[], Any],
        record: recording.Record | None,
    ) -> Future[Any]:
        """Run a part on a route that is quick. Nothing waits for it, so it needs no locks or events."""
        ended = run_part(part, route, cancel_scope(timeout), keep)
        if ended.outcome == DONE:
            if record is not None:
                record.end(None)
            return Future.of(result())
        transfer = Transfer(self, 1, keep, timeout, result, record=record)
        transfer.end_with(part.handle, ended)
        return transfer.future

    def change(self, change: AtomicOp, timeout: float | None) -> Future[int]:
        found: list[int] = []
        return self.start((change._replace(take=found.append),), None, timeout, lambda: found[0])

    def on_process_lost(self, peer: Peer) -> None:
        """Forget a process that has ended. Transfers in progress detect the end themselves."""
        if self.routes.knows(peer.token):
            self.program.run_in_thread(lambda: self.routes.forget(peer.token))

    def close(self) -> None:
        self.routes.close()

    def abandon(self) -> None:
        self.routes.abandon()

    def drop(self, handle: Handle) -> None:
        if handle.token == self.program.router.token:
            self.registry.drop(handle.ticket)
        else:
            refuse_the_parents(handle)
            self.program.router.tell(self.program.router.peer(handle.token), Setting(DROP, handle.ticket))


def _is_quick(part: ReadWriteOp | AtomicOp, route: Route) -> bool:
    if isinstance(part, AtomicOp):
        return route.completes_inline(part.handle, 8, True)
    return route.completes_inline(part.handle, sum(segment[2] for segment in part.segments), False)


TOPICS.update(
    {
        "ways": lambda *_: msgspec.msgpack.encode(engine().routes.ways()),
        "verbs": lambda _, peer, offer: engine().routes.verbs.accept(peer, offer),
        "refusal": lambda _, __, question: refusal_of(registry(), question),
        cuda_ipc.TOPIC: lambda _, __, question: cuda_ipc.answer(registry(), question),
        gpu_staged.TOPIC: lambda _, peer, question: gpu_staged.answer(engine().routes.lender, peer.token, question),
    }
)


def engine() -> Engine:
    runtime: Any = program()
    found: Engine = runtime.extensions.extend(Engine, lambda: Engine(runtime, registry()))
    return found


def after(
    last: TransferPlanCache | None, mover: Engine, part: ReadWriteOp, local: Any, memory: LocalMemory
) -> TransferPlanCache | None:
    """Return the cache to keep after NICs have started a transfer that ``last`` did not start."""
    if last is not None and last.is_of(local):
        last.learn(mover, part, memory)
        return last
    # GPU memory needs more checks in each transfer.
    return TransferPlanCache(local) if isinstance(local, torch.Tensor) and memory.device == CPU else None


class TransferPlanCache:
    """Plan of the reads, or of the writes, of a buffer and one tensor, on a NIC route.

    Planning takes longer than many transfers. The second transfer stores the plan, and the third one uses it. It holds
    the address of the tensor's memory, the result of its checks, and the work requests. It keeps neither the tensor nor
    its memory alive.
    """

    __slots__ = ("_known", "_local")

    def __init__(self, local: torch.Tensor) -> None:
        self._local = weakref.ref(local)
        self._known: tuple[Any, ...] | None = None  # one object, because several threads may read into one tensor

    def is_of(self, local: Any) -> bool:
        return self._local() is local

    def learn(self, mover: Engine, part: ReadWriteOp, memory: LocalMemory) -> None:
        route = of_nics(mover.routes.to(part.handle))
        plan = None if route is None else route.planned(part, (memory,))
        if route is not None and plan is not None:
            storage = weakref.ref(memory.keep)
            self._known = mover, route, part, plan.over(()), storage, memory.address, memory.nbytes

    def start(self, mover: Engine, local: Any) -> Future[None] | None:
        """Start the transfer. Return None if a full check is necessary, which also reports errors."""
        known = self._known
        if known is None or not self.is_of(local):
            return None
        learnt_from, route, part, plan, storage_of, address, nbytes = known
        storage = storage_of()
        if storage is None or learnt_from is not mover:
            return None
        # The tensor may have other memory since then (`data`, `set_`), less (`resize_`), or be a lazy view now.
        if local.untyped_storage() is not storage or local.data_ptr() != address or local.nbytes != nbytes:
            return None
        start, size = storage.data_ptr(), storage.nbytes()
        if address + nbytes > start + size or not local.is_contiguous() or local.is_conj() or local.is_neg():
            return None
        plan = plan.over((Allocation(start, size, storage),))
        record = recording.begin(((part, route),))
        begun: Future[None] | None = mover.single(part, route, (storage,), nothing, plan, record)
        return begun


__all__ = ["AtomicOp", "Engine", "ReadWriteOp", "TransferFuture", "engine"]
