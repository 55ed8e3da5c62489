"""Groups of ranks on several hosts: shared memory inside each host, messages of the group's Gloo between hosts.

A `Hierarchy` is a `SharedMemory` whose operations are made of stages. The compiled core moves and reduces what stays on
the host. Ranks of different hosts exchange only what must cross, each by itself. Where all hosts have equally many
ranks, ranks with the same place on their hosts work together and share the load (`_even`). Otherwise the first rank of
each host exchanges messages for the others.

| operation | inside the host | between hosts |
| --- | --- | --- |
| all_reduce, small or uneven hosts | reduce to the first, broadcast from it | the first ranks, everything |
| all_reduce, large | reduce_scatter, all_gather; overlaps with the other column | each rank its slice: 1/local size |
| reduce, broadcast | to or from the root's place | one copy for each host; broadcast as a tree of hosts |
| reduce_scatter | one for each host | each rank what its counterpart wants |
| all_gather | one for each host | each rank its own piece, once for each host |
| gather, scatter, all_to_all | what stays | directly from rank to rank, because no stage would save bytes |
| barrier | twice | the first ranks, one byte |

Sums add the ranks of each host in their order, then the hosts in the order of their first ranks. So all ranks have the
same bits, on every run. 16-bit and 8-bit floats are added in float32 and rounded once on each host and once between
hosts. Their mean is a mean of the hosts' means, which can't overflow. Every other mean is the sum divided once.

_bootstrap.py finds which ranks share a host. _work_queue.py orders operations. reduction.py has the arithmetic
between hosts, inter_host.py messages and failures.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from monarch_backend._telemetry import payloads, recorder
from monarch_backend._telemetry.kinds import Kind, State, Status
from monarch_backend.process_group import _c10d_internals, _cpu_validation
from monarch_backend.process_group._collective_specs import (
    ALL_GATHER,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    OPERATIONS,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from monarch_backend.process_group._hierarchical import line_requests
from monarch_backend.process_group._hierarchical.inter_host import (
    Cause,
    CollectiveCall,
    GroupFailure,
    InterHostComm,
    Posted,
)
from monarch_backend.process_group._hierarchical.line_requests import Line
from monarch_backend.process_group._hierarchical.reduction import combine, op_on_host
from monarch_backend.process_group._rdma.p2p import RdmaP2P
from monarch_backend.process_group._shm import shm_backend
from monarch_backend.process_group._shm.shm_backend import SharedMemory, ShmWork
from monarch_backend.process_group._work_queue import OperationQueue

SLICE_MIN_BYTES = 128 << 10  # bytes from which a host's ranks share an all_reduce; below, latency decides
SEGMENT_BYTES = 8 << 20  # bytes of an all_reduce in flight between hosts while the next ones are reduced on the host
TWO_STEPS_FROM = 64 << 10  # bytes from which three or more hosts reduce a part each, and then gather the parts

_HEADER = 160  # bytes with which the ranks of a host compare their calls
# A stage inside a host waits this much longer than one between hosts, whose error names the late rank.
_GRACE_S = 2.0


@_c10d_internals.hide_from_dynamo
class Hierarchy(SharedMemory):
    """Group of ranks on several hosts; ``hosts`` lists the ranks of each, ``memory`` is the core's group on this host.

    ``gloo`` carries messages between hosts, ``rdma_p2p`` the large ones where there are NICs. ``store`` holds the first
    cause of a failure.
    """

    has_fast_paths = False
    moves = _cpu_validation.REDUCIBLE  # messages between hosts are Gloo's
    knows_lines = False
    sends = False  # Gloo does point to point, because a receive from any rank may match either side

    def __init__(
        self,
        memory: Any,
        members: Sequence[str],
        rank: int,
        timeout: Callable[[], timedelta],
        hosts: Sequence[Sequence[int]],
        gloo: Any,
        rdma_p2p: RdmaP2P | None,
        store: Store,
    ) -> None:
        self._turns = OperationQueue(f"monarch_hosts_{rank}")
        super().__init__(self._turns, None, members, rank, timeout)
        self._memory = memory
        self._hosts = [tuple(host) for host in hosts]
        self._between = InterHostComm(gloo, rdma_p2p, store, rank, self._hosts, self._break)
        self._host = next(h for h, host in enumerate(self._hosts) if rank in host)
        self._here = self._hosts[self._host]
        self._place = self._here.index(rank)
        self._sizes = [len(host) for host in self._hosts]
        self._even = len(set(self._sizes)) == 1
        self._leaders = tuple(host[0] for host in self._hosts)
        self._column = tuple(host[self._place] for host in self._hosts) if self._even else self._leaders
        self._said = torch.zeros(len(self._here) + 1, _HEADER, dtype=torch.uint8, device="cpu")
        self._scratch: dict[int, Tensor] = {}
        self._cell = 0  # in recordings
        self._release_cell: Callable[[], object] = lambda: None
        self._begun, self._is_under_way = 0, False  # number of the last operation
        self._late_line: str | None = None  # None: not looked for
        self._store = store
        self._cause: Cause | None = None
        self._reason = ""  # why this rank leaves
        self._breaking = threading.Lock()
        self.lost_host: Callable[[], Cause | None] = lambda: None  # set by the group, see _host_guard.py

    @property
    def waiting_thread(self) -> int:
        """0: collectives run on a thread of the group, also if another one waits for them."""
        return 0

    def record_as(self, name: str, identity: int) -> None:
        """Record operations as those of the whole group: the core does not record their stages on this host."""
        self._identity = identity
        self._cell = recorder.take_cell(Kind.COLLECTIVE, name, self._rank, identity)
        self._release_cell = release = weakref.finalize(self, recorder.release_cell, self._cell)
        release.atexit = False
        line_requests.requests.add(identity, self, self._store, self._members[self._rank])

    # Life of an operation --------------------------------------------------------------------------------------

    def _run(
        self,
        collective: int,
        piece: Tensor,
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        opts: Any,
        outputs: list[Tensor],
        *,
        op: int = shm_backend._MOVES,
        root: int = -1,
        finish: Callable[[], object] | None = None,
    ) -> ShmWork:
        """Run an operation as `SharedMemory` does: in this thread, unless the call is asynchronous."""
        self._turns.sequence += 1
        text = _describe(collective, piece, op, root)
        op_here, seconds = op_on_host(op, piece.dtype), self._seconds(opts)
        call = CollectiveCall(collective, text, self._turns.sequence, op, op_here, root, list(ins), list(outs), seconds)
        work = ShmWork(self, outputs, finish)
        if getattr(opts, "asyncOp", True):
            work._lock, work._keep = threading.RLock(), (ins, outs)
            work._operation = self._turns.start(lambda: self._carry_out(call), work.ended)
            return work
        failure = self._turns.run(lambda: self._carry_out(call))
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # an interrupt
        if failure is not None:
            work._error = self.error(failure)  # raised by wait(), so that hooks see a failed work as well
        elif finish is not None:
            work._end()
        return work

    def _carry_out(self, call: CollectiveCall) -> None:
        if self._cause is not None:
            raise GroupFailure(*self._cause, is_cause=False)
        try:
            # Scratch memory is used by later operations too, so the caller's inference mode must not mark it.
            with torch.inference_mode(False), self._between.watched(call), self._recorded(call):
                call.owners = [*call.ins, *call.outs]
                call.ins, call.outs = [_memory(t) for t in call.ins], [_memory(t) for t in call.outs]
                self._agree(call)
                _ALGORITHMS[call.what](self, call)
        except GroupFailure as failure:
            broken = self._break(failure)
            self._find_line()
            raise broken from None
        except BaseException as error:  # a bug, no memory, an interrupt: the other ranks must not wait for this one
            self._break(GroupFailure("dead", self._rank, f"failed in {call.text}: {error!r}", is_cause=True))
            raise

    @contextlib.contextmanager
    def _recorded(self, call: CollectiveCall) -> Iterator[None]:
        """Record that the operation is under way in this context, and how it ends."""
        operation = recorder.name_number(OPERATIONS[call.what].name)
        tensors = *call.ins[:1], *call.outs[:1]
        size = max((each.nbytes for each in tensors), default=0)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        payload = payloads.encode(dtype, payloads.Route.SHM_GLOO)
        recorder.begin_activity(self._cell, State.RUNNING, operation, call.number, payload, size, self._identity)
        status, self._begun, self._is_under_way = Status.ERROR, call.number, True
        try:
            yield
            status = Status.OK
        finally:
            self._is_under_way = False
            recorder.end_activity(self._cell, status)

    def error(self, failure: Any) -> Exception:
        if isinstance(failure, GroupFailure):
            return super().error(failure.cause)
        return failure if isinstance(failure, Exception) else RuntimeError(repr(failure))

    def _line_of(self, _rank: int) -> str:
        return self._late_line or ""

    def _find_line(self) -> None:
        """Find the lines of late ranks once for all errors of the group. A rank's host is asked for those of its ranks.

        The rank in the error may wait itself for another one of its host.
        """
        kind, rank, text = self._cause or ("", -1, "")
        if self._late_line is not None or kind != "late" or rank < 0 or not text.startswith("did not "):
            return
        self._late_line, lines = "", list[Line]()
        if rank in self._here:
            lines = self.late_lines()
        elif self._between.has_recorded_cause:  # otherwise the store would not answer this request either
            limit = max(1.0, self._timeout().total_seconds())
            lines = line_requests.requests.ask(self._members[rank], self._identity, limit)
        for each, line in lines:
            subject = "it" if each == rank else f"rank {each} ({self._members[each]}) has not: it"
            self._late_line += f"; {subject} is {line}"

    def late_lines(self) -> list[Line]:
        """Return the late ranks of this host, and their lines. May be called on another thread.

        It is this one, unless it is in the operation itself or has failed there.
        """
        from monarch_backend._telemetry import late_ranks

        if not self._is_under_way and self._cause is None:
            line = self._line_here(self._rank)
            return [(self._rank, line)] if line else []
        return [each for each in late_ranks.behind(self._identity, self._begun) if each[0] in self._here]

    def _break(self, failure: GroupFailure) -> GroupFailure:
        """End the group for all ranks, and return the cause that all of them raise."""
        if not failure.is_cause and (lost := self.lost_host()) is not None:
            return self.lose(lost)
        with self._breaking:
            if self._cause is None:
                self._cause = self._between.first_cause(failure)
                self._disconnect()
        return GroupFailure(*self._cause, is_cause=False)

    def lose(self, cause: Cause) -> GroupFailure:
        """End the group, with a cause that each rank finds by itself: the store may be on the host that was lost."""
        with self._breaking:
            if self._cause is None:
                self._cause = cause
                self._between.links.close()  # first: the core may be in an operation that waits for another rank
                self._disconnect()
        return GroupFailure(*self._cause, is_cause=False)

    def _leave(self, text: str) -> None:
        """Record that this rank left, as the cause of the group's end on all hosts."""
        self._cause = ("closed", self._rank, "closed the group")
        self._between.first_cause(GroupFailure("left", self._rank, text, is_cause=True))

    def _disconnect(self) -> None:
        """Fail the ranks that wait for this one: by a mismatched operation on this host, else by closing links."""
        if len(self._here) > 1:
            self._core(0.0, BARRIER, shm_backend._BYTES, shm_backend._MOVES, -1, 0, [], [])
        self._between.links.close()

    def set_reason(self, reason: str) -> None:
        self._reason = reason
        self._memory.set_reason(reason)

    def tell_end(self, reason: str) -> None:
        """Publish why this process will end with the group alive, also to the other hosts."""
        self.set_reason(reason)
        with self._breaking:
            if self._cause is None:
                self._leave(f"{reason}, and ended")

    def close(self) -> None:
        with self._breaking:
            if self._cause is None:
                begin = f"{self._reason}, and " if self._reason else ""
                if not self._turns.idle():
                    self._leave(f"{begin}closed the group while an operation was under way")
                    self._disconnect()
                elif self._reason:  # the links stay open, because others may still read what this rank sent
                    self._leave(f"{begin}closed the group")
                self._cause = ("closed", self._rank, "closed the group")
        line_requests.requests.remove(self._identity)
        self._cell = 0
        self._release_cell()
        self._memory.close()
        self._between.close()
        self._turns.stop()

    # Inside the host -------------------------------------------------------------------------------------------

    def _agree(self, call: CollectiveCall) -> None:
        """Wait until every rank of this host has called an operation, and check that they called the same one."""
        if len(self._here) == 1:
            return
        said = call.text.encode()[: _HEADER - 12] + b" #%08x" % zlib.crc32(call.text.encode())
        mine, theirs = self._said[0], list(self._said[1:].unbind())
        mine.zero_()
        mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        self._local(call, ALL_GATHER, [mine], theirs, first=True)
        if any(not torch.equal(other, mine) for other in theirs):
            calls = (bytes(other.tolist()).rstrip(b"\0").decode(errors="replace")[:-10] for other in theirs)
            told = "; ".join(f"rank {rank} called {text}" for rank, text in zip(self._here, calls, strict=True))
            text = f"the ranks disagree about operation {call.number} of the group, which ends it: {told}"
            raise GroupFailure("mismatch", -1, text, is_cause=True)

    def _local(
        self,
        call: CollectiveCall,
        what: int,
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        *,
        op: int = shm_backend._MOVES,
        root: int = -1,
        first: bool = False,
    ) -> None:
        """Run one operation of the core on this host; ``root`` is a place on it."""
        piece = ins[0] if ins else outs[0]
        code = shm_backend._DTYPES.get(piece.dtype, shm_backend._BYTES)
        size = 0 if what == ALL_TO_ALL else piece.nbytes
        seconds = call.left() + (0.0 if first else _GRACE_S)
        failure = self._core(seconds, what, code, op, root, size, shm_backend._spans(ins), shm_backend._spans(outs))
        if failure is not None:
            raise self._seen_here(call, *failure)

    def _seen_here(self, call: CollectiveCall, kind: str, place: int, text: str) -> GroupFailure:
        """Return the core's failure in terms of ranks, not places; a rank that gave up is not blamed."""
        if kind == "mismatch" or "gave up" in text:  # all ranks had agreed: it is the operation of `_disconnect`
            kind = "left" if call.left() else "late"
            return GroupFailure(kind, -1, f"another rank of this host gave up on {call.text}", is_cause=False)
        rank = self._here[place] if place >= 0 else -1
        return GroupFailure(kind, rank, self._in_ranks(text, call), is_cause=kind != "late" or not call.left())

    def _core(self, seconds: float, *operation: Any) -> Any:
        failed = self._memory.run(*operation, float, seconds)
        return None if failed is None else failed.failure

    def _in_ranks(self, text: str, call: CollectiveCall) -> str:
        """Return the core's text with ranks for places, and the operation for its stages."""
        text = re.sub(r"\brank (\d+)", lambda found: f"rank {self._here[int(found[1])]}", text)
        return re.sub(r"\b(?:barrier\b|[a-z]+_?[a-z_]*\([^()]*\))", call.text, text)

    def _room(self, like: Tensor, count: int, key: int = 0) -> list[Tensor]:
        """Return ``count`` tensors like this one in kept memory: fresh pages cost more than the copy into them."""
        width = -(-like.nbytes // 64) * 64
        kept = self._scratch.get(key)
        if kept is None or kept.numel() < width * count:
            kept = torch.empty(width * count, dtype=torch.uint8, device="cpu")
            if kept.numel() <= 4 * SEGMENT_BYTES:
                self._scratch[key] = kept
        rows = [kept[i * width : i * width + like.nbytes] for i in range(count)]
        return [row.view(like.dtype) for row in rows]

    # All-reduce ------------------------------------------------------------------------------------------------

    def _all_reduce(self, call: CollectiveCall) -> None:
        (x,) = call.outs
        if call.ins[0].data_ptr() != x.data_ptr():
            x.copy_(call.ins[0])
        # Every rank makes the same choice, because it depends only on what they have agreed on.
        share = len(self._here)
        if self._even and share > 1 and x.nbytes >= SLICE_MIN_BYTES and x.numel() >= share * share:
            self._all_reduce_slices(call, x)
            return
        self._local(call, REDUCE, [x], [x], op=call.op_here, root=0)
        if self._place == 0:
            self._end_between(call, x, self._begin_between(call, "between", x, self._leaders), self._leaders)
        self._local(call, BROADCAST, [x], [x], root=0)

    def _all_reduce_slices(self, call: CollectiveCall, x: Tensor) -> None:
        """All-reduce in slices, one per rank. While a segment is in flight between hosts, the next one is reduced."""
        before: tuple[_Slices, _Sum] | None = None
        step = max(1, SEGMENT_BYTES // x.element_size())
        parts = list(torch.split(x, step))
        if len(parts) > 1 and parts[-1].numel() < len(self._here) ** 2:
            parts[-2:] = [x[(len(parts) - 2) * step :]]  # too short to share
        for turn, part in enumerate(parts):
            slices = _Slices(part, len(self._here), self._place)
            self._local(call, REDUCE_SCATTER, slices.pieces, [slices.mine], op=call.op_here)
            under_way = self._begin_between(call, f"segment {turn}", slices.valid, self._column, turn % 2)
            if before is not None:
                self._finish_slices(call, *before)
            before = slices, under_way
        if before is not None:
            self._finish_slices(call, *before)

    def _finish_slices(self, call: CollectiveCall, slices: _Slices, under_way: _Sum) -> None:
        self._end_between(call, slices.valid, under_way, self._column)
        self._local(call, ALL_GATHER, [slices.mine], slices.pieces)
        slices.write_back()

    def _begin_between(self, call: CollectiveCall, stage: str, x: Tensor, ranks: Sequence[int], key: int = 0) -> _Sum:
        """Begin to reduce ``x`` over ``ranks``, one of each host."""
        me = ranks.index(self._rank)
        at_once = len(ranks) == 2 or x.nbytes < TWO_STEPS_FROM
        cuts = [x] * len(ranks) if at_once else list(x.tensor_split(len(ranks)))
        room = self._room(cuts[me], len(ranks), key)
        sends = [(rank, cuts[h]) for h, rank in enumerate(ranks) if h != me]
        receives = [(rank, room[h]) for h, rank in enumerate(ranks) if h != me]
        return _Sum(stage, cuts, room, self._between.post(call, stage, sends, receives))

    def _end_between(self, call: CollectiveCall, x: Tensor, under_way: _Sum, ranks: Sequence[int]) -> None:
        me = ranks.index(self._rank)
        cuts, mine = under_way.cuts, under_way.cuts[me]
        self._between.wait(call, under_way.posted)
        under_way.room[me] = mine
        combine(under_way.room, mine, call.op, self._sizes)
        if mine is not x:
            others = [(h, rank) for h, rank in enumerate(ranks) if h != me]
            sends, receives = [(rank, mine) for _, rank in others], [(rank, cuts[h]) for h, rank in others]
            self._between.exchange(call, f"{under_way.stage}, parts", sends, receives)

    # The others ------------------------------------------------------------------------------------------------

    def _barrier(self, call: CollectiveCall) -> None:
        if self._place == 0:
            others = [rank for rank in self._leaders if rank != self._rank]
            byte, *room = self._room(_BYTE, len(others) + 1)
            self._between.exchange(call, "all here", [(r, byte) for r in others], list(zip(others, room, strict=True)))
        self._local(call, BARRIER, [_BYTE[:0]], [])

    def _agents(self, rank: int) -> tuple[int, ...]:
        """Return one rank of each host for data that begin or end at ``rank``: those with its place if possible."""
        place = next(host.index(rank) for host in self._hosts if rank in host)
        return tuple(host[place] for host in self._hosts) if self._even else self._leaders

    def _reduce(self, call: CollectiveCall) -> None:
        agents = self._agents(call.root)
        agent = agents[self._host]
        at_root = call.root in self._here
        (x,) = call.outs
        result = x if self._rank == call.root else self._room(x, 1)[0]
        self._local(call, REDUCE, [call.ins[0]], [result], op=call.op_here, root=self._here.index(agent))
        if agent == self._rank and not at_root:
            target = next(a for a, host in zip(agents, self._hosts, strict=True) if call.root in host)
            self._between.exchange(call, "to the root", [(target, result)], [])
        elif agent == self._rank:
            room = self._room(x, len(agents), 1)
            self._between.exchange(call, "to the root", [], [(a, room[h]) for h, a in enumerate(agents) if a != agent])
            room[self._host] = result
            combine(room, result, call.op, self._sizes)
        if at_root and agent != call.root:
            self._local(call, BROADCAST, [result], [result], root=self._here.index(agent))

    def _broadcast(self, call: CollectiveCall) -> None:
        agents = self._agents(call.root)
        agent = agents[self._host]
        (x,) = call.outs
        home = next(h for h, host in enumerate(self._hosts) if call.root in host)
        at_root = home == self._host
        if at_root and agent != call.root:
            self._local(call, BROADCAST, [x], [x], root=self._here.index(call.root))
        posted: Posted = []
        if agent == self._rank:
            parent, children = _tree((self._host - home) % len(self._hosts), len(self._hosts))
            at = [agents[(node + home) % len(self._hosts)] for node in (parent, *children)]
            if not at_root:
                self._between.exchange(call, "tree", [], [(at[0], x)])
            posted = self._between.post(call, "tree", [(rank, x) for rank in at[1:]], [])
        if not at_root or agent == call.root:
            self._local(call, BROADCAST, [x], [x], root=self._here.index(agent))
        self._between.wait(call, posted)

    def _all_gather(self, call: CollectiveCall) -> None:
        (x,), outs = call.ins, call.outs
        others = [host for host in self._hosts if host != self._here]
        posted: Posted = []
        if self._even:
            column = [host[self._place] for host in others]
            posted = self._between.post(call, "column", [(r, x) for r in column], [(r, outs[r]) for r in column])
        self._local(call, ALL_GATHER, [x], [outs[rank] for rank in self._here])
        if not self._even and self._place == 0:
            sends = [(host[0], outs[rank]) for host in others for rank in self._here]
            posted = self._between.post(
                call, "leaders", sends, [(host[0], outs[rank]) for host in others for rank in host]
            )
        self._between.wait(call, posted)
        for host in others:
            if self._even:
                self._local(call, ALL_GATHER, [outs[host[self._place]]], [outs[rank] for rank in host])
            else:
                for rank in host:
                    self._local(call, BROADCAST, [outs[rank]], [outs[rank]], root=0)

    def _reduce_scatter(self, call: CollectiveCall) -> None:
        (out,) = call.outs
        if not self._even:
            self._reduce_scatter_by_leaders(call, out)
            return
        others = [h for h in range(len(self._hosts)) if h != self._host]
        parts, partial = self._room(out, len(self._hosts), 0), self._room(out, len(self._hosts), 1)
        posted = self._between.post(call, "column", [], [(self._column[h], parts[h]) for h in others])
        for h in (*others, self._host):
            pieces = [call.ins[rank] for rank in self._hosts[h]]
            self._local(call, REDUCE_SCATTER, pieces, [partial[h]], op=call.op_here)
            if h != self._host:
                posted += self._between.post(call, "column", [(self._column[h], partial[h])], [])
        self._between.wait(call, posted)
        parts[self._host] = partial[self._host]
        combine(parts, out, call.op, self._sizes)

    def _reduce_scatter_by_leaders(self, call: CollectiveCall, out: Tensor) -> None:
        """Send all pieces to the first rank of each host, which gets its host's pieces from the other first ranks."""
        sizes = [out.numel() * len(host) for host in self._hosts]
        whole = torch.cat([call.ins[rank] for host in self._hosts for rank in host])
        self._local(call, REDUCE, [whole], [whole], op=call.op_here, root=0)
        rows = list(torch.split(whole, sizes))
        mine = rows[self._host]
        if self._place == 0:
            parts = self._room(mine, len(rows))
            others = [h for h in range(len(rows)) if h != self._host]
            receives = [(self._leaders[h], parts[h]) for h in others]
            self._between.exchange(call, "leaders", [(self._leaders[h], rows[h]) for h in others], receives)
            parts[self._host] = mine
            combine(parts, mine, call.op, self._sizes)
        pieces = list(torch.split(mine, [out.numel()] * len(self._here)))
        self._local(call, SCATTER, pieces if self._place == 0 else [], [out], root=0)

    def _gather(self, call: CollectiveCall) -> None:
        (x,), outs = call.ins, call.outs
        if call.root not in self._here:
            self._between.exchange(call, "to the root", [(call.root, x)], [])
            return
        receives = [(rank, outs[rank]) for rank in self._elsewhere()] if self._rank == call.root else []
        posted = self._between.post(call, "to the root", [], receives)
        rows = [outs[rank] for rank in self._here] if self._rank == call.root else []
        self._local(call, GATHER, [x], rows, root=self._here.index(call.root))
        self._between.wait(call, posted)

    def _scatter(self, call: CollectiveCall) -> None:
        ins, (out,) = call.ins, call.outs
        if call.root not in self._here:
            self._between.exchange(call, "from the root", [], [(call.root, out)])
            return
        sends = [(rank, ins[rank]) for rank in self._elsewhere()] if self._rank == call.root else []
        posted = self._between.post(call, "from the root", sends, [])
        rows = [ins[rank] for rank in self._here] if self._rank == call.root else []
        self._local(call, SCATTER, rows, [out], root=self._here.index(call.root))
        self._between.wait(call, posted)

    def _all_to_all(self, call: CollectiveCall) -> None:
        ins, outs = call.ins, call.outs
        sends, receives = ([(rank, side[rank]) for rank in self._elsewhere()] for side in (ins, outs))
        posted = self._between.post(call, "rank to rank", sends, receives)
        self._local(call, ALL_TO_ALL, [ins[rank] for rank in self._here], [outs[rank] for rank in self._here])
        self._between.wait(call, posted)

    def _elsewhere(self) -> Iterator[int]:
        return (rank for rank in range(self._size) if rank not in self._here)


_ALGORITHMS: list[Callable[[Hierarchy, CollectiveCall], None]] = [
    getattr(Hierarchy, f"_{name}") for name, *_ in OPERATIONS
]
"""Indexed by the number of the operation."""


@dataclass
class _Sum:
    """Reduction in progress between hosts: the piece of each host, and the buffers for other hosts' parts of mine."""

    stage: str
    cuts: list[Tensor]
    room: list[Tensor]
    posted: Posted


class _Slices:
    """A vector in equal pieces, one for each rank of a host; the last is a padded copy if the vector ends within it."""

    def __init__(self, x: Tensor, share: int, place: int) -> None:
        width = -(-x.numel() // share)
        self.pieces = list(torch.split(x, width))
        self._short = self.pieces[-1]
        if self._short.numel() < width:
            self.pieces[-1] = self._short.new_zeros(width)
            self.pieces[-1][: self._short.numel()] = self._short
        self.mine = self.pieces[place]
        self.valid = self.mine[: self._short.numel()] if place == share - 1 else self.mine

    def write_back(self) -> None:
        if self._short.numel() < self.pieces[-1].numel():
            self._short.copy_(self.pieces[-1][: self._short.numel()])


def _tree(node: int, nodes: int) -> tuple[int, list[int]]:
    """Return the parent and children of ``node`` in a binomial tree with root 0; the largest subtree first."""
    lowest = node & -node if node else 1 << (nodes - 1).bit_length()
    steps = [1 << k for k in reversed(range(lowest.bit_length() - 1))]
    return node & (node - 1), [node + step for step in steps if node + step < nodes]


def _describe(collective: int, piece: Tensor, op: int, root: int) -> str:
    if collective == BARRIER:
        return "barrier"
    parts = [str(piece.dtype).removeprefix("torch.")]
    if collective != ALL_TO_ALL:
        parts.append(f"{piece.numel()} elements")
    if op != shm_backend._MOVES:
        parts.append(_OP_NAMES[op])
    if root >= 0:
        parts.append(f"root {root}")
    return f"{OPERATIONS[collective].name}({', '.join(parts)})"


_OP_NAMES = {code: name for name, code in shm_backend._OPS.items()}
_BYTE = torch.zeros(1, dtype=torch.uint8, device="cpu")


def _memory(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as a vector without autograd, inference mode or subclass."""
    if tensor.nbytes == 0:
        return torch.empty(0, dtype=tensor.dtype, device="cpu")
    raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=torch.uint8).view(tensor.dtype)
