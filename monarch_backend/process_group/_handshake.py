"""Handshake of the ranks of a new group: all come to the store in time and agree on a name for the attempt.

A store outlives a group. torchrun's store serves all restarts, and the TCPStore of a port may still be the previous
group's. Its keys may come from an earlier attempt, whose groups have the same names. The handshake excludes them:

1. Each rank writes a fresh nonce to ``here/RANK``. Rank 0 answers each nonce with the name of a new round. An
   answered nonce is not used again, so an earlier attempt can't be taken for this one.
2. In the round's own keys each rank reports. Rank 0 publishes the ranks that are absent at its deadline, or none. All
   ranks leave the handshake with the same outcome.

All keys of a group follow the round's name.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError, DistStoreError

GRACE_S = 0.5  # beyond the deadline, for rank 0's verdict to reach the others
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


class Deadline:
    """Deadline of a ``timeout`` that began when this object was made."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._start = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds left, at least one millisecond: stores take 0 for no limit."""
        return max(self._start + self.timeout.total_seconds() - time.monotonic(), 0.001)

    def left(self) -> timedelta:
        return timedelta(seconds=self.seconds())

    def passed(self) -> bool:
        return time.monotonic() >= self._start + self.timeout.total_seconds()


def agree(store: Store, rank: int, size: int, deadline: Deadline, at: str, who: str) -> str:
    """Return the name of the round, the same on all ranks.

    If ranks are absent at the deadline, raises DistStoreError on all other ranks; the last arguments are parts of its
    message. Raises DistNetworkError if the store closes.
    """
    if size == 1:
        return secrets.token_hex(8)
    book = PrefixStore("monarch", store)
    name, absent = _lead(book, size, deadline) if rank == 0 else _follow(book, rank, size, deadline)
    if absent:
        raise not_come(absent, size, deadline.timeout, at, who)
    return name


def _lead(book: Store, size: int, deadline: Deadline) -> tuple[str, list[int]]:
    """Run rank 0's part: answer the others until all report."""
    name = secrets.token_hex(8)
    attempt = PrefixStore(name, book)
    here, reports = _keys("here", range(size)), _keys("here", range(1, size))
    book.set(here[0], name)
    answered: set[bytes] = set()
    absent: list[int] = []
    if appear(book, here, deadline.seconds()):
        pause = _FIRST_PAUSE_S
        while not attempt.check(reports):  # a TCPStore logs a warning for each wait that times out
            # The nonce may be of an attempt that ended; then another nonce follows.
            if deadline.passed():
                absent = [rank for rank, key in enumerate(reports, 1) if not attempt.check([key])]
                break
            _answer(book, set(book.multi_get(here[1:])) - answered, name, absent, answered)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
    else:
        absent = _absent(book, range(size))
    attempt.set("absent", json.dumps(absent))
    book.set(here[0], "")
    if absent:
        came = [rank for rank in range(1, size) if rank not in absent]
        _answer(book, set(book.multi_get(_keys("here", came))) - answered, name, absent, answered)
        # The store may end with this process, so wait until the others have the outcome.
        appear(attempt, _keys("told", came), GRACE_S)
    return name, absent


def _answer(book: Store, nonces: set[bytes], name: str, absent: list[int], answered: set[bytes]) -> None:
    nonces = {nonce for nonce in nonces if nonce}
    if nonces:
        reply = json.dumps([name, absent])
        keys = [f"answer/{nonce.decode()}" for nonce in nonces]
        book.multi_set(keys, [reply] * len(keys))  # type: ignore[attr-defined] # torch's stub lacks it
        answered |= nonces


def _follow(book: Store, rank: int, size: int, deadline: Deadline) -> tuple[str, list[int]]:
    """Run the part of the other ranks: ask for the round's name, report, and wait for the outcome."""
    nonce, mine = secrets.token_hex(8), f"here/{rank}"
    book.set(mine, nonce)
    answer = f"answer/{nonce}"
    if not appear(book, [answer], deadline.seconds() + GRACE_S):
        # The nonce stays, because other ranks that give up now look for it.
        return "", _absent(book, (other for other in range(size) if other != rank)) or [0]
    name, absent = json.loads(book.get(answer))
    book.set(mine, "")
    _forget(book, answer)
    attempt = PrefixStore(name, book)
    if not absent:
        attempt.set(mine, "")
        if not appear(attempt, ["absent"], deadline.seconds() + GRACE_S):
            return name, [0]
        absent = json.loads(attempt.get("absent"))
        _forget(attempt, mine)
    if absent:
        attempt.set(f"told/{rank}", "")
    return name, absent


def _forget(store: Store, key: str) -> None:
    """Delete a key that no rank reads any more. A store may lack deletion, and may have ended."""
    with contextlib.suppress(RuntimeError):
        store.delete_key(key)


def appear(store: Store, keys: list[str], seconds: float) -> bool:
    """Wait until all ``keys`` are in the store; False after ``seconds``. Raises DistNetworkError if it closes."""
    try:
        store.wait(keys, timedelta(seconds=max(seconds, 0.001)))
    except DistNetworkError:
        raise
    except RuntimeError:  # DistStoreError, and whatever a store in Python raises
        return False
    return True


def exchange(store: Store, name: str, rank: int, size: int, mine: Any, deadline: Deadline, who: str) -> list[Any]:
    """Return the values that the ranks give as ``mine``, as JSON.

    Raises DistStoreError that names the ranks without a value in time.
    """
    store.set(f"{name}/{rank}", json.dumps(mine))
    keys = _keys(name, range(size))
    if not appear(store, keys, deadline.seconds()):
        absent = [other for other, key in enumerate(keys) if not store.check([key])]
        raise not_come(absent, size, deadline.timeout, "in the group's store", who)
    return [json.loads(value) for value in store.multi_get(keys)]


def _keys(name: str, ranks: Iterable[int]) -> list[str]:
    return [f"{name}/{rank}" for rank in ranks]


def _absent(book: Store, ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if not book.check([f"here/{rank}"]) or not book.get(f"here/{rank}")]


def not_come(absent: list[int], size: int, waited: timedelta, at: str, who: str) -> DistStoreError:
    """Return the error that names ranks which are not there in time."""
    named = ", ".join(map(str, absent[:16])) + (f" and {len(absent) - 16} more" if len(absent) > 16 else "")
    ranks, have = ("rank", "has") if len(absent) == 1 else ("ranks", "have")
    return DistStoreError(
        f"{ranks} {named} of {size} {have} not come: no message from {'it' if len(absent) == 1 else 'them'} "
        f"{at} within {waited.total_seconds():g} s. Look there for an error or a process that never started; all "
        f"ranks need the same address and world size; a longer timeout= waits longer. {who}"
    )
