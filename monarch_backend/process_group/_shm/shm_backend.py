"""Shared-memory backend: CPU tensors of ranks on one host, as calls of the compiled core.

_bootstrap.py finds ranks that share memory. Algorithms, waiting and failures are in csrc/shm/. This module converts
c10d's arguments to addresses, and the core's reports to works and errors. The methods have the names and arguments of
torch's own backends, so that a group can use either.
"""

from __future__ import annotations

import operator
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from monarch_backend import _native
from monarch_backend._core import platform
from monarch_backend._core.package_folder import PACKAGE_FOLDER
from monarch_backend.process_group import _c10d_internals, _collective_specs, _cpu_validation
from monarch_backend.process_group._collective_specs import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    CollectiveSpec,
    Form,
)
from monarch_backend.process_group._errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    ProcessGroupError,
    RankFailedError,
)

# csrc/shm/reduce.h: Dtype and ReduceOp.
_DTYPES = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.int8,
            torch.uint8,
            torch.int16,
            torch.uint16,
            torch.int32,
            torch.uint32,
            torch.int64,
            torch.uint64,
            torch.bool,
            torch.complex64,
            torch.complex128,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.float8_e4m3fnuz,
            torch.float8_e5m2fnuz,
        )
    )
}
_BYTES = len(_DTYPES)
_OPS = {name: code for code, name in enumerate(("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"), 1)}
_MOVES = 0

_NO_TIMEOUT = timedelta(0)  # c10d's C++ default: this wait has no timeout of its own


# Dtypes that fast paths accept, because _cpu_validation.py changes nothing about tensors of these.
_REDUCES_AT_ONCE = {dtype: code for dtype, code in _DTYPES.items() if not dtype.is_complex and dtype is not torch.bool}
_MOVES_AT_ONCE = {dtype: code for dtype, code in _DTYPES.items() if dtype in _cpu_validation.REDUCIBLE}
_FAST_PATH_FORMS = (Form.IN_PLACE, Form.PAIR, Form.TO_LIST, Form.EXCHANGE, Form.NOTHING)
"""Indexed by csrc/shm/python/fast_paths.h: Form."""


def _spans(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.nbytes) for t in tensors]


def op_code(op: Any) -> int:
    kind = getattr(op, "op", op)
    return _OPS[kind.name]


@_c10d_internals.hide_from_dynamo
class ShmWork(dist.Work):
    """One operation. Its future holds ``outputs``; ``finish`` copies results to the caller's tensors."""

    # Class defaults keep the usual case cheap: a work that is done when it is made.
    _operation: Any = None  # None: it was done before it was returned
    _finish: Callable[[], object] | None = None
    _keep: object = None
    _future: Future[list[Tensor]] | None = None
    _error: BaseException | None = None
    _lock = threading.RLock()

    def __init__(self, group: SharedMemory, outputs: list[Tensor], finish: Callable[[], object] | None = None) -> None:
        dist.Work.__init__(self)
        self._group, self._outputs = group, outputs
        if finish is not None:
            self._finish = finish

    def _end(self) -> None:
        """Finish the work after the core is done; later calls do nothing."""
        with self._lock:
            failure = None if self._operation is None else self._operation.failure
            if failure is not None and self._error is None:
                self._error = self._group.error(failure)
            finish, self._finish, self._keep = self._finish, None, None
            if finish is not None and self._error is None:
                try:
                    finish()
                except Exception as error:  # of an earlier operation that belongs to the same call
                    self._error = error

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the operation is done; raises its error, or CollectiveTimeoutError after ``timeout``."""
        if self._operation is not None:
            seconds = timeout.total_seconds() or 3e7
            if not self._operation.done and not self._group.native.wait(self._operation, seconds):
                raise CollectiveTimeoutError(f"timed out: the operation was not done within {seconds:g} s; it goes on")
            self._end()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """True once the operation has ended, with an error or without."""
        if self._operation is not None and not self._operation.done:
            return False
        self._end()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        self.is_completed()
        return self._error

    def _source_rank(self) -> int:
        return int(self._operation.source)

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the outputs.

        For C++ (DDP's built-in hooks) it must hold a C++ list of tensors. Python can't make such a future before it is
        done, so this call waits there.
        """
        if "get_future" not in sys._getframe(1).f_code.co_names:
            self.wait()
            return _c10d_internals.future_of_tensors(self._outputs)
        self._watch()
        with self._lock:
            if self._future is None:
                # Not set_exception, because C++ takes its result for a value. An error raised by `then` arrives as an
                # error.
                self._done: Future[None] = Future()
                self._future = self._done.then(lambda _: self.result())
        if self.is_completed():
            self._settle()
        return self._future

    def _watch(self) -> None:
        """Make sure that `ended` is called, although no thread waits."""

    def ended(self) -> None:
        """Complete the future.

        The core's progress thread calls this; the core keeps the work and its tensors alive until then.
        """
        self._end()
        self._settle()

    def _settle(self) -> None:
        """Complete the future, if there is one. Several threads may, and again after an interrupt."""
        if self._future is not None and not self._done.done():
            with suppress(RuntimeError):  # another thread has just done it
                self._done.set_result(None)


