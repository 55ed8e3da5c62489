"""Owner on fake devices, whose memory this process reads by the real route, without a second process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch_backend._actor.runtime import program
from monarch_backend._rdma.registrations import Handle
from monarch_backend._rdma.routes.verbs import Verbs
from monarch_backend._rdma.transfers.engine import engine
from monarch_backend._verbs import Engine, Settings
from monarch_backend.rdma import RDMABuffer
from tests.rdma.verbs.fabric import Fabric
from tests.rdma.verbs.peers import Memory, until

MI = 1 << 20


class FarOwner:
    """An owner. ``buffer`` is a handle of its memory, as this process would have received it."""

    def __init__(self, fabric: Fabric, token: str, nbytes: int = 4 * MI, yields: bool = True) -> None:
        self.fabric, self.token = fabric, token
        self.owner = Engine(settings=Settings(), binding=fabric)
        self.asking = Engine(lambda _: self.connect(), settings=Settings(), binding=fabric)
        self.asking._completions.yields = yields
        self.connects = True
        self.memory = Memory(nbytes)
        self.memory.fill(7)
        self.region = self.owner.expose(self.memory.address, nbytes, self.memory.view)
        self.route = Verbs(program(), engine().registry)
        self.route._engine = self.asking
        engine().routes._chosen[token, True, False] = self.route
        packed = self.region.to_bytes()
        self.buffer = RDMABuffer._of(Handle(token, 1, "far", (0, 0, 0), 0, nbytes, "cpu", True, verbs=packed))

    def connect(self) -> None:
        if self.connects:
            self.asking.connect(self.token, self.owner.accept("asking", self.asking.offer(self.token)))

    def until_up(self) -> FarOwner:
        """Connect, so that no transfer needs a worker thread."""
        self.connect()
        assert until(lambda: self.fabric.run() >= 0 and self.asking.connected(self.token))
        return self

    def holds(self, data: Any, nbytes: int) -> bool:
        return bytes(memoryview(data).cast("B")[:nbytes]) == bytes(self.memory.view[:nbytes])

    def close(self) -> None:
        self.asking.close()
        self.owner.close()
        program().router.peers.pop(self.token, None)
        engine().routes._chosen.pop((self.token, True, False), None)
        assert not self.fabric.pairs
        assert all(nic.opened == nic.closed for nic in self.fabric.nics)


Make = Callable[..., FarOwner]
