"""Controller program over NICs. Worker processes import this module, so it does not import pytest."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import torch

from monarch_backend.actor import Actor, endpoint
from monarch_backend.hosts import attach_to_workers
from tests.hosts.support import PATIENCE

MIB = 1 << 20


class Echo(Actor):
    """Actor that describes or returns the values that it receives."""

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def digest(self, tensors: list[torch.Tensor]) -> list[str]:
        return [_digest(tensor) for tensor in tensors]


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(memoryview(tensor.numpy()).cast("B")).hexdigest()


def tensors(*addresses: str) -> None:
    """Send tensors of several sizes and counts to one and to all actors and back. Every message has other bytes."""
    hosts = attach_to_workers(addresses, heartbeat=0.5, silence=30.0)  # the virtual machine has one processor
    procs = hosts.spawn_procs({"gpus": 1})
    all_of_them = procs.spawn("echo", Echo)
    one = all_of_them.slice(hosts=0, gpus=0)
    for nbytes in (4 * MIB, 100, MIB + 3):
        sent = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        assert torch.equal(one.echo.call_one(sent).get(PATIENCE), sent), nbytes
        parts = [sent[: nbytes // 2].clone(), sent[nbytes // 2 :].clone(), torch.arange(5)]
        for answer in all_of_them.digest.call(parts).get(PATIENCE).values():
            assert answer == [_digest(part) for part in parts], nbytes
    mixed = {"weights": torch.ones(2 * MIB), "text": os.urandom(2 * MIB)}
    back = one.echo.call_one(mixed).get(PATIENCE)
    assert torch.equal(back["weights"], mixed["weights"])
    assert back["text"] == mixed["text"]
    futures = [one.echo.call_one(torch.full((2 * MIB,), i % 251, dtype=torch.uint8)) for i in range(4)]
    for i, future in enumerate(futures):
        assert future.get(PATIENCE).unique().tolist() == [i % 251]
    sys.stderr.flush()
    procs.stop().get(PATIENCE)
