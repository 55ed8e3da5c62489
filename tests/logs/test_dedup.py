"""Log deduplication and rate limit, with a fake clock: no line is lost or doubled, and order is kept."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence

import pytest

from monarch_backend._logs import dedup
from monarch_backend._logs.dedup import Dropped, LineDeduplicator, RateLimit, ranks_of

Shown = list[tuple[list[int], bytes]]


def _fold_of(ranks: int, window: float = 1.0) -> LineDeduplicator:
    fold = LineDeduplicator(window)
    for rank in range(ranks):
        fold.join(rank)
    return fold


def _words(shown: Sequence[tuple[int, bytes]]) -> Shown:
    return [(ranks_of(ranks), line) for ranks, line in shown]


def _said_by(rank: int, shown: Sequence[tuple[int, bytes]]) -> list[bytes]:
    return [line for ranks, line in shown if ranks >> rank & 1]


def test_line_of_all_ranks_is_shown_at_once_after_earlier_lines() -> None:
    fold = _fold_of(3)
    fold.add(0, [b"hello 0", b"a", b"b"], 0.0)
    fold.add(1, [b"hello 1", b"a"], 0.1)
    assert fold.take(0.1) == []
    fold.add(2, [b"hello 2", b"a", b"b"], 0.2)
    assert _words(fold.take(0.2)) == [([0], b"hello 0"), ([1], b"hello 1"), ([2], b"hello 2"), ([0, 1, 2], b"a")]
    assert fold.deadline() == 1.0
    assert _words(fold.take(1.0)) == [([0, 2], b"b")]
    assert fold.deadline() is None


def test_a_line_waits_one_window_and_no_longer() -> None:
    fold = _fold_of(2)
    fold.add(0, [b"x"], 10.0)
    fold.add(0, [b"y"], 10.5)
    assert fold.take(10.99) == []
    assert _words(fold.take(11.0)) == [([0], b"x")]
    fold.add(1, [b"y"], 11.2)  # all ranks have written it now
    assert _words(fold.take(11.2)) == [([0, 1], b"y")]
    fold.add(1, [b"x"], 11.3)  # the line of rank 0 has been shown already
    assert _words(fold.take(12.3)) == [([1], b"x")]


def test_repeated_lines_are_all_shown() -> None:
    fold = _fold_of(2)
    fold.add(0, [b"-", b"a0", b"-", b"b0", b"-"], 0.0)
    fold.add(1, [b"-", b"a1", b"-", b"-"], 0.0)
    assert _words(fold.take(0.0)) == [
        ([0, 1], b"-"),
        ([0], b"a0"),
        ([1], b"a1"),
        ([0, 1], b"-"),
        ([0], b"b0"),
        ([0, 1], b"-"),
    ]


def test_opposite_orders_keep_each_ranks_own() -> None:
    fold = _fold_of(2)
    fold.add(0, [b"a", b"b"], 0.0)
    fold.add(1, [b"b", b"a"], 0.0)
    assert _words(fold.flush()) == [([0], b"a"), ([0, 1], b"b"), ([1], b"a")]


def test_long_chain_of_opposite_orders_keeps_each_ranks_own() -> None:
    ranks = 2000
    fold = _fold_of(ranks)
    said = {rank: [b"x%d" % (rank + 1), b"x%d" % rank] for rank in range(ranks)}
    for rank, lines in said.items():
        fold.add(rank, lines, 0.0)
    shown = fold.flush()
    assert {rank: _said_by(rank, shown) for rank in range(ranks)} == said


def test_ranks_that_left_are_not_waited_for() -> None:
    fold = _fold_of(3)
    fold.add(2, [b"bye"], 0.0)
    fold.leave(2)
    fold.add(0, [b"a"], 0.0)
    fold.add(1, [b"a"], 0.0)
    assert _words(fold.take(0.0)) == [([2], b"bye"), ([0, 1], b"a")]
    fold.add(0, [b"b"], 0.0)
    assert fold.take(0.0) == []
    fold.leave(0)
    fold.leave(1)
    assert _words(fold.take(0.0)) == [([0], b"b")]


def test_zero_window_neither_delays_nor_folds_lines() -> None:
    fold = _fold_of(2, window=1.0)
    fold.add(0, [b"old"], 0.0)
    fold.window = 0.0
    fold.add(0, [b"a"], 0.0)
    fold.add(1, [b"a"], 0.0)
    assert fold.deadline() is None
    assert _words(fold.take(0.0)) == [([0], b"old"), ([0], b"a"), ([1], b"a")]


def test_too_much_waiting_is_shown_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "MAX_PENDING_LINES", 100)
    fold = _fold_of(2, window=1e9)
    said = [b"%d" % i for i in range(1000)]
    shown = []
    for line in said:
        fold.add(0, [line], 0.0)
        shown += fold.take(0.0)
    assert 900 <= len(shown) < 1000
    fold.add(1, said[-10:], 0.0)
    shown += fold.flush()
    assert _said_by(0, shown) == said
    assert _words(shown)[-10:] == [([0, 1], line) for line in said[-10:]]


def test_too_many_bytes_waiting_are_shown_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "MOST_WAITING_BYTES", 1000)
    fold = _fold_of(2, window=1e9)
    fold.add(0, [b"%09d" % i for i in range(112)], 0.0)
    shown = fold.take(0.0)
    assert _words(shown)[0] == ([0], b"%09d" % 0)
    assert sum(len(line) for _, line in shown + fold.flush()) == 9 * 112


def _lines(rng: random.Random, count: int, kind: str, rank: int) -> list[bytes]:
    """Return a few repeated texts, or a common sequence with lines of this rank in between, or a mixture of both."""
    if kind == "alphabet":
        return [rng.choice((b"a", b"b", b"c", b"", b"d\xff")) for _ in range(count)]
    story: list[bytes] = []
    for step in range(count):
        story.append(b"step %d" % step if kind == "story" else b"step %d" % (step % 7))
        story += [b"rank %d at %d" % (rank, step)] * rng.choice((0, 0, 0, 1, 2))
        if kind == "mixed" and rng.random() < 0.1:
            rng.shuffle(story)
    return story


@pytest.mark.parametrize("kind", ["alphabet", "story", "mixed"])
@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_keep_every_line_once_and_in_order(seed: int, kind: str) -> None:
    """Random schedules of lines, time steps, polls, ended ranks and flushes. No line is shown after its window."""
    rng = random.Random(f"{seed} {kind}")
    ranks = rng.choice((1, 2, 3, 8, 70))
    fold = _fold_of(ranks)
    todo = {rank: _lines(rng, rng.randrange(1, 60), kind, rank) for rank in range(ranks)}
    said: dict[int, list[bytes]] = {rank: [] for rank in range(ranks)}
    when: dict[int, list[float]] = {rank: [] for rank in range(ranks)}
    shown: dict[int, list[bytes]] = {rank: [] for rank in range(ranks)}

    def hear(folded: Sequence[tuple[int, bytes]]) -> None:
        for who, line in folded:
            for rank in ranks_of(who):
                shown[rank].append(line)

    now = 0.0
    while todo:
        rank = rng.choice(list(todo))
        count = rng.randrange(0, 8)
        lines, todo[rank] = todo[rank][:count], todo[rank][count:]
        said[rank] += lines
        when[rank] += [now] * len(lines)
        fold.add(rank, lines, now)
        if not todo[rank]:
            del todo[rank]
            fold.leave(rank)
        now += rng.choice((0.0, 0.0, 0.01, 0.3))
        if rng.random() < 0.5:
            hear(fold.take(now))
            assert all(len(shown[r]) >= bisect_right(when[r], now - fold.window) for r in range(ranks))
            assert fold.deadline() is None or fold.deadline() > now
        elif rng.random() < 0.05:
            hear(fold.flush())
    hear(fold.take(now))
    assert fold.deadline() is None
    assert shown == said
    assert (
        not fold._index
        and not fold._bytes
        and not fold._complete
        and not any(queue for _, queue in fold._queues.values())
    )


@pytest.mark.parametrize("seed", range(40))
def test_common_lines_are_shown_once_for_any_interleaving(seed: int) -> None:
    """Without time passing, each common line is shown once, for any interleaving and any other lines of the ranks."""
    rng = random.Random(seed)
    ranks = rng.choice((2, 3, 8))
    common = [rng.choice((b"a", b"b", b"---")) for _ in range(40)]
    todo: dict[int, list[bytes]] = {}
    for rank in range(ranks):
        todo[rank] = [x for line in common for x in (*[b"own %d" % rank] * rng.choice((0, 0, 1)), line)]
    fold = _fold_of(ranks)
    shown: list[tuple[int, bytes]] = []
    while todo:
        rank = rng.choice(list(todo))
        count = rng.randrange(1, 8)
        fold.add(rank, todo[rank][:count], 0.0)
        del todo[rank][:count]
        if not todo[rank]:
            del todo[rank]
        shown += fold.take(0.0)
    assert not fold._complete
    everyone = (1 << ranks) - 1
    assert [line for who, line in shown if who == everyone] == common
    assert all(who == everyone or line.startswith(b"own") for who, line in shown)


def test_the_rate_is_per_rank_and_the_report_names_them_all() -> None:
    limit = RateLimit(per_second=100, burst=50)
    assert limit.admit(0, 50, 0.0) == 50
    assert limit.deadline() is None
    assert limit.admit(0, 10, 0.0) == 0
    assert limit.admit(3, 60, 0.5) == 50
    assert limit.admit(0, 60, 0.2) == 20
    assert limit.deadline() == 1.0
    assert limit.report(0.9) is None
    assert limit.report(1.0) == Dropped(0b1001, 60, 1.0)
    assert limit.report(9.0) is None and limit.deadline() is None
    assert limit.admit(0, 60, 100.0) == 50  # the burst, not the lines that a hundred seconds allow
    assert limit.report(100.5, early=True) == Dropped(1, 10, 0.5)


def test_limits_can_be_changed_and_taken_away() -> None:
    limit = RateLimit(per_second=1, burst=1)
    assert limit.admit(0, 5, 0.0) == 1
    limit.change(None, 1)
    assert limit.admit(0, 10**6, 0.0) == 10**6
    limit.change(10, 3)
    assert limit.admit(0, 5, 0.0) == 3
    assert limit.report(0.0, early=True) == Dropped(1, 6, 0.0)


@pytest.mark.parametrize("seed", range(10))
def test_the_rate_holds_over_time(seed: int) -> None:
    rng = random.Random(seed)
    limit = RateLimit(per_second=1000, burst=200)
    now, asked, passed, reported = 0.0, 0, 0, 0
    for _ in range(2000):
        now += rng.expovariate(500)
        count = rng.randrange(0, 10)
        asked += count
        passed += limit.admit(0, count, now)
        reported += dropped.lines if (dropped := limit.report(now)) else 0
    reported += dropped.lines if (dropped := limit.report(now, early=True)) else 0
    assert passed + reported == asked
    assert 1000 * now * 0.9 < passed <= 1000 * now + 200


def test_ranks_of_many_bits() -> None:
    ranks = sorted(random.Random(0).sample(range(5000), 700))
    assert ranks_of(sum(1 << rank for rank in ranks)) == ranks
    assert ranks_of(0) == []
