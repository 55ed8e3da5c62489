"""Report of actors.py: cases, targets, the table in Markdown and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _actor_runners import Peer
from _report import Series, microseconds

OURS, FLOOR = "ours", "floor"
PINNED = ("one_core", "two_cores")  # cases that only the floor has
Row = dict[str, Series]  # peer's key -> measured values, in the unit of the case


@dataclass(frozen=True)
class Target:
    """A target for ``contender``: a limit, or a factor by which it is better than contender ``base``."""

    text: str
    limit: float | None = None
    base: str = ""
    times: float = 1.0
    contender: str = OURS

    def verdict(self, case: Case, row: Row) -> str:
        """Return "yes", "NO", or "?" if a value is missing."""
        if self.contender not in row or (self.base and self.base not in row):
            return "?"
        if self.limit is None:
            met = case.better(row[self.base], row[self.contender]) >= self.times
        else:
            met = row[self.contender].median >= self.limit if case.higher else row[self.contender].median <= self.limit
        return "yes" if met else "NO"


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    key: str
    title: str
    unit: str
    targets: Sequence[Target] = ()
    higher: bool = False  # higher values are better
    tail: bool = False  # there are enough values for a 99th percentile

    def better(self, its: Series, mine: Series) -> float:
        """Return the factor by which ``mine`` is better than ``its``: the median of the rounds' ratios."""
        return mine.over(its) if self.higher else its.over(mine)


def _fifth(peer: str = "torchmonarch") -> Target:
    return Target(f"<= 1/5 {peer}", base=peer, times=5)


CASES = (
    Case(
        "round_trip",
        "call_one, round trip",
        "us",
        (
            _fifth(),
            Target("<= 2 floors", base=FLOOR, times=0.5),
            Target("<= 20 us spinning", limit=20),
        ),
        tail=True,
    ),
    Case(PINNED[0], "the same, on one core", "us", tail=True),
    Case(PINNED[1], "the same, on two cores", "us", tail=True),
    Case(
        "pipelined",
        "call_one, pipelined",
        "calls/s",
        (
            Target(">= 50,000", limit=50_000),
            Target(">= 5 torchmonarch", base="torchmonarch", times=5),
            Target(">= 5 Ray", base="ray", times=5),
        ),
        higher=True,
    ),
    Case("cast_8", "call, 8 processes", "us", (_fifth(),), tail=True),
    Case("cast_64", "call, 64 processes", "us", (_fifth(),)),
    Case("tensor", "64 MiB tensor as argument", "GB/s", (Target(">= 3", limit=3),), higher=True),
    Case("warm_8", "start of 8 processes, warm", "s", (Target("<= 0.5", limit=0.5),)),
    Case("cold_8", "start of 8 processes, cold", "s"),
    Case("warm_64", "start of 64 processes, warm", "s", (Target("<= 3", limit=3),)),
    Case("cold_64", "start of 64 processes, cold", "s"),
    Case("death", "SIGKILL to the caller's error", "ms", (Target("<= 50", limit=50),)),
    Case("memory", "memory of an idle worker, not shared", "MB", (Target("<= 40", limit=40),)),
)


