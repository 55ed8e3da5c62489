"""Runner of NIXL over UCX, with CPU memory of two processes, in .envs/peer-nixl. `nixl_peer.py BYTES`.

A transfer's handle is made once and posted repeatedly, as NIXL intends. The time includes posting, and polling until
the transfer is done.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import torch
from _runner import Calls, answer, serve
from _timing import Call, pattern
from nixl_cu12._api import nixl_agent, nixl_agent_config

PR_SET_PDEATHSIG = 1


def _agent(name: str) -> Any:
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def own(nbytes: int) -> None:
    """Run the owner process: register memory, print its address and metadata, and wait."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    agent, memory = _agent("owner"), pattern(nbytes)
    registered = agent.register_memory([memory])
    answer([agent.get_agent_metadata().hex(), memory.data_ptr()])
    while registered is not None:
        signal.pause()


class Nixl:
    """The reading process."""

    def __init__(self, nbytes: int) -> None:
        owner = subprocess.Popen([sys.executable, __file__, str(nbytes), "own"], stdout=subprocess.PIPE, text=True)
        assert owner.stdout is not None
        metadata, self.address = json.loads(owner.stdout.readline())
        self.agent, self.into = _agent("reader"), torch.zeros(nbytes, dtype=torch.uint8)
        self.registered = self.agent.register_memory([self.into])
        self.owner = self.agent.add_remote_agent(bytes.fromhex(metadata))

    def ready(self, _: str, size: int) -> Call:
        """Return the call of a case, as `Calls` needs it."""
        near = self.agent.get_xfer_descs([(self.into.data_ptr(), size, 0)], mem_type="DRAM")
        far = self.agent.get_xfer_descs([(self.address, size, 0)], mem_type="DRAM")
        handle = self.agent.initialize_xfer("READ", near, far, self.owner)
        agent = self.agent

        def call() -> None:
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"the transfer ended with {state}")

        return call


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2:] == ["own"]:
        own(int(sys.argv[1]))
    nixl = Nixl(int(sys.argv[1]))
    serve(f"nixl-cu12 {version('nixl-cu12')}, UCX", Calls(nixl.into, nixl.ready).times)
    os._exit(0)
