"""How hard the simulated world makes it: delays, deaths at bad moments, memory that is full. No mechanism here."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Conditions:
    """What is drawn at random, and how often. Times are simulated seconds, shares are from 0 to 1.

    >>> import random
    >>> Conditions.draw(random.Random(1)) == Conditions.draw(random.Random(1))
    True
    """

    delay: float = 50e-6
    """On the way from one process to another, typically."""
    late: float = 0.02
    """Share of frames that take longer, up to ``latest``; those behind them wait, other senders' do not."""
    latest: float = 5e-3
    far: float = 200e-6
    """On the way from one host to another, typically; late as often as others."""
    gateway: float = 0.0
    """Of its one thread that a gateway spends on each frame that it sends to another host, or gets from there."""
    turn: float = 20e-6
    """Until an actor takes the next message, typically; it is late as often as frames are."""
    noticed: float = 5e-3
    """Until another process hears of a death, at most."""
    starting: float = 20e-3
    """Until a process that was asked for starts, at most."""
    stillborn: float = 0.0
    """Share of processes that end before they have connected."""
    unstartable: float = 0.0
    """Share of processes that cannot be started."""
    kept_back: float = 0.3
    """Share of the links of a dying process on which its last frames had not reached shared memory, and are lost."""
    crossing: float = 0.5
    """Share of the connections to a process that is connecting at the same time which make a second link."""
    silent: float = 0.0
    """Share of processes called which do not answer at once."""
    no_room: float = 0.0
    """Share of payloads above ``most_inline`` bytes for which there is no room in shared memory at first."""
    most_inline: int = 16 << 10

    @classmethod
    def draw(cls, rng: random.Random, processes: int = 64) -> Conditions:
        """Some conditions, from benign to hostile; ``processes`` is how many there will be, about."""
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
        """Seconds that one frame takes."""
        chance = rng.random()
        return self.latest * rng.random() if chance < self.late else self.delay * (0.5 + chance)

    def travel_far(self, rng: random.Random) -> float:
        """Seconds that one frame takes to another host."""
        chance = rng.random()
        return self.latest * rng.random() if chance < self.late else self.far * (0.5 + chance)

    def pause(self, rng: random.Random) -> float:
        """Seconds until an actor, or a thread that was just started, gets to work."""
        chance = rng.random()
        return self.latest * rng.random() if chance < self.late else self.turn * (0.5 + chance)
