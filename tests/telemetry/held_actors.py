"""Actors whose endpoints wait for a file, so that messages run and queue for as long as a test wants."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from monarch_backend._native import recording_layout
from monarch_backend.actor import Actor, concurrent_endpoint, endpoint

MANY = recording_layout["cell_count"] + 16
"""More messages than a process can show at the same time."""

POLL_S = 0.005


class Plain(Actor):
    @endpoint
    def hold(self, path: str) -> None:
        while not Path(path).exists():
            time.sleep(POLL_S)

    @endpoint
    def pass_by(self) -> None:
        pass


class Async(Actor):
    @endpoint
    async def hold(self, path: str) -> None:
        await self.wait_until_there(path)

    @endpoint
    async def pass_by(self) -> None:
        pass

    @concurrent_endpoint
    async def wait_for(self, path: str) -> None:
        await self.wait_until_there(path)

    async def wait_until_there(self, path: str) -> None:
        while not Path(path).exists():
            await asyncio.sleep(POLL_S)
