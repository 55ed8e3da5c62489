"""Unauthenticated connections to a daemon's port do not disturb its clients."""

from __future__ import annotations

import pytest

from tests.hosts.support import Daemon, World


@pytest.mark.slow
def test_thousand_unauthenticated_connections_do_not_disturb_clients(world: World, daemons: list[Daemon]) -> None:
    world.run("strangers", daemons[0].address, daemons[0].pid)
    assert daemons[0].process.poll() is None
    assert "Traceback" not in daemons[0].output, daemons[0].output
    assert "a connection from 198.18.0.10 was refused" in daemons[0].output
    assert len(daemons[0].output.splitlines()) < 100, daemons[0].output