@_c10d_internals.hide_from_dynamo
class AsyncWork(ShmWork):
    """Asynchronous operation of the core. A caller that waits moves it, otherwise the progress thread.

    The progress thread gets it from `hand_over`. The wait takes it back, so that its end needs no other thread.
    """

    _engine: Any = None  # while the progress thread has it

    def __init__(
        self, group: SharedMemory, operation: Any, outputs: list[Tensor], finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__(group, outputs, finish)
        self._lock, self._operation = threading.RLock(), operation

    def hand_over(self) -> None:
        with self._lock:
            if self._engine is None and not self._operation.done:
                engine = self._group._engine()
                engine.submit_async(self._group.native, self._operation, self.ended)
                self._engine = engine

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        try:
            return super().wait(timeout)
        finally:
            engine = self._engine
            if engine is not None and self._operation.done:
                self._settle()  # first: after an interrupt here the progress thread still does it
                engine.take_back(self._operation)

    def is_completed(self) -> bool:
        if not self._operation.done and not self._group.native.poll(self._operation):
            return False
        self._end()
        return True

    def _watch(self) -> None:
        self.hand_over()

    def _end(self) -> None:
        super()._end()
        self._operation.forget()


class FastPathWork(AsyncWork):
    """Operation under way, or one that is done. Fast paths make it and set its state without running Python.

    An operation that is done has no ``_operation`` here. The progress thread has another one, without a callback.
    """

    __init__ = dist.Work.__init__
    _group: Any = None

    wait = _native.work_wait(AsyncWork.wait)
    wait_at_length = AsyncWork.wait

    def is_completed(self) -> bool:
        """True once the operation has ended, with an error or without."""
        return self._operation is None or super().is_completed()

    def _watch(self) -> None:
        with self._lock:
            if self._operation is not None and self._engine.take_back(self._operation):
                self._engine.submit_async(self._group.native, self._operation, self.ended)


def _contiguous(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], object] | None]:
    """Return tensors to write as memory and, if these are copies, a function that copies them back."""
    if all(t.is_contiguous() for t in tensors):
        return list(tensors), None
    pairs = [(t, torch.empty_like(t, memory_format=torch.contiguous_format)) for t in tensors]
    return [scratch for _, scratch in pairs], _cpu_validation.copies(pairs)


def _all_of(works: Sequence[ShmWork], finish: Callable[[], object] | None) -> Callable[[], object] | None:
    """Return a function that finishes operations that belong to one call; those of a group end in order."""
    if not works:
        return finish

    def all_of_them() -> None:
        for work in works:
            work.wait()
        if finish is not None:
            finish()

    return all_of_them


