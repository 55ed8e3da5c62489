"""Messages between the hosts of a group over its Gloo, and the propagation of failures.

Every rank that fails closes its links. Ranks that wait for it then fail at once, and so on from host to host. All ranks
raise the first cause. The rank that detected it has written it to the group's store.

hierarchical_backend.py decides what is sent, and what happens inside a host.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from monarch_backend._core import fork
from monarch_backend._core.limits import start_thread, within
from monarch_backend.process_group import _c10d_internals, _gloo_links
from monarch_backend.process_group._rdma.p2p import RdmaP2P
from monarch_backend.process_group._rdma.p2p_protocol import FIRST_STAGE_TAG

Mail = Sequence[tuple[int, Tensor]]  # (rank, tensor) pairs to send or to receive
Posted = list[tuple[Callable[[timedelta], object], int]]  # the waits, and the other ranks
Cause = tuple[str, int, str]  # kind of failure, failed rank or -1, text; as in the compiled core

_CAUSE_TIMEOUT_S = 0.1  # ranks that see effects of a failure let the rank that detected it publish it first
_STORE_TIMEOUT_S = 1.0  # seconds for the store to answer; it may be on a host that can't be reached any more


class GroupFailure(Exception):
    """Failure of an operation; ``is_cause`` is False if it may be an effect of a failure on other ranks."""

    def __init__(self, kind: str, rank: int, text: str, *, is_cause: bool) -> None:
        super().__init__(kind, rank, text)
        self.cause: Cause = (kind, rank, text)
        self.is_cause = is_cause


@dataclass
class CollectiveCall:
    """One operation; its stages use the tensors' memory as vectors."""

    what: int
    text: str
    number: int
    op: int
    op_here: int  # the reduction inside a host, as the first step of `op`
    root: int
    ins: list[Tensor]
    outs: list[Tensor]
    seconds: float
    owners: list[Tensor] = field(default_factory=list)  # tensors that own the memory of `ins` and `outs`
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seconds

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def owner_of(self, tensor: Tensor) -> Tensor | None:
        """Return the caller's tensor that owns the memory, or None."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for owner in self.owners:
            if owner.data_ptr() <= begin and end <= owner.data_ptr() + owner.nbytes:
                return owner
        return None


@_c10d_internals.hide_from_dynamo
class InterHostComm:
    """Links of ``rank`` to ranks of other hosts, and the group's record of the first failure.

    ``fail`` is called from another thread, if the group turns out to have failed during a long operation. ``rdma_p2p``
    carries large messages where there are NICs.
    """

    def __init__(
        self,
        gloo: Any,
        rdma_p2p: RdmaP2P | None,
        store: Store,
        rank: int,
        hosts: Sequence[Sequence[int]],
        fail: Callable[[GroupFailure], object],
    ) -> None:
        self._gloo, self._rdma_p2p, self._rank, self._hosts = gloo, rdma_p2p, rank, hosts
        self._store = _c10d_internals.own_connection(store)
        self._fail = weakref.WeakMethod(fail)  # the group owns this object
        self.links = _gloo_links.GlooLinks(gloo)
        self._closed = False
        self.has_recorded_cause = False  # the store has answered
        self._under_way: tuple[CollectiveCall, float] | None = None
        self._announced = 0
        _watch.add(self)

    # Messages --------------------------------------------------------------------------------------------------

    def post(self, call: CollectiveCall, stage: str, sends: Mail, receives: Mail) -> Posted:
        """Start to send and receive tensors.

        Messages match only if the ranks agree about the operation and the sizes.
        """
        posted: Posted = []
        for mail, name in ((receives, "recv"), (sends, "send")):
            for rank, tensor in mail:
                if tensor.nbytes == 0:
                    continue
                what = f"{call.number} {call.text} {stage} {tensor.nbytes}"
                tag = zlib.crc32(what.encode()) >> 2 | FIRST_STAGE_TAG  # apart from users' tags
                vector = [tensor.view(torch.uint8)]
                try:
                    if self._rdma_p2p is not None and self._rdma_p2p.takes(vector, 0):
                        begin = functools.partial(
                            getattr(self._rdma_p2p, name), owner=call.owner_of(tensor), seconds=call.left()
                        )
                        wait = begin(vector, rank, tag).wait
                    else:
                        work = getattr(self._gloo, name)(vector, rank, tag)
                        wait = work.wait
                        if tensor.nbytes >= _gloo_links.LARGE_BYTES:
                            wait = functools.partial(self.links.wait_for_message, work)
                    posted.append((wait, rank))
                except RuntimeError as error:
                    raise self._lost(call, rank, error) from None
        return posted

    def wait(self, call: CollectiveCall, posted: Posted) -> None:
        for wait, rank in posted:
            try:
                wait(timedelta(seconds=max(call.left(), 0.001)))
            except RuntimeError as error:
                raise self._lost(call, rank, error) from None

    def exchange(self, call: CollectiveCall, stage: str, sends: Mail, receives: Mail) -> None:
        self.wait(call, self.post(call, stage, sends, receives))

    def _lost(self, call: CollectiveCall, rank: int, error: RuntimeError) -> GroupFailure:
        if not call.left():
            alone = (rank,) in self._hosts
            text = f"did not enter {call.text} within {call.seconds:g} s"
            return GroupFailure(
                "late", rank, text + ("" if alone else ", or another rank of its host did not"), is_cause=False
            )
        if (cause := getattr(error, "failure", None)) is not None:  # a NIC's message, whose error is complete
            return GroupFailure(*cause, is_cause=False)
        said = str(error).strip().splitlines()[0]
        return GroupFailure("dead", rank, f"closed its connection to rank {self._rank} (gloo: {said})", is_cause=False)

    # Failures --------------------------------------------------------------------------------------------------

    def first_cause(self, failure: GroupFailure) -> Cause:
        """Return the group's first failure as recorded in the store.

        A rank that saw only effects lets others write first.
        """

        def ask() -> Cause:
            with contextlib.suppress(Exception):  # the store may be gone with its host
                if not failure.is_cause:
                    with contextlib.suppress(Exception):
                        self._store.wait(["cause"], timedelta(seconds=_CAUSE_TIMEOUT_S))
                kind, rank, text = json.loads(self._store.compare_set("cause", "", json.dumps(failure.cause)))
                self.has_recorded_cause = True
                return str(kind), int(rank), str(text)
            return failure.cause

        with contextlib.suppress(TimeoutError):
            return within(_CAUSE_TIMEOUT_S + _STORE_TIMEOUT_S, ask, thread_name="monarch_cause")
        return failure.cause

    def close(self) -> None:
        self._closed = True

    @contextlib.contextmanager
    def watched(self, call: CollectiveCall) -> Any:
        """In this context, a thread checks regularly whether the other ranks run the same operation."""
        self._under_way = call, time.monotonic()
        try:
            yield
        finally:
            self._under_way = None

    def look_around(self, patience: float) -> bool:
        """Fail an operation if the group has failed or other ranks run another operation.

        True if it must be checked again.
        """
        under_way, fail = self._under_way, self._fail()
        if self._closed or fail is None:
            return False
        if under_way is None or time.monotonic() - under_way[1] < patience:
            return True
        call = under_way[0]
        with contextlib.suppress(RuntimeError):
            failure = self._others(call)
            if failure is not None and self._under_way is under_way:
                fail(failure)
        return True

    def _others(self, call: CollectiveCall) -> GroupFailure | None:
        if self._announced != call.number:
            self._store.set(f"at/{self._rank}", json.dumps([call.number, call.text]))
            self._announced = call.number
        if self._store.check(["cause"]):
            return GroupFailure("dead", -1, "a rank failed", is_cause=False)  # the recorded cause says more
        for host in self._hosts:
            key = f"at/{host[0]}"
            if not self._store.check([key]):
                continue
            number, text = json.loads(self._store.get(key))
            if number == call.number and text != call.text:
                told = f"rank {host[0]} called {text}; rank {self._rank} called {call.text}"
                text = f"the ranks disagree about operation {number} of the group, which ends it: {told}"
                return GroupFailure("mismatch", -1, text, is_cause=True)
        return None


class _Watch:
    """One thread that watches the groups of this process while there are any."""

    PATIENCE = 1.0  # seconds

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: list[weakref.ref[InterHostComm]] = []
        self._thread: threading.Thread | None = None

    def add(self, group: InterHostComm) -> None:
        with self._lock:
            self._groups.append(weakref.ref(group))
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="monarch_hosts", daemon=True)
                start_thread(self._thread)

    def _look(self) -> None:
        while True:
            time.sleep(self.PATIENCE)
            with self._lock:
                groups = list(self._groups)
            gone = [ref for ref in groups if (group := ref()) is None or not group.look_around(self.PATIENCE)]
            group = None
            with self._lock:
                self._groups = [ref for ref in self._groups if ref not in gone]
                if not self._groups:
                    self._thread = None
                    return


_watch = _Watch()
fork.register(fork.Step.GROUP_WATCH, after_in_child=_watch.__init__)  # type: ignore[misc]  # no thread in the child
