"""Calls from a controller to one actor on another host. It reads cases from stdin and prints times."""

import json
import os
import sys
import time
from typing import Any

import torch

from monarch_backend.actor import Actor, SupervisionError, endpoint
from monarch_backend.hosts import attach_to_workers


class Echo(Actor):
    @endpoint
    def take(self, value: Any) -> None:
        del value

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def sleep(self) -> None:
        time.sleep(600)


def timed(call: Any, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return times


def main() -> None:
    hosts = attach_to_workers([sys.argv[1]])
    procs = hosts.spawn_procs({"gpus": 1}, name="echo")
    echo = procs.spawn("echo", Echo).slice(hosts=0, gpus=0)
    print(json.dumps(echo.pid.call_one().get()), flush=True)
    for line in sys.stdin:
        case, count, size = json.loads(line)
        if case == "call":
            value = torch.zeros(size, dtype=torch.uint8) if size else None
            print(json.dumps(timed(lambda value=value: echo.take.call_one(value).get(), count)), flush=True)
        elif case == "death":
            future = echo.sleep.call_one()
            print("begun", flush=True)
            try:
                future.get()
            except SupervisionError as error:
                print(json.dumps([time.time(), str(error.failure)[:300]]), flush=True)
            return


if __name__ == "__main__":
    import monarch_backend.actor

    monarch_backend.actor.unhandled_fault_hook = lambda _: None
    main()