def explained(failure: tuple[str, int, str], members: Sequence[str], me: int, closed_why: str) -> Exception:
    """Return the exception for (kind, failed rank or -1, text); ``members`` describe the ranks."""
    kind, rank, text = failure
    here = f"rank {me} of {len(members)}, {members[me]}"
    if kind == "mismatch":
        return CollectiveMismatchError(f"{text}. No data were moved: make the ranks' calls agree. [{here}]")
    if kind == "closed":
        why = f" ({closed_why})" if closed_why else ""
        return GroupClosedError(f"the process group was closed{why}; make a new one. [{here}]")
    if kind == "full":
        return RuntimeError(f"rank {rank} {text}: give it more, or use fewer groups. [{here}]")
    who = f"rank {rank} ({members[rank]})" if rank >= 0 else "the group:"
    end = f"The group can't be used any more: destroy it and make a new one. [{here}]"
    if kind == "late":
        end = end.replace("The group can't", "After a timeout the group can't")
        return CollectiveTimeoutError(f"timed out: {who} {text}. {end}")
    if kind == "unreadable":
        return ProcessGroupError(f"{who} {text}. {end}")
    return RankFailedError(f"{who} {text}. {end}", rank)


PLACES_TIMEOUT_S = 0.2
"""Seconds in which the ranks of a failed operation must give the lines from which they have called it."""

_NO_LINE = "-"
"""In place of the line of a rank whose thread runs no code of the user."""

_FOLDERS = PACKAGE_FOLDER, os.path.dirname(torch.__file__) + os.sep


def _line_of_caller() -> str:
    """Return "train.py:33 in load" of the innermost frame that runs neither this package nor torch, "" if none does."""
    if threading.current_thread().name.startswith("monarch"):  # it ends operations of others
        return ""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_FOLDERS):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


