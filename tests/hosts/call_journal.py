"""Workload of numbered messages with a journal: sender, receiver, outcome and place of each.

Actors write received messages to files, which outlive a killed process. Both sides are compared at the end.
fault_schedules.py has the faults and hosts. Worker processes import this module, so it does not import pytest.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from monarch_backend.actor import (
    Actor,
    ActorMesh,
    Channel,
    Port,
    SupervisionError,
    concurrent_endpoint,
    context,
    endpoint,
)

GPUS = 2
"""Processes on each host."""

PACE = 0.01
"""Seconds between two messages of a sender. No sender may still have a backlog when the faults have ended."""

VALUE, NOT_SENT, UNKNOWN, SENT = "value", "not sent", "unknown", "sent"
"""What a sender knows of a message: it ran; it did not run; it may have run; it was sent without an error."""


class CallOutcome(NamedTuple):
    """The outcome of one message to one rank, as its sender learned it."""

    sender: str
    number: int
    rank: int
    outcome: str
    error: str = ""


class Ledger(Actor):
    """Actor that records each message in its journal before it replies."""

    def __init__(self, folder: str) -> None:
        self.rank = context().actor_instance.rank.rank
        self.file = os.open(f"{folder}/ledger{self.rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    @endpoint
    def note(self, sender: str, number: int) -> list[Any]:
        return self._write(sender, number)

    @endpoint
    def count(self, sender: str, number: int, to: int) -> Iterator[int]:
        self._write(sender, number)
        yield from range(to)

    def _write(self, sender: str, number: int) -> list[Any]:
        os.write(self.file, f"{sender} {number}\n".encode())
        return [self.rank, sender, number]


class Talker(Actor):
    """Actor that calls ledgers on other hosts and sends to a port until it is stopped.

    It records each call's outcome.
    """

    def __init__(self, folder: str) -> None:
        self.rank = context().actor_instance.rank.rank
        self.name = f"talker{self.rank}"
        self.file = os.open(f"{folder}/told-{self.name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.stopped = False

    @concurrent_endpoint
    async def pid(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def stop_talking(self) -> None:
        self.stopped = True

    @concurrent_endpoint
    async def talk(self, seed: int, ledgers: ActorMesh, port: Port[Any]) -> int:
        """Send until `stop_talking`. Wait for the outcome of every call, and return the number of messages."""
        rng = random.Random(f"{seed} {self.rank}")
        elsewhere = [rank for rank in range(len(ledgers)) if rank // GPUS != self.rank // GPUS]
        number, calls = 0, []
        while not self.stopped:
            number += 1
            rank = rng.choice(elsewhere)
            call = one(ledgers, rank).note.call_one(self.name, number)
            call.add_done_callback(partial(self._told, rank, number))
            calls.append(call)
            port.send((self.name, number))
            await asyncio.sleep(PACE)
        await asyncio.gather(*(call.as_asyncio() for call in calls), return_exceptions=True)
        return number

    def _told(self, rank: int, number: int, call: Any) -> None:
        told = outcome_of(self.name, number, rank, call)
        os.write(self.file, (json.dumps(told) + "\n").encode())


def one(mesh: ActorMesh, rank: int) -> ActorMesh:
    """Return the slice with the actor of this rank."""
    return mesh.slice(hosts=rank // GPUS, gpus=rank % GPUS)


def outcome_of(sender: str, number: int, rank: int, call: Any) -> CallOutcome:
    """Return the outcome of a completed call of one rank."""
    error = call.exception(0)
    if error is None:
        assert call.result(0) == [rank, sender, number], f"message {number} of {sender} to {rank}: {call.result(0)}"
        return CallOutcome(sender, number, rank, VALUE)
    if not isinstance(error, SupervisionError):
        return CallOutcome(sender, number, rank, UNKNOWN, f"{type(error).__name__}: {error}")
    return CallOutcome(sender, number, rank, error.delivery, f"SupervisionError: {error}")


class Caller:
    """Sender in the controller program.

    One thread calls one rank or all and sends multicasts; another reads streams.
    """

    def __init__(self, seed: int, ledgers: ActorMesh) -> None:
        self.ledgers, self.ranks = ledgers, range(len(ledgers))
        self.told: list[CallOutcome] = []
        self.heard: defaultdict[str, list[int]] = defaultdict(list)  # numbers received through the port, by sender
        self.port, self._receiver = Channel.open()
        self._calls: list[tuple[int, Sequence[int], Any]] = []  # number, ranks, future
        self._multicasts: list[int] = []
        self._number = self._streamed = 0
        self._rng, self._seed = random.Random(f"{seed} caller"), seed
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send, self._read)]
        self._broken: list[BaseException] = []
        self._listen()

    def start(self) -> None:
        """Start the threads. They send until `stop`."""
        for thread in self._threads:
            thread.start()

    def stop(self, most: float) -> None:
        """Stop sending. Check that every call completes within ``most`` seconds, and record its outcome."""
        self._stop.set()
        deadline = time.monotonic() + most
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"after {most} s a stream still waits, or a message can't be sent"
        for number, ranks, call in self._calls:
            try:
                call.exception(max(0.001, deadline - time.monotonic()))
            except TimeoutError:
                raise AssertionError(f"after {most} s message {number} of the program to {ranks} still waits") from None
            self._answered(number, ranks, call)
        if self._broken:
            raise self._broken[0]

    # ---- the threads

    def _guarded(self, turn: Any) -> None:
        try:
            while not self._stop.wait(PACE):
                turn()
        except BaseException as error:
            self._broken.append(error)

    def _send(self) -> None:
        self._guarded(self._send_one)

    def _send_one(self) -> None:
        self._number += 1
        number, ledgers, what = self._number, self.ledgers, self._rng.random()
        if what < 0.6:
            rank = self._rng.choice(self.ranks)
            self._calls.append((number, [rank], one(ledgers, rank).note.call_one("program", number)))
            return
        ranks = [rank for rank in self.ranks if rank not in ledgers.failed_ranks or self._rng.random() < 0.1]
        if not ranks:
            return
        some = ledgers.without([rank for rank in self.ranks if rank not in ranks])
        if what < 0.8:
            self._calls.append((number, ranks, some.note.call("program", number)))
            return
        try:
            some.note.broadcast("program", number)
        except SupervisionError as error:  # the other ranks may have received it
            self._failed(number, ranks, error)
        else:
            self.told += [CallOutcome("program", number, rank, SENT) for rank in ranks]

    def _read(self) -> None:
        self._guarded(self._stream)

    def _stream(self) -> None:
        """Read a generator of one rank to its end, and check the order of its items."""
        self._streamed += 1
        number = self._streamed
        rank, to = self._rng.choice(self.ranks), self._rng.choice((1, 50, 300))
        items: list[int] = []
        try:
            items += one(self.ledgers, rank).count.call_one("stream", number, to)
            self.told.append(CallOutcome("stream", number, rank, VALUE))
        except SupervisionError as error:
            self.told.append(CallOutcome("stream", number, rank, error.delivery, f"SupervisionError: {error}"))
        else:
            assert len(items) == to, f"{len(items)} of {to} items, and no error"
        assert items == list(range(len(items))), f"items of rank {rank} in another order: {items}"

    # ---- outcomes

    def _answered(self, number: int, ranks: Sequence[int], call: Any) -> None:
        if len(ranks) == 1 and not hasattr(call, "extent"):
            self.told.append(outcome_of("program", number, ranks[0], call))
            return
        error = call.exception(0)
        if error is not None:
            self._failed(number, ranks, error)
            return
        expected = [[rank, "program", number] for rank in ranks]
        assert list(call.result(0).values()) == expected, (list(call.result(0).values()), expected)
        self.told += [CallOutcome("program", number, rank, VALUE) for rank in ranks]

    def _failed(self, number: int, ranks: Sequence[int], error: BaseException) -> None:
        """Record a failed call. The error names one rank; the outcome of the other ranks is unknown."""
        text = f"{type(error).__name__}: {error}"
        for rank in ranks:
            if rank == getattr(error, "rank", None):
                self.told.append(CallOutcome("program", number, rank, getattr(error, "delivery", UNKNOWN), text))
            else:
                self.told.append(CallOutcome("program", number, rank, UNKNOWN))

    def _listen(self) -> None:
        def heard(future: Any) -> None:
            sender, number = future.result()
            self.heard[sender].append(number)
            self._listen()

        self._receiver.recv().add_done_callback(heard)


# ---- comparison of both sides


def read_ledgers(folder: Path) -> dict[int, list[tuple[str, int]]]:
    """Return the messages that ran, by rank, in the order of execution."""
    found = {}
    for path in folder.glob("ledger*"):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[int(path.name.removeprefix("ledger"))] = [(sender, int(number)) for sender, number in lines]
    return found


def read_outcomes(folder: Path) -> list[CallOutcome]:
    """Return the outcomes that the talkers recorded."""
    return [CallOutcome(*json.loads(line)) for path in folder.glob("told-*") for line in path.read_text().splitlines()]


def check_messages(told: Sequence[CallOutcome], ran: dict[int, list[tuple[str, int]]]) -> None:
    """Check that messages ran in order and at most once, and that each outcome agrees with the journals."""
    counts: defaultdict[tuple[str, int, int], int] = defaultdict(int)
    for rank, messages in ran.items():
        last: dict[str, int] = {}
        for sender, number in messages:
            counts[sender, number, rank] += 1
            assert counts[sender, number, rank] == 1, f"rank {rank} executed message {number} of {sender} twice"
            assert number > last.get(sender, 0), f"rank {rank} executed {number} of {sender} after {last[sender]}"
            last[sender] = number
    for message in told:
        count = counts[message.sender, message.number, message.rank]
        if message.outcome == VALUE:
            assert count == 1, f"{message} has a value, and never ran"
        if message.outcome == NOT_SENT:
            assert count == 0, f"{message} ran all the same"


def check_port_order(heard: dict[str, list[int]], sent: dict[str, int]) -> None:
    """Check that the port received each sender's messages in order, without a gap.

    ``sent`` has the number of messages of each sender that returned it. All of them must have arrived.
    """
    for sender, numbers in heard.items():
        assert numbers == list(range(1, len(numbers) + 1)), f"what {sender} has sent came as {numbers}"
    for sender, count in sent.items():
        assert len(heard[sender]) == count, f"{sender} has sent {count} to a port, and {len(heard[sender])} came"
