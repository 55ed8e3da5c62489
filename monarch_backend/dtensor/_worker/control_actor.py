"""Actors beside the executor. `ControlActor` gets the messages that cannot wait until the executor is free.

It stores them in `ControlInbox` for the executor: the end of a run on other ranks, and transfers from other workers. It
has no tensors and runs no operations.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from monarch_backend._actor.actor import Actor, endpoint

log = logging.getLogger("monarch_backend")

CANCEL_CHECK_INTERVAL_S = 1.0
"""Seconds after which a wait is repeated: a cancelled call can be interrupted only between two waits."""

MAX_FORGOTTEN = 1024
"""Limit of dropped transfers for which messages may still arrive."""

MAX_REJOINS = 1024
"""Limit of failed runs after which an executor of another device may still have to join new groups."""

CONTROL_METHODS = ("set_verdict", "deliver", "refuse", "finish_read", "forget")
"""Methods of `ControlInbox` that messages may call."""


class Ended(RuntimeError):
    """A run ended on another rank before it began here."""


class ControlInbox:
    """Messages that a process has received and its executor has not used yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._verdicts: dict[int, tuple[str, str]] = {}
        self._parts: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        self._refused: dict[int, str] = {}
        self._kept: dict[int, Callable[[], object]] = {}
        self._readers: defaultdict[int, int] = defaultdict(int)  # readers still to come; below 0: came too early
        self._forgotten: dict[int, str] = {}  # with the reason
        self._running: int | None = None

    def begin(self, run: int) -> None:
        """Record that the executor runs this run. Raises Ended if it has ended on another rank."""
        with self._changed:
            verdict, why = self._verdicts.get(run, ("", ""))
            if verdict:
                raise Ended(why)
            self._running = run

    def end(self) -> None:
        with self._changed:
            self._running = None

    def set_verdict(self, run: int, verdict: str, why: str) -> None:
        """Record the end of a run; if it continues here, its collectives end now."""
        from monarch_backend.process_group import abort_all

        with self._changed:
            self._verdicts[run] = verdict, why
            if verdict != "done" and self._running == run:
                abort_all(why)
            self._changed.notify_all()

    def verdict(self, run: int) -> str:
        """Wait until the run has ended on all ranks, and return its verdict."""
        with self._changed:
            while run not in self._verdicts:
                self._changed.wait(CANCEL_CHECK_INTERVAL_S)
            return self._verdicts.pop(run)[0]

    def deliver(self, transfer_id: int, sender: int, content: Any) -> None:
        with self._changed:
            if transfer_id not in self._forgotten:
                self._parts[transfer_id][sender] = content
                self._changed.notify_all()

    def refuse(self, transfer_id: int, why: str) -> None:
        with self._changed:
            if transfer_id not in self._forgotten:
                self._refused[transfer_id] = why
                self._changed.notify_all()

    def take(self, transfer_id: int, count: int) -> list[Any]:
        """Return the parts of ``count`` senders, by sender; waits for the last of them. Raises RuntimeError."""
        with self._changed:
            while not (
                len(self._parts[transfer_id]) >= count or transfer_id in self._refused or transfer_id in self._forgotten
            ):
                self._changed.wait(CANCEL_CHECK_INTERVAL_S)
            found, refused = self._parts.pop(transfer_id), self._refused.pop(transfer_id, None)
            refused = self._forgotten.get(transfer_id, refused)
        if refused is not None:
            raise RuntimeError(f"the data of a transfer to this rank have not come: {refused}")
        return [found[sender] for sender in sorted(found)]

    def keep(self, transfer_id: int, count: int, release: Callable[[], object]) -> None:
        """Keep a transfer's data until ``count`` readers have ended; then ``release`` them."""
        with self._changed:
            is_wanted = transfer_id not in self._forgotten
            if is_wanted:
                self._kept[transfer_id] = release
        if is_wanted:
            self._count(transfer_id, count)
        else:
            release()

    def finish_read(self, transfer_id: int) -> None:
        """End one reader's use. After a failure that may be before the data are kept, or they never are."""
        self._count(transfer_id, -1)

    def _count(self, transfer_id: int, more: int) -> None:
        with self._changed:
            if transfer_id in self._forgotten:
                return
            self._readers[transfer_id] += more
            if self._readers[transfer_id] or transfer_id not in self._kept:
                return
            del self._readers[transfer_id]
            release = self._kept.pop(transfer_id)
        release()

    def forget(self, transfer_id: int, why: str) -> None:
        """Drop a failed transfer. Calls stop waiting for it; messages that were sent before may still arrive."""
        with self._changed:
            self._forgotten[transfer_id] = why
            if len(self._forgotten) > MAX_FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]
            self._parts.pop(transfer_id, None)
            self._refused.pop(transfer_id, None)
            self._readers.pop(transfer_id, None)
            release = self._kept.pop(transfer_id, None)
            self._changed.notify_all()
        if release is not None:
            # Not on this thread, which receives verdicts: a call whose run has failed elsewhere may still use the data.
            threading.Thread(target=_release, args=(release,), name="monarch-forget", daemon=True).start()


def _release(kept: Callable[[], object]) -> None:
    try:
        kept()
    except Exception as error:
        log.warning("the copy of a tensor that could not be moved is kept: %s", error)


inboxes: defaultdict[str, ControlInbox] = defaultdict(ControlInbox)
"""Inboxes of this process, by the type of the executor's device."""


_rejoins: dict[int, threading.Event] = {}


def rejoin_after(run: int) -> threading.Event:
    """Return the event that this process has joined a new default group after a run, for executors of all devices."""
    joined = _rejoins.setdefault(run, threading.Event())
    for earlier in list(_rejoins)[:-MAX_REJOINS]:
        _rejoins.pop(earlier, None)
    return joined


class ControlActor(Actor):
    def __init__(self, device_type: str) -> None:
        self._inbox = inboxes[device_type]

    @endpoint
    def tell(self, method: str, *args: Any) -> None:
        if method not in CONTROL_METHODS:
            raise ValueError(f"a control message names {method!r}; send one of {', '.join(CONTROL_METHODS)}")
        getattr(self._inbox, method)(*args)


class Gpus(Actor):
    """Probe for a process's GPU, before an executor needs one: a failure of the executor would end the program."""

    @endpoint
    def missing(self) -> str:
        """Return why this process has no GPU that its torch can use; or ""."""
        if torch.cuda.is_available():
            return ""
        built = torch.version.cuda or torch.version.hip
        why = "torch finds no GPU here" if built else "torch is built without support for GPUs"
        return f"{why} (host {socket.gethostname()}, pid {os.getpid()}, torch {torch.__version__})"
