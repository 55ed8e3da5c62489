"""Fault model of a simulation: probabilities and durations of delays, failures and full memory."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Conditions:
    """Delays and faults of a simulation. Times are simulated seconds, shares are probabilities from 0 to 1.

    >>> import random
    >>> from monarch_backend.testing import Conditions
    >>> Conditions.draw(random.Random(1)) == Conditions.draw(random.Random(1))
    True
    >>> slow = Conditions(delay=1e-3, late=0.2, latest=0.1)
    >>> slow.travel(random.Random(0)) <= 0.1
    True
    """

    delay: float = 50e-6
    """Typical time of a frame from one process to another: half of it to one and a half."""
    late: float = 0.02
    """Share of frames that take longer, up to ``latest``. Later frames of the same sender wait for them."""
    latest: float = 5e-3
    """Longest time of a late frame, and of a late turn."""
    remote_latency: float = 200e-6
    """Typical time of a frame from one host to another; ``late`` applies as well."""
    gateway: float = 0.0
    """Time of a gateway's thread for each frame to or from another host."""
    turn: float = 20e-6
    """Typical time until an actor takes the next message; ``late`` applies as well."""
    noticed: float = 5e-3
    """Longest time until another process is told of a death."""
    starting: float = 20e-3
    """Longest time until a requested process starts."""
    dies_at_start: float = 0.0
    """Share of processes that end before they connect."""
    unstartable: float = 0.0
    """Share of processes that fail to start."""
    kept_back: float = 0.3
    """Share of a dying process's links that lose its last frames, which have not reached shared memory."""
    crossing: float = 0.5
    """Share of simultaneous connections of two processes to each other that make a second link."""
    silent: float = 0.0
    """Share of called processes that do not answer at once."""
    no_room: float = 0.0
    """Share of payloads above ``most_inline`` bytes for which shared memory has no room at first."""
    most_inline: int = 16 << 10
    """Bytes up to which a payload needs no room in shared memory."""

    @classmethod
    def draw(cls, rng: random.Random, processes: int = 64) -> Conditions:
        """Draw conditions at random, from benign to hostile. ``processes``: the expected number of processes."""
        return cls(
            delay=rng.choice((1e-6, 50e-6, 500e-6)),
            late=rng.choice((0.0, 0.02, 0.2)),
            latest=rng.choice((1e-3, 10e-3)),
            turn=rng.choice((1e-6, 20e-6, 500e-6)),
            noticed=rng.choice((1e-4, 5e-3, 30e-3)),
            starting=rng.choice((0.0, 20e-3)),
            dies_at_start=rng.choice((0.0, 0.0, 0.5 / processes)),
            unstartable=rng.choice((0.0, 0.0, 0.5 / processes)),
            kept_back=rng.choice((0.0, 0.3, 1.0)),
            crossing=rng.choice((0.0, 1.0)),
            silent=rng.choice((0.0, 0.0, 0.5)),
            no_room=rng.choice((0.0, 0.0, 0.3)),
            most_inline=rng.choice((300, 2000)),
        )

    def travel(self, rng: random.Random) -> float:
        """Draw the time of one frame within a host, in simulated seconds."""
        return self._draw(rng, self.delay)

    def remote_delay(self, rng: random.Random) -> float:
        """Draw the time of one frame to another host, in simulated seconds."""
        return self._draw(rng, self.remote_latency)

    def pause(self, rng: random.Random) -> float:
        """Draw the time until an actor or a new thread runs, in simulated seconds."""
        return self._draw(rng, self.turn)

    def _draw(self, rng: random.Random, usual: float) -> float:
        chance = rng.random()
        return self.latest * rng.random() if chance < self.late else usual * (0.5 + chance)
