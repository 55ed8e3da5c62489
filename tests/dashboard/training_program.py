"""A program with a loss, a chain of failures, a killed process and a hanging rank, for tests of the dashboard."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.running_script import running_script

SCRIPT = """
import os, signal, sys, threading, time
from monarch_backend.actor import Actor, endpoint, get_meter, span, this_host
import monarch_backend.actor

ended = threading.Event()
monarch_backend.actor.unhandled_fault_hook = lambda failure: ended.set()


class Trainer(Actor):
    @endpoint
    def step(self, number):
        with span("step", number=number):
            get_meter("m").create_gauge("loss").set(float("nan") if number == 2 else 1 / (number + 1))
            get_meter("m").create_counter("samples").add(32)

    @endpoint
    def check(self, loader):
        loader.load.call_one("<b>shard</b>").get()

    @endpoint
    def hang(self):
        print("hangs", flush=True)
        while True:
            time.sleep(60)


class Loader(Actor):
    @endpoint
    def load(self, name):
        print(f"cannot open {name}", file=sys.stderr, flush=True)
        raise FileNotFoundError(name)

    @endpoint
    def die(self):
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    trainers = this_host().spawn_procs({"gpus": 2}, name="trainers").spawn("trainer", Trainer)
    loaders = this_host().spawn_procs({"cpus": 2}, name="loaders").spawn("loader", Loader)
    for number in range(20):
        trainers.step.call(number).get()
    try:
        trainers.slice(gpus=0).check.call_one(loaders.slice(cpus=1)).get()
    except Exception:
        pass
    loaders.slice(cpus=0).die.broadcast()
    ended.wait()
    trainers.slice(gpus=1).hang.broadcast()
    print("ready", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
"""


@contextlib.contextmanager
def training_program(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the program until its rank 1 hangs. It ends with the block."""
    with running_script(folder / "training_program.py", SCRIPT) as process:
        assert process.stdout is not None
        missing = {"ready", "hangs"}
        while missing:
            line = process.stdout.readline()
            assert line, "the program has ended"
            missing.discard(line.split()[-1])
        yield process