@_c10d_internals.hide_from_dynamo
class SharedMemory:
    """Inner group of the ranks of one host; ``members`` describe them in messages.

    Each operation asks for its ``timeout``, because torch changes it on the group behind the other route.
    """

    reduces = moves = frozenset(_DTYPES)
    sends = True  # also does point to point
    has_fast_paths = True
    knows_lines = True  # of the calls of ranks that disagree

    def __init__(
        self, native: Any, engine: Any, members: Sequence[str], rank: int, timeout: Callable[[], timedelta]
    ) -> None:
        self.native, self._engine, self._members = native, engine, members
        self._rank, self._size = rank, len(members)
        self._timeout = timeout
        # A small operation that is not done needs only this rank, so no thread moves it until the next one is called.
        self._deferred: AsyncWork | None = None
        self._deferring = threading.Lock()
        self._identity = 0  # the group's in recordings
        self.closed_why = ""  # set before it is closed
        self.failed = False  # a rank ended or was late

    @property
    def sequence(self) -> int:
        return int(self.native.sequence)

    @property
    def identity(self) -> int:
        """Identity of the group in recordings, 0 without one."""
        return self._identity

    @property
    def waiting_thread(self) -> int:
        """`threading.get_ident` of the thread that waits in a collective, 0 if none does."""
        return int(self.native.waiting_thread)

    def record_as(self, name: str, identity: int) -> None:
        """Record operations under this name from now on. All ranks of the group, and no others, have the identity."""
        self._identity = identity
        self.native.record_as(name, self._rank, identity)

    def error(self, failure: tuple[str, int, str]) -> Exception:
        kind, rank, text = failure
        if kind == "late" and rank >= 0 and text.startswith("did not ") and not self.failed:
            failure = kind, rank, text + self._line_of(rank)
        elif kind == "mismatch" and self.knows_lines:
            failure = kind, rank, self._with_lines(text)
        error = explained(failure, self._members, self._rank, self.closed_why)
        self.failed |= isinstance(error, (RankFailedError, CollectiveTimeoutError))
        return error

    def _with_lines(self, text: str) -> str:
        """Add the line of each rank's call to the text of ranks that disagree.

        All calls have failed, so each rank gives its line. Of an asynchronous call, it is the line that waits.
        """
        number = re.match(r"the ranks disagree about operation (\d+) ", text)
        if number is None:  # the sizes of an all_to_all
            return text
        operation = int(number[1])
        self.native.set_place(operation, _line_of_caller() or _NO_LINE)
        until = time.monotonic() + PLACES_TIMEOUT_S
        while not all(places := self.native.places(operation)) and time.monotonic() < until:
            time.sleep(0.001)
        calls = re.split(r"; (?=rank \d+ called )", text)
        if len(calls) != len(places):
            return text
        texts = [place.decode(errors="replace") for place in places]
        lines = [f" at {place}" if place not in ("", _NO_LINE) else "" for place in texts]
        return "; ".join(map(operator.add, calls, lines))

    def _line_of(self, rank: int) -> str:
        """Return "; it is at train.py:33 in load", or nothing for a rank of another host or without a recording."""
        line = self._line_here(rank)
        return f"; it is {line}" if line else ""

    def _line_here(self, rank: int) -> str | None:
        found = re.search(r"pid (\d+)$", self._members[rank])
        if found is None or not platform.HAS_MEMFD:
            return None
        from monarch_backend._telemetry import late_ranks

        return late_ranks.place_of_rank(self._identity, rank, int(found[1]))

    def _run(
        self,
        collective: int,
        piece: Tensor,
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        opts: Any,
        outputs: list[Tensor],
        *,
        op: int = _MOVES,
        root: int = -1,
        finish: Callable[[], object] | None = None,
    ) -> ShmWork:
        """Run an operation in this thread, unless the call is asynchronous.

        ``piece`` has the dtype and the size that all ranks must agree on.
        """
        code = _DTYPES.get(piece.dtype, _BYTES)
        call = collective, code, op, root, piece.nbytes, _spans(ins), _spans(outs)
        if getattr(opts, "asyncOp", True):
            operation, is_small = self.native.begin(*call, (ins, outs))
            return self._pending(operation, outputs, opts, is_small, finish)
        operation = self.native.run(*call, self._seconds, opts)
        if operation is not None:
            return self._failed(operation, outputs)
        work = ShmWork(self, outputs, finish)
        if finish is not None:
            work._end()
        return work

    def _pending(
        self,
        operation: Any,
        outputs: list[Tensor],
        opts: Any,
        is_small: bool,
        finish: Callable[[], object] | None = None,
    ) -> AsyncWork:
        """Return the work of an asynchronous operation that was submitted and keeps the owners of its memory."""
        work = AsyncWork(self, operation, outputs, finish)
        if operation.done:
            work._end()
            return work
        operation.set_time(self._seconds(opts))
        with self._deferring:
            before = self._deferred
            if before is not None and before._operation.done:
                before = None
            # An operation that has to wait for the one before enters only then.
            self._deferred = work if is_small and before is None else None
            is_deferred = self._deferred is work
        if before is not None:
            before.hand_over()
        if not is_deferred:
            work.hand_over()
        return work

    def _seconds(self, opts: Any) -> float:
        timeout = opts.timeout
        seconds: float = (self._timeout() if timeout == _c10d_internals.UNSET_TIMEOUT else timeout).total_seconds()
        return seconds

    def fast_paths(self, owner: object, methods: Mapping[str, object]) -> dict[str, Any]:
        """Return fast paths by name: callables that replace methods of ``owner``.

        They handle synchronous calls with plain contiguous tensors and pass all other calls to the method. A method of
        ``owner`` that differs from the one in ``methods`` is an override and is not replaced.
        """
        moves = _c10d_internals.fast_path_torch_names(_OPS, _MOVES_AT_ONCE)
        reduces = _c10d_internals.fast_path_torch_names(_OPS, _REDUCES_AT_ONCE)
        found = {}
        for name, spec in _collective_specs.with_fast_path():
            method = getattr(type(owner), name, None)
            if not isinstance(method, FunctionType) or method is not methods.get(name):
                continue  # C++ calls of these names would reach the fast path again
            form, names = _FAST_PATH_FORMS.index(spec.form), reduces if spec.reduces else moves
            found[name] = self.native.fast_path(
                spec.operation,
                form,
                owner,
                name,
                spec.options,
                FastPathWork,
                self._failed,
                self._pending,
                self._seconds,
                self,
                self._engine(),
                names,
            )
        return found

    def _failed(self, operation: Any, outputs: list[Tensor]) -> ShmWork:
        work = ShmWork(self, outputs)
        work._error = self.error(operation.failure)  # raised by wait(), so that hooks see a failed work as well
        return work

    # Collectives, named as in torch's own backends --------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        (x,) = tensors
        return self._run(ALL_REDUCE, x, tensors, tensors, opts, tensors, op=op_code(opts.reduceOp))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        flat, finish = _contiguous(tensors)
        for given, used in zip(tensors, flat, strict=True):
            if used is not given:
                used.copy_(given)
        op = op_code(opts.reduceOp)
        works = [self._run(ALL_REDUCE, x, [x], [x], opts, tensors, op=op) for x in flat[:-1]]
        last = flat[-1]
        return self._run(ALL_REDUCE, last, [last], [last], opts, tensors, op=op, finish=_all_of(works, finish))

    def reduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        (x,) = tensors
        return self._run(REDUCE, x, tensors, tensors, opts, tensors, op=op_code(opts.reduceOp), root=opts.rootRank)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        (x,) = tensors
        return self._run(BROADCAST, x, tensors, tensors, opts, tensors, root=opts.rootRank)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> ShmWork:
        (row,), (x,) = outputs, inputs
        return self._gather_row(row, x, opts, row, [])

    def _gather_row(
        self, row: list[Tensor], x: Tensor, opts: Any, shown: list[Tensor], before: list[ShmWork]
    ) -> ShmWork:
        x = x.contiguous()
        outs, finish = _contiguous(row)
        return self._run(ALL_GATHER, x, [x], outs, opts, shown, finish=_all_of(before, finish))

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> ShmWork:
        """Gather several tensors of each rank: ``outputs[rank][i]`` is ``inputs[i]`` of ``rank``."""
        works: list[ShmWork] = []
        shown = [t for row in outputs for t in row]
        for i, x in enumerate(inputs):
            works.append(self._gather_row([row[i] for row in outputs], x, opts, shown, works[-1:]))
        return works[-1]

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> ShmWork:
        return self._run(ALL_GATHER, input, [input], self._pieces(output), opts, [output])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> ShmWork:
        (x,) = inputs
        x = x.contiguous()
        row = outputs[0] if self._rank == opts.rootRank else []
        outs, finish = _contiguous(row)
        return self._run(GATHER, x, [x], outs, opts, row, root=opts.rootRank, finish=finish)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> ShmWork:
        (out,) = outputs
        row = inputs[0] if self._rank == opts.rootRank else []
        return self._run(SCATTER, out, row, outputs, opts, outputs, root=opts.rootRank)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> ShmWork:
        (out,), (row,) = outputs, inputs
        return self._run(REDUCE_SCATTER, out, row, outputs, opts, outputs, op=op_code(opts.reduceOp))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> ShmWork:
        row = self._pieces(input)
        return self._run(REDUCE_SCATTER, output, row, [output], opts, [output], op=op_code(opts.reduceOp))

    def alltoall_base(self, output: Tensor, input: Tensor, outputs: Any, inputs: Any, opts: Any) -> ShmWork:
        """Exchange rows of one tensor, ``inputs[rank]`` of them to each rank."""
        ins = torch.split(input, list(inputs)) if inputs else self._pieces(input)
        outs = torch.split(output, list(outputs)) if outputs else self._pieces(output)
        return self._run(ALL_TO_ALL, output[:0], ins, outs, opts, [output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> ShmWork:
        ins = [x.contiguous() for x in inputs]
        outs, finish = _contiguous(outputs)
        return self._run(ALL_TO_ALL, ins[0].view(-1)[:0], ins, outs, opts, outputs, finish=finish)

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.view(self._size, tensor.numel() // self._size).unbind())

    def barrier(self, opts: Any) -> ShmWork:
        return self._run(BARRIER, _NOTHING, [], [], opts, [])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> ShmWork:
        works: list[ShmWork] = []
        for out, x in zip(outputs, inputs, strict=True):
            before = _all_of(works[-1:], None)
            works.append(self._run(ALL_GATHER, x, [x], self._pieces(out), opts, outputs, finish=before))
        return works[-1]

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> ShmWork:
        works: list[ShmWork] = []
        op = op_code(opts.reduceOp)
        for out, x in zip(outputs, inputs, strict=True):
            before = _all_of(works[-1:], None)
            works.append(self._run(REDUCE_SCATTER, out, self._pieces(x), [out], opts, outputs, op=op, finish=before))
        return works[-1]

    # Point to point -----------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> ShmWork:
        """Send a tensor; the send is done when the tensor may change again, received or not."""
        return self._message(True, tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> ShmWork:
        return self._message(False, tensors, rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> ShmWork:
        return self._message(False, tensors, -1, tag)

    def _message(self, sends: bool, tensors: list[Tensor], rank: int, tag: int) -> ShmWork:
        (x,) = tensors
        # If the caller waits at once, this thread moves the message itself.
        waits = _c10d_internals.is_waited_for(sys._getframe(3))
        operation = self.native.message(sends, _DTYPES.get(x.dtype, _BYTES), rank, tag, x.data_ptr(), x.nbytes, x)
        if waits and not operation.done:
            self.native.finish(operation, self._timeout().total_seconds())
        if not operation.done:
            pending = AsyncWork(self, operation, tensors)
            operation.set_time(self._timeout().total_seconds())
            pending.hand_over()
            return pending
        operation.forget()
        work = ShmWork(self, tensors)
        work._operation = operation
        return work

    def dispatched(self, opts: Any, name: str, args: tuple[Any, ...]) -> ShmWork:
        """Run the operation that torch's dispatcher calls ``name``, with its arguments."""
        with _c10d_internals.profiled(*_PROFILED[name](args)):
            work: ShmWork = call_by_operator(self, opts, name, args)
            return work

    def set_reason(self, reason: str) -> None:
        self.native.set_reason(reason)

    def tell_end(self, reason: str) -> None:
        """Publish why this process will end with the group alive."""
        self.native.set_reason(reason)

    def close(self) -> None:
        """Close the group: operations in progress fail with GroupClosedError."""
        self.native.close()
        self._deferred = None


def call_by_operator(inner: Any, opts: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Call the method of an inner group (shared memory or torch's) for the operator ``name`` of torch.ops.c10d."""
    method, arguments = _CALLS[name]
    return getattr(inner, method)(*arguments(args, opts))


def _call_of(spec: CollectiveSpec) -> tuple[str, Callable[[tuple[Any, ...], Any], tuple[Any, ...]]]:
    """Return the method for an operator, and a function that converts the operator's arguments to the method's."""
    if spec.form is Form.NOTHING:
        return spec.key, lambda _, opts: (opts,)
    if spec.form.is_point_to_point:
        return spec.key, lambda args, _: (args[0], *args[2:])  # args[1] is the group
    if spec.form is Form.EXCHANGE:
        return spec.key, lambda args, opts: (args[0], args[1], args[3], args[4], opts)
    if spec.form.is_in_place:
        return spec.key, lambda args, opts: (args[0], opts)
    return spec.key, lambda args, opts: (args[0], args[1], opts)


def _range_of(spec: CollectiveSpec) -> Callable[[tuple[Any, ...]], tuple[str, list[Tensor]]]:
    """Return a function from an operator's arguments to the profiler's range: title, tensors that are read."""
    title = f"shm:{spec.profiler_name}"
    if spec.form is Form.NOTHING:
        return lambda _: (title, [])
    read = 0 if spec.form.is_in_place or spec.form.is_point_to_point else 1
    return lambda args: (title, _flat(args[read]))


def _flat(given: Any) -> list[Tensor]:
    rows = [given] if isinstance(given, Tensor) else given
    return [t for row in rows for t in (row if isinstance(row, (list, tuple)) else [row])]


# By operator.
_CALLS = {name: _call_of(spec) for name, spec in _collective_specs.BY_OPERATOR.items()}
_PROFILED = {name: _range_of(spec) for name, spec in _collective_specs.BY_OPERATOR.items()}


_NOTHING = torch.empty(0, dtype=torch.uint8)
