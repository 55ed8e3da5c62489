"""Benchmark of a tensor sent to an actor on another host of this machine, with NICs and without.

    tools/rxe_guest.sh python benchmarks/hosts_nics.py [--rounds N] [--sizes MIB,MIB]

It needs two verbs devices. Two daemons run on loopback: one uses NICs, and the other one does not
(MONARCH_RDMA_TRANSPORT=tcp). The controller's gateway uses the first device, and the daemon's gateway the second one.
Each round calls actors on both hosts. Figures are medians. TLS is on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from monarch_backend._verbs.discovery import survey
from monarch_backend.actor import Actor, endpoint, this_host
from monarch_backend.hosts import attach_to_workers

UP = "import sys; from monarch_backend.cli import main; sys.exit(main())"


class Sink(Actor):
    """Actor that receives a tensor and returns its size."""

    @endpoint
    def take(self, value: torch.Tensor) -> int:
        return value.nbytes


def daemon(stack: ExitStack, **env: str) -> str:
    """Start `monarch-backend up` on loopback and return its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", UP, "up", "--address", "127.0.0.1:0"],
        env={**os.environ, **env}, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout is not None
    for line in process.stdout:
        if "is up: " in line:
            return line.split("is up: ")[1].split()[0]
    raise SystemExit("the daemon did not come up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default="1,4,16", help="MiB")
    args = parser.parse_args()
    devices = sorted({port.device for port in survey() if port.active})
    if len(devices) < 2:
        raise SystemExit("two verbs devices are needed: tools/rxe_guest.sh has them")
    os.environ["MONARCH_RDMA_DEVICES"] = devices[0]
    with ExitStack() as stack:
        secret = stack.enter_context(tempfile.NamedTemporaryFile("w"))  # with permissions 600
        secret.write(os.urandom(32).hex())
        secret.flush()
        os.environ["MONARCH_SECRET_FILE"] = secret.name
        this_host().spawn_procs(
            {"gpus": 1}
        ).stop().get()  # starts the fork server, which has imported torch: the gateway then starts fast
        nics = daemon(stack, MONARCH_RDMA_DEVICES=devices[1])
        plain = daemon(stack, MONARCH_RDMA_TRANSPORT="tcp")
        hosts = attach_to_workers([nics, plain], timeout=60, silence=30)  # the guest has one slow processor
        procs = hosts.spawn_procs({"gpus": 1})
        sinks = procs.spawn("sink", Sink)
        print("| | NICs | TCP with TLS | times |\n| --- | ---: | ---: | ---: |")
        for size in map(int, args.sizes.split(",")):
            print(row(size, measure(sinks, size << 20, args.rounds)), flush=True)
        procs.stop().get()


def measure(sinks: Any, nbytes: int, rounds: int) -> list[list[float]]:
    """Return the seconds of each call, a list for each host."""
    times: list[list[float]] = [[], []]
    value = torch.zeros(nbytes, dtype=torch.uint8)
    for number in range(rounds + 2):  # the first two rounds connect and warm up
        for host in (0, 1):
            began = time.perf_counter()
            sinks.slice(hosts=host, gpus=0).take.call_one(value).get()
            if number > 1:
                times[host].append(time.perf_counter() - began)
    return times


def row(size: int, times: list[list[float]]) -> str:
    """Return a row of the table."""
    nics, plain = (statistics.median(each) for each in times)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    cells = [f"{seconds * 1e3:.1f} ms, {(size << 20) / seconds / 1e9:.3f} GB/s" for seconds in (nics, plain)]
    return f"| {size} MiB | {cells[0]} | {cells[1]} | {ratio:.2f} |"


if __name__ == "__main__":
    main()
