"""READ, WRITE and atomics between two processes, each with a device of its own."""

from __future__ import annotations

import pytest

from tests.rdma.verbs import peers
from tests.rdma.verbs.peers import Peer

pytestmark = pytest.mark.verbs

MI = 1 << 20


@pytest.mark.parametrize("nbytes", [1, 7, 8, 4095, 4096, 65537, MI, 8 * MI + 3, 256 * MI])
def test_what_is_read_is_what_was_there_and_what_is_written_comes(owner: Peer, asking: Peer, nbytes: int) -> None:
    region = owner(peers.expose, "there", nbytes, 3)
    asking(peers.allocate, "here", nbytes)
    peers.introduce(asking, owner)
    asking(peers.move, "owner", "read", region, [(0, 0, nbytes)], "here")
    assert asking(peers.digest, "here") == owner(peers.digest, "there")
    asking(peers.fill, "here", 99)
    asking(peers.move, "owner", "write", region, [(0, 0, nbytes)], "here")
    assert asking(peers.digest, "here") == owner(peers.digest, "there")
