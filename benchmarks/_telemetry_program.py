"""Program of telemetry.py: N processes with an idle actor each, which have handled some messages.

    python benchmarks/_telemetry_program.py N

It prints "ready", and ends when standard input ends.
"""

from __future__ import annotations

import sys

from monarch_backend.actor import Actor, endpoint, this_host

CALLS = 50


class Worker(Actor):
    """Actor whose messages fill the ring of its process."""

    @endpoint
    def noop(self) -> None:
        pass


def main(processes: int) -> None:
    """Start the processes, call all of them, and wait."""
    workers = this_host().spawn_procs({"procs": processes}).spawn("workers", Worker)
    for _ in range(CALLS):
        workers.noop.call().get()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
