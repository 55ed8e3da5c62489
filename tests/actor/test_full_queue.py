"""Queue whose room a thread waits for: its actor, as far as it is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend._actor.calls.wait_notice import FullQueue, name_of
from monarch_backend._transport.local.frames import Kind
from monarch_backend._transport.local.peer import CreditWaiter, Peer


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Kind.CALL, "worker (gpus 1)"), (Kind.PORT, "gpus 1 of trainers"), (0, "gpus 1 of trainers")],
    ids=["call", "port of the same number", "several receivers"],
)
def test_full_queue_of_a_wait_is_an_actors_only_for_calls(kind: int, name: str) -> None:
    peers = [Peer(f"{number}" * 32, 0, label=f"gpus {number} of trainers") for number in range(2)]
    core: Any = SimpleNamespace(
        name="worker", bases=peers, peer=peers.__getitem__, where=lambda rank: f"gpus {rank}",
        extent=SimpleNamespace(labels=("gpus",)),
    )  # fmt: skip
    runtime: Any = SimpleNamespace(actors={7: core})
    waiter = CreditWaiter(receiver=peers[1], kind=kind, target=7)
    assert name_of(FullQueue.of(runtime, waiter) or waiter) == f"room in the queue of {name}"
