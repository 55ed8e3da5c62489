"""Actors of test_replay.py. A replay imports this module, so it does not import pytest."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from monarch_backend._replay import recording
from monarch_backend.actor import (
    Actor,
    ActorError,
    Channel,
    Port,
    SupervisionError,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_rank,
    current_size,
    endpoint,
    this_proc,
)
from monarch_backend.rdma import RDMABuffer


class Divider(Actor):
    """Fails at its third message."""

    def __init__(self, value: int) -> None:
        self.value = value

    @endpoint
    def step(self, amount: int) -> float:
        self.value += amount
        return 12 / (3 - self.value)

    @endpoint
    def where(self) -> Any:
        return str(current_rank()), current_size(), context().actor_instance.name, str(context().actor_instance.rank)

    @endpoint
    def tell(self, amount: int) -> None:
        self.value -= amount

    @endpoint
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Weights(Actor):
    """Has tensors and random numbers."""

    def __init__(self, shape: list[int]) -> None:
        self.weights = torch.randn(shape)

    @endpoint
    def add(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient += 1  # in the buffer of the message
        self.weights += gradient
        return self.weights

    @endpoint
    def noise(self) -> tuple[float, float]:
        return random.random(), float(torch.rand(()))


class Reducer(Actor):
    """Uses what a replay does not have."""

    @endpoint
    def reduce(self, value: float) -> tuple[float, int]:
        total = torch.tensor(value + current_rank().rank)
        torch.distributed.all_reduce(total)
        return float(total), torch.distributed.get_world_size()

    @endpoint
    def register(self) -> int:
        RDMABuffer(torch.zeros(1024)).drop()
        return 0


class Source(Actor):
    """Peer of the other actors."""

    def __init__(self) -> None:
        self.count = 0
        self.held: list[Port[Any]] = []

    @endpoint
    def value(self, base: int) -> int:
        self.count += 1
        if base < 0:
            raise ValueError(f"negative: {base}")
        return 100 * self.count + base

    @endpoint
    def values(self, count: int) -> Any:
        yield from range(count)

    @endpoint
    def fill(self, port: Port[int], count: int) -> None:
        for number in range(count):
            port.send(number)

    @endpoint(explicit_response_port=True)
    def hold(self, port: Port[int]) -> None:
        self.held.append(port)

    @endpoint
    def release(self) -> None:
        while self.held:
            self.held.pop().send(7)

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Caller(Actor):
    """Calls other actors in each way."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.port: Any = None
        self.pending: Any = None

    @endpoint
    def sums(self, base: int) -> list[Any]:
        one = self.source.slice(gpus=0)
        whole = self.source.value.call(base).get()
        stream = sorted(future.get() for future in self.source.value.stream(base))
        self.source.value.broadcast(base)
        return [one.value.call_one(base).get(), self.source.value.choose(base).get(), whole.values(), stream,
                list(one.values.call_one(3))]  # fmt: skip

    @endpoint
    def catches(self) -> str:
        try:
            self.source.slice(gpus=0).value.call_one(-1).get()
        except ActorError as error:
            return str(error.__cause__)
        return "no error"

    @endpoint
    def ports(self) -> list[int]:
        port, receiver = Channel.open()
        self.source.slice(gpus=0).fill.call_one(port, 3).get()
        self.port, self.receiver = Channel.open()
        return [receiver.recv().get() for _ in range(3)]

    @endpoint
    def port_of_earlier_message(self) -> int:
        self.port.send(41)
        return int(self.receiver.recv().get()) + 1

    @endpoint
    def times_out(self) -> str:
        self.pending = self.source.slice(gpus=0).hold.call_one()
        try:
            self.pending.get(timeout=0.01)
        except TimeoutError:
            return "late"
        return "in time"

    @endpoint
    def later(self) -> int:
        self.source.slice(gpus=0).release.call_one().get()
        return int(self.pending.get())

    @endpoint
    def limited(self) -> str:
        try:
            self.source.slice(gpus=0).hold.options(timeout=0.01).call_one().get()
        except TimeoutError:
            return "gave up"
        return "in time"

    @endpoint
    def loses_peer(self) -> list[str]:
        last, said = self.source.slice(gpus=1), []
        for _ in range(2):  # the second call finds it dead
            try:
                last.die.call_one().get()
            except SupervisionError as error:
                said.append(error.delivery)
        return said

    @endpoint
    def spawns(self) -> int:
        helpers = this_proc().spawn("helper", Divider, 0)
        helpers.initialized.get()
        result = helpers.step.call_one(1).get()
        helpers.stop().get()
        return int(result)

    @endpoint
    def as_method(self) -> int:
        return int(as_endpoint(self.source.slice(gpus=0).value).call_one(5).get())

    @endpoint
    def from_thread(self) -> list[Any]:
        found: list[Any] = []

        def call() -> None:
            try:
                found.append(self.source.slice(gpus=0).value.call_one(1).get() > 0)
            except RuntimeError as error:
                found.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return found

    @endpoint(explicit_response_port=True)
    def answers_later(self, port: Port[str]) -> None:
        self.port = port

    @endpoint
    def answer(self) -> None:
        self.port.send("now")

    @endpoint
    def count(self, limit: int) -> Any:
        yield from range(limit)

    @endpoint
    def waits(self) -> None:
        self.source.slice(gpus=0).hold.call_one().get()


