"""A program with two processes whose actors are busy, idle or dead, for tests of what others see of it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.running_script import running_script

SCRIPT = """
import asyncio, os, signal, sys, time
from monarch_backend.actor import Actor, endpoint, this_host


class Worker(Actor):
    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def sleep(self):
        print("sleeps", flush=True)
        while True:
            time.sleep(60)

    @endpoint
    def raises(self):
        raise ValueError("wrong")


class Concurrent(Actor):
    @endpoint
    async def wait(self):
        await asyncio.sleep(1e6)


def main():
    procs = this_host().spawn_procs({"gpus": 2}, name="trainers")
    workers = procs.spawn("worker", Worker)
    for number in range(20):
        workers.echo.call(number).get()
    try:
        workers.slice(gpus=1).raises.call_one().get()
    except Exception:
        pass
    procs.spawn("concurrent", Concurrent).wait.broadcast()
    future = workers.slice(gpus=1).sleep.call_one()
    print("ready", flush=True)
    sys.stdin.readline()
    future.cancel()


if __name__ == "__main__":
    main()
"""


@contextlib.contextmanager
def busy_program(folder: str) -> Iterator[subprocess.Popen[str]]:
    """Run the program until its rank 1 sleeps. It ends with the block."""
    with running_script(Path(folder) / "busy_program.py", SCRIPT) as process:
        assert process.stdout is not None
        seen = {process.stdout.readline().split()[-1] for _ in range(2)}
        assert seen == {"ready", "sleeps"}, seen
        yield process
