"""Runner of RDMABuffer by verbs over a simulated NIC: the time of our Python code alone.

`simulated_nic.py BYTES`. The NIC is that of the tests (tests/rdma/verbs/fabric.py). It executes a work request while
the request is posted, so no call waits. "bare" is a work request and a poll for its completion with the same NIC.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from _runner import Calls, serve
from _timing import Call, fill, look
from ours import Ours

from monarch_backend._verbs import open_device
from monarch_backend._verbs.discovery import PortFacts
from monarch_backend._verbs.wire_format import ROCE_V2, Gid
from monarch_backend.rdma import RDMABuffer
from tests.rdma.verbs.fabric import Fabric
from tests.rdma.verbs.remote_owner import FarOwner

CHEAP = 1e-6  # if a read of the clock takes more seconds, use the mean of many calls
GID = Gid(1, ROCE_V2, bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1]))


class Pretended(Ours):
    """Ours with a simulated NIC. The owner is in this process."""

    def __init__(self, nbytes: int) -> None:
        open_device.discovery.usable = lambda _: [PortFacts("pretended", 1, "ACTIVE", True, (GID,), -1)]  # type: ignore[assignment]
        self.far = FarOwner(Fabric(), f"{'far':0<23}", nbytes).until_up()
        self.there = torch.frombuffer(self.far.memory.map, dtype=torch.uint8)
        fill(self.there)
        self.whole, self.into = self.far.buffer, torch.zeros(nbytes, dtype=torch.uint8)
        self.verbs = self.far.asking

    def _write(self, buffer: RDMABuffer, into: torch.Tensor) -> Call:
        fill(into)
        return lambda: buffer.write_from(into).get()


if __name__ == "__main__":
    torch.set_num_threads(1)
    pretended = Pretended(int(sys.argv[1]))
    serve("verbs", Calls(pretended.into, pretended.ready, one_by_one=look() < CHEAP).times)
