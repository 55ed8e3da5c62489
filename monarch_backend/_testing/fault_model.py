"""Fault model of a simulation: probabilities and durations of delays, failures and full memory."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Conditions:
    """Probabilities and durations of faults. Times are in simulated seconds, shares are from 0 to 1.

    >>> import random
    >>> Conditions.draw(random.Random(1)) == Conditions.draw(random.Random(1))
    True
    """

    delay: float = 50e-6
    """Typical time of a frame between two processes of one host."""
    late: float = 0.02
    """Share of frames that take longer, up to ``latest``. Later frames of the same link wait behind them."""
    latest: float = 5e-3
    """Longest time of a late frame, of a late turn of an actor, and until a silent process answers."""
    far: float = 200e-6
    """Typical time of a frame between two hosts. The same share of them is late."""
    gateway: float = 0.0
    """Time for which each frame to or from another host occupies the one thread of a gateway."""
    turn: float = 20e-6
    """Typical time until an actor takes its next message. The same share of turns is late."""
    noticed: float = 5e-3
    """Longest time until another process detects the end of a process."""
    starting: float = 20e-3
    """Longest time until a spawned process starts."""
    stillborn: float = 0.0
    """Share of processes that end before they connect."""
    unstartable: float = 0.0
    """Share of processes that fail to start."""
    kept_back: float = 0.3
    """Share of the links of a dying process that lose its last frames, which have not reached shared memory."""
    crossing: float = 0.5
    """Share of simultaneous connections between two processes that become two links."""
    silent: float = 0.0
    """Share of connections that the other process does not answer at once."""
    no_room: float = 0.0
    """Share of payloads above ``most_inline`` bytes that find no space in shared memory at first."""
    most_inline: int = 16 << 10
    """Bytes up to which a payload always finds space."""

    @classmethod
    def draw(cls, rng: random.Random, processes: int = 64) -> Conditions:
        """Return random conditions, from benign to hostile, for about ``processes`` processes."""
        return cls(
            delay=rng.choice((1e-6, 50e-6, 500e-6)),
            late=rng.choice((0.0, 0.02, 0.2)),
            latest=rng.choice((1e-3, 10e-3)),
            turn=rng.choice((1e-6, 20e-6, 500e-6)),
            noticed=rng.choice((1e-4, 5e-3, 30e-3)),
            starting=rng.choice((0.0, 20e-3)),
            stillborn=rng.choice((0.0, 0.0, 0.5 / processes)),
            unstartable=rng.choice((0.0, 0.0, 0.5 / processes)),
            kept_back=rng.choice((0.0, 0.3, 1.0)),
            crossing=rng.choice((0.0, 1.0)),
            silent=rng.choice((0.0, 0.0, 0.5)),
            no_room=rng.choice((0.0, 0.0, 0.3)),
            most_inline=rng.choice((300, 2000)),
        )

    def travel(self, rng: random.Random) -> float:
        """Return the seconds that one frame takes."""
        chance = rng.random()
        return self.latest * rng.random() if chance < self.late else self.delay * (0.5 + chance)

    def travel_far(self, rng: random.Random) -> float:
        """Return the seconds that one frame takes to another host."""
        chance = rng.random()
        return self.latest * rng.random() if chance < self.late else self.far * (0.5 + chance)

    def pause(self, rng: random.Random) -> float:
        """Return the seconds until an actor, or a new thread, runs."""
        chance = rng.random()
        return self.latest * rng.random() if chance < self.late else self.turn * (0.5 + chance)
