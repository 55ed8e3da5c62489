"""A pending call with PyTorch Monarch: `torchmonarch_peer.py serve|call ADDRESS [OWN_ADDRESS]`.

It prints the time and the error when the call raises. It runs in .envs/peer-torchmonarch with torchmonarch's defaults
and imports nothing from this project.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import monarch.actor
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint, start_worker_loop_forever


class Sleeper(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def sleep(self) -> None:
        time.sleep(600)


def call(address: str, own: str) -> None:
    enable_transport(own)
    hosts = attach_to_workers(ca="trust_all_connections", workers=[address])
    procs = hosts.spawn_procs(per_host={"gpus": 1}, name="echo")
    sleeper: Any = procs.spawn("echo", Sleeper).slice(hosts=0, gpus=0)
    print(json.dumps(sleeper.pid.call_one().get()), flush=True)
    sys.stdin.readline()
    future = sleeper.sleep.call_one()
    print("begun", flush=True)
    try:
        future.get()
    except Exception as error:
        print(json.dumps([time.time(), str(error)]), flush=True)


def main() -> None:
    role, address, *own = sys.argv[1:]
    monarch.actor.unhandled_fault_hook = lambda _: None
    if role == "serve":
        enable_transport(address)
        served = start_worker_loop_forever(address=address, ca="trust_all_connections")
        print("0", flush=True)
        served.get()
    else:
        call(address, *own)


if __name__ == "__main__":
    main()
