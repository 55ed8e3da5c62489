"""A program with spans, metrics, concurrent messages, a failed actor and a killed process, for traces and queries."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.running_script import running_script

SCRIPT = """
import asyncio, os, signal, sys, threading, time
from monarch_backend.actor import Actor, concurrent_endpoint, endpoint, get_meter, span, this_host
import monarch_backend.actor
from monarch_backend import telemetry

ended = threading.Event()
monarch_backend.actor.unhandled_fault_hook = lambda failure: ended.set()


class Worker(Actor):
    @endpoint
    def step(self, number):
        with span("step", number=number):
            with span("forward"):
                get_meter("m").create_counter("samples", unit="ms").add(8, {"split": "train"})
            get_meter("m").create_gauge("loss").set(float("nan") if number == 2 else 1.0 / (number + 1))
        telemetry.step()

    @endpoint
    def relay(self, other):
        get_meter("other").create_histogram("wait").record(0.25)
        with span("relay"):
            other.step.call_one(100).get()

    @endpoint
    def raises(self):
        raise ValueError("wrong")

    @endpoint
    def hang(self):
        with span("hang"):
            print("hangs", flush=True)
            time.sleep(1e6)

    @endpoint
    def die(self):
        with span("last"):
            os.kill(os.getpid(), signal.SIGKILL)


class Napper(Actor):
    @concurrent_endpoint
    async def nap(self, seconds):
        with span("nap", seconds=seconds):
            await asyncio.sleep(seconds)
            with span("after"):
                pass


def main():
    procs = this_host().spawn_procs({"gpus": 2}, name="trainers")
    workers = procs.spawn("worker", Worker)
    nappers = procs.spawn("napper", Napper)
    for number in range(5):
        workers.step.call(number).get()
    workers.slice(gpus=0).relay.call_one(workers.slice(gpus=1)).get()
    for future in [nappers.nap.call(seconds) for seconds in (0.03, 0.01, 0.02)]:
        future.get()
    try:
        workers.slice(gpus=1).raises.call_one().get()
    except Exception:
        pass
    victims = this_host().spawn_procs({"victims": 1}, name="victims").spawn("victim", Worker)
    victims.die.broadcast()
    ended.wait()
    workers.slice(gpus=1).hang.broadcast()
    with span("waits", for_what="a line"):
        print("ready", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
"""


@contextlib.contextmanager
def traced_program(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the program until its rank 1 hangs. It ends with the block."""
    with running_script(folder / "traced_program.py", SCRIPT) as process:
        assert process.stdout is not None
        seen = {process.stdout.readline().split()[-1] for _ in range(2)}
        assert seen == {"ready", "hangs"}, seen
        yield process