class Results:
    """Measured values, and the reasons for missing ones."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.reasons: dict[tuple[str, str], str] = {}  # (case, peer)

    def add(self, case: str, peer: str, values: list[float]) -> None:
        """Add the values of one round."""
        self.rows.setdefault(case, {}).setdefault(peer, Series()).rounds.append(values)

    def fail(self, case: str, peer: str, reason: str) -> None:
        """Record why a peer has no result in a case, and drop the values of its earlier rounds."""
        self.reasons.setdefault((case, peer), reason)
        self.rows.get(case, {}).pop(peer, None)

    def median(self, case: str, peer: str) -> float | None:
        """Return the median, or None if there are no values."""
        series = self.rows.get(case, {}).get(peer)
        return series.median if series else None


def _number(value: float, unit: str) -> str:
    if value >= 1000 and unit != "us":
        return f"{value:,.0f}"
    return microseconds(value) if unit == "us" else f"{value:.3g}"


def _cell(case: Case, row: Row, key: str, failed: bool) -> str:
    if key not in row:
        return "-" if failed else ""
    series = row[key]
    text = _number(series.median, case.unit)
    if case.tail:
        text += f" / {_number(series.p99, case.unit)}"
    if key != OURS and OURS in row:
        times = case.better(series, row[OURS])
        text += f" ({times:.2g}x)" if times < 99 else f" ({times:.0f}x)"
    return text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _derived(results: Results, peers: Sequence[Peer]) -> list[str]:
    """Return rows for the cost of 64 processes over 8, and for our cold minus warm start in units of torch imports."""
    growth = []
    for peer in peers:
        few, many = results.median("cast_8", peer.key), results.median("cast_64", peer.key)
        growth.append(f"{many / few:.2g}" if few and many else "")
    lines = [_line(["call, 64 processes over 8", "", "", *growth])] if any(growth) else []
    for procs in (8, 64):
        torch_import = _difference(results, f"cold_{procs}", f"warm_{procs}", FLOOR)
        more = _difference(results, f"cold_{procs}", f"warm_{procs}", OURS)
        if more is not None and torch_import:
            cells = [f"{more / torch_import:.2g}" if peer.key == OURS else "" for peer in peers]
            lines.append(_line([f"start of {procs} processes, cold less warm", "imports of torch", "1", *cells]))
    return lines


def _difference(results: Results, one: str, other: str, peer: str) -> float | None:
    first, second = results.median(one, peer), results.median(other, peer)
    return None if first is None or second is None else first - second


def markdown(results: Results, peers: Sequence[Peer]) -> str:
    """Return the table, a row per case, and below it the reasons for missing values."""
    lines = [_line(["", "unit", "must", *[peer.name for peer in peers]]), _line(["---"] * (len(peers) + 3))]
    reasons: dict[str, list[str]] = {}
    for case in CASES:
        row = results.rows.get(case.key, {})
        failed = {peer.key for peer in peers if (case.key, peer.key) in results.reasons}
        if not row and not failed:
            continue
        targets = "; ".join(f"{target.text}: {target.verdict(case, row)}" for target in case.targets)
        cells = [_cell(case, row, peer.key, peer.key in failed) for peer in peers]
        lines.append(_line([case.title, case.unit, targets, *cells]))
        for peer in peers:
            if peer.key in failed:
                reasons.setdefault(f"{peer.name}: {results.reasons[case.key, peer.key]}", []).append(case.title)
    lines += _derived(results, peers)
    notes = [f"- no figure ({', '.join(titles)}) of {reason}" for reason, titles in reasons.items()]
    return "\n".join([*lines, "", *notes])


def plot(results: Results, peers: Sequence[Peer], file: Path) -> str | None:
    """Draw one bar chart per case. Return None, or the reason why there is no plot."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is missing; pip install 'monarch_backend[bench]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in CASES if case.key not in PINNED and results.rows.get(case.key)]
    if not cases:
        return "no plot: nothing was measured"
    columns = min(4, len(cases))
    rows = -(-len(cases) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 2.8 * rows), squeeze=False)
    for panel in axes.flat[len(cases) :]:
        panel.set_visible(False)
    for panel, case in zip(axes.flat, cases, strict=False):
        shown = [(index, peer) for index, peer in enumerate(peers) if peer.key in results.rows[case.key]][::-1]
        medians = [results.rows[case.key][peer.key].median for _, peer in shown]
        colors = ["black" if peer.key == FLOOR else f"C{index}" for index, peer in shown]
        bars = panel.barh([peer.name for _, peer in shown], medians, color=colors)
        panel.bar_label(bars, [f" {_number(value, case.unit)}" for value in medians], fontsize=7)
        panel.set_xscale("log")
        panel.set_xlim(min(medians) / 3, max(medians) * 6)
        panel.tick_params(labelsize=7)
        panel.set_title(f"{case.title}, {case.unit} ({'more' if case.higher else 'less'} is better)", fontsize=8)
        for target in case.targets:
            if target.limit is not None and target.contender == OURS:
                panel.axvline(target.limit, color="gray", linestyle=":", linewidth=1)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return None
