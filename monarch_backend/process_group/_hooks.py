"""Completion hooks of CPU collectives, and works that finish what Gloo leaves undone.

`ProcessGroup._register_on_completion_hook` calls a hook once for each finished collective. The hook gets an object with
op_type, seq, time_started, time_finished and active_duration. torch's NCCL group does so for its own works. Gloo has no
such hook, so futures call it here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from monarch_backend.process_group import _c10d_internals

_NO_TIMEOUT = timedelta(0)  # c10d's C++ default: this wait has no timeout of its own


@_c10d_internals.hide_from_dynamo
class DeferredWork(dist.Work):
    """Work of a reduce_scatter on Gloo, which copies its result in wait().

    Gloo's own work never completes without wait() and has no future. `get_future` waits, because no other call would
    finish the work. A second wait() does nothing; Gloo's would write the output again.
    """

    def __init__(self, work: Any, outputs: list[Tensor], finish: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._work, self._outputs, self._finish = work, outputs, finish
        self._lock = threading.RLock()  # a callback of the future may wait, too
        self._error: Exception | None = None
        # Not set_exception, because C++ takes its result for a value. An error raised by `then` arrives as an error.
        self._ended: Future[None] = Future()
        self.finished = self._ended.then(lambda _: self._outcome())

    def _outcome(self) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait as Gloo's work does; raises the same errors."""
        with self._lock:
            if not self._ended.done():
                try:
                    self._work.wait(timeout)
                    if self._finish is not None:
                        self._finish()
                except Exception as error:
                    if timeout == _NO_TIMEOUT:  # else the wait was limited, and another one may follow
                        self._error = error
                        self._ended.set_result(None)
                    raise
                self._ended.set_result(None)
        self._outcome()
        return True

    def is_completed(self) -> bool:
        """True after a wait()."""
        return self._ended.done()

    def get_future(self) -> Future[list[Tensor]]:
        """Return a completed future; it holds an error, which is not raised here."""
        with contextlib.suppress(Exception):
            self.wait()
        return self.finished


@_c10d_internals.hide_from_dynamo
class AliasedOutputWork(dist.Work):
    """Work on views or copies of the caller's tensors; its future and result are the caller's tensors.

    ``finish`` copies results back. It is called after an operation that succeeds, before the work completes.
    """

    def __init__(self, work: Any, outputs: list[Tensor], finish: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._work, self._outputs = work, outputs
        self._finished: Future[None] | None = None
        if finish is not None:

            def after(future: Future[Any]) -> None:
                future.value()  # raises the operation's error
                finish()

            self._finished = work.get_future().then(after)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the operation; raises its error."""
        self._work.wait(timeout)
        if self._finished is not None:
            self._finished.wait()
        return True

    def is_completed(self) -> bool:
        """True once the operation has ended, with an error or without."""
        return bool(self._work.is_completed()) and (self._finished is None or self._finished.done())

    def is_success(self) -> bool:
        return self.is_completed() and bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the caller's tensors."""

        def given(future: Future[Any]) -> list[Tensor]:
            future.value()  # raises the operation's error
            return self._outputs

        return (self._finished or self._work.get_future()).then(given)


@dataclass(frozen=True)
class WorkInfo:
    """One finished collective, with the fields of torch's WorkInfo, which Python can't construct."""

    op_type: str
    seq: int
    time_started: datetime
    time_finished: datetime
    active_duration: timedelta


class CompletionHooks:
    """Completion hooks of one group, called by the thread that finished the work. Counts pending works."""

    def __init__(self) -> None:
        self._hooks: list[Callable[[Any], None]] = []
        self._late: list[DeferredWork] = []
        self._pending = 0
        self._sequence = 0
        self._idle = threading.Condition()

    def add(self, hook: Callable[[Any], None]) -> None:
        self._hooks.append(hook)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def follow(self, work: Any, op_type: str) -> None:
        """Call the hooks when ``work`` has finished, with an error or without."""
        started = datetime.now()
        with self._idle:
            self._sequence += 1
            self._pending += 1
            sequence = self._sequence

        def finished(_future: Any) -> None:
            now = datetime.now()
            try:
                with contextlib.ExitStack() as every_one:  # also the hooks after one that raises
                    for hook in reversed(self._hooks):
                        every_one.callback(hook, WorkInfo(op_type, sequence, started, now, now - started))
            finally:
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()

        if isinstance(work, DeferredWork):
            with self._idle:
                self._late = [late for late in self._late if not late.is_completed()] + [work]
            work.finished.add_done_callback(finished)
        else:
            work.get_future().add_done_callback(finished)

    def wait(self) -> None:
        """Wait until no work is pending and every hook has returned."""
        for work in self._late:
            work.get_future()
        self._late.clear()
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)