class RecordCounter(Actor):
    """Counts the payloads that its recording has handled."""

    def __init__(self, source: Any) -> None:
        self.source, self.payloads = source, 0
        for name in ("plain", "sent_record"):
            setattr(recording, name, self.counted(getattr(recording, name)))

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            self.payloads += 1
            return function(*args)

        return count

    @endpoint
    def calls(self, _data: bytes) -> int:
        """Call another actor. Return the number of payloads until then."""
        self.source.value.call_one(1).get()
        return self.payloads


class Interleaved(Actor):
    """Concurrent endpoints, whose order of steps decides what they return."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.seen: list[str] = []
        self.gate = asyncio.Event()

    @concurrent_endpoint
    async def slow(self, name: str) -> list[str]:
        self.seen.append(f"{name} starts")
        await self.gate.wait()
        self.seen.append(f"{name} ends")
        return list(self.seen)

    @concurrent_endpoint
    async def open(self) -> None:
        self.seen.append("open")
        self.gate.set()

    @concurrent_endpoint
    async def sleeps(self, name: str, seconds: float) -> list[str]:
        await asyncio.sleep(seconds)
        self.seen.append(f"{name} slept")
        return list(self.seen)

    @concurrent_endpoint
    async def asks(self, base: int) -> list[Any]:
        first = await self.source.slice(gpus=0).value.call_one(base)
        self.seen.append(f"asked {base}")
        others = await asyncio.gather(*(self.source.slice(gpus=0).value.call_one(base + more) for more in (1, 2)))
        return [first, others, list(self.seen)]

    @concurrent_endpoint
    async def blocks(self, base: int) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return int(self.source.slice(gpus=0).value.call_one(base).get())  # in the event loop

    @concurrent_endpoint
    async def hangs(self) -> None:
        self.seen.append("hangs")
        try:
            await asyncio.Event().wait()
        finally:
            self.seen.append("cancelled")

    @concurrent_endpoint
    async def in_thread(self) -> int:
        return await asyncio.to_thread(sum, [1, 2, 3])

    @concurrent_endpoint
    async def items(self, count: int) -> Any:
        for number in range(count):
            await asyncio.sleep(0)
            yield number

    @concurrent_endpoint
    async def races(self, name: str, rounds: int) -> list[str]:
        """Await both sources at once, each in a task of its own. Note the order of all steps of this actor."""

        async def ask(gpu: int, base: int) -> None:
            reply = self.source.slice(gpus=gpu).value.call_one(base)
            if base % 4 == 0:
                time.sleep(0.002)  # meanwhile the loop is blocked, and handles all replies together afterwards
            await reply
            if base % 5 == gpu:
                await asyncio.sleep(0.0005)
            for step in range(gpu + 3):
                self.seen.append(f"{name} {gpu} step {step} of round {base}")
                await asyncio.sleep(0)

        for base in range(rounds):
            await asyncio.gather(ask(0, base), ask(1, base))
        return list(self.seen)

    @concurrent_endpoint
    async def notes(self, text: str) -> int:
        self.seen.append(text)
        await asyncio.sleep(0)
        self.seen.append(f"end of {text}")
        return len(self.seen)

    @concurrent_endpoint
    async def fails(self) -> None:
        await asyncio.sleep(0)
        raise KeyError("absent")
