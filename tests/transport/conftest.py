"""Fixtures for tests of connections between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transport.connected_hosts import Side


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(*secrets: bytes, **options: Any) -> Side:
        made.append(Side(*secrets, **options))
        return made[-1]

    yield make
    for side in made:
        side.tcp.close()
