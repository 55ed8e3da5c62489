"""Restart policy: which ranks are restarted after a death, with which back-off, and how often."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from monarch_backend._transport.local.links import Clock


@dataclass(frozen=True)
class Restart:
    """Policy for ranks that die: restart them, with back-off and a limit.

    ``strategy`` "one_for_one" restarts the dead rank, "all" restarts the whole mesh. The first restart comes after
    ``backoff`` seconds, each further one after twice the time, at most ``most_backoff`` seconds. More than
    ``max_restarts`` deaths within ``within`` seconds are a failure of the mesh, which is reported to its owner.

    Raises ValueError for another strategy, for negative ``max_restarts`` or ``backoff``, for ``within`` of 0 or less,
    and for ``most_backoff`` below ``backoff``.

    >>> Restart(max_restarts=2, within=10).delay(2)
    0.2
    """

    strategy: Literal["one_for_one", "all"] = "one_for_one"
    max_restarts: int = 3
    within: float = 60.0
    backoff: float = 0.1
    most_backoff: float = 5.0

    def __post_init__(self) -> None:
        if self.strategy not in ("one_for_one", "all"):
            raise ValueError(f"strategy={self.strategy!r}: it must be 'one_for_one' or 'all'")
        if self.max_restarts < 0 or self.within <= 0 or self.backoff < 0 or self.most_backoff < self.backoff:
            raise ValueError(
                "max_restarts and backoff must not be negative, within must be above 0, most_backoff at least backoff"
            )

    def delay(self, nth: int) -> float:
        """Return the seconds before the nth restart in a row. The first is 1."""
        return min(self.backoff * 2.0 ** (nth - 1), self.most_backoff)


def check_policy(restart: Any) -> None:
    if restart is not None and not isinstance(restart, Restart):
        raise TypeError(f"restart={restart!r}: give a policy, such as Restart(max_restarts=3), or nothing")


@dataclass
class RestartLimiter:
    """Times of a mesh's recent restarts."""

    policy: Restart
    clock: Clock
    _times: deque[float] = field(default_factory=deque)

    def allow(self) -> float | None:
        """Return the seconds until the restart after one more death, or None if there were too many."""
        now = self.clock.now()
        while self._times and self._times[0] <= now - self.policy.within:
            self._times.popleft()
        if len(self._times) >= self.policy.max_restarts:
            return None
        self._times.append(now)
        return self.policy.delay(len(self._times))

    def last_restart(self, delay: float) -> str:
        """Return a text for the restart that was just allowed: 'restart 2 of 3 within 60 s, in 0.2 s'."""
        policy = self.policy
        return f"restart {len(self._times)} of {policy.max_restarts} within {policy.within:g} s, in {delay:.2g} s"

    def used_up(self) -> str:
        """Return a text for a refusal of `allow`: '3 restarts were used up in 0.7 s (max_restarts=3, within=60 s)'."""
        policy, count = self.policy, len(self._times)
        limits = f"(max_restarts={policy.max_restarts}, within={policy.within:g} s)"
        if not count:
            return f"it is not restarted {limits}"
        seconds = self.clock.now() - self._times[0]
        return f"{count} restart{'s were' if count > 1 else ' was'} used up in {seconds:.1f} s {limits}"
