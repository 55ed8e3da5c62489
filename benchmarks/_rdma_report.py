"""Report of rdma.py: a table for each route, the verdict on each target, and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _report import Series, microseconds, size_name


@dataclass(frozen=True)
class Target:
    """A target: ``contender`` reaches ``share`` of the speed of ``base`` at these sizes, or at least ``rate`` GB/s."""

    contender: str
    base: str
    share: float
    sizes: Sequence[int]
    rate: float = float("inf")

    def lines(self, route: Route) -> list[str]:
        """Return a line with the verdict for each size."""
        text = f"{self.contender} >= {self.share:g} of {self.base}"
        text += f" or >= {self.rate:g} GB/s" if self.rate < float("inf") else ""
        return [f"- {text} at {size_name(size)}: {self._verdict(route, size)}" for size in self.sizes]

    def _verdict(self, route: Route, size: int) -> str:
        mine, its = route.rows.get(size, {}).get(self.contender), route.rows.get(size, {}).get(self.base)
        if mine is None or its is None:
            return "? (not measured)"
        ratio, rate = its.over(mine), size / mine.median / 1e3
        return f"{'yes' if ratio >= self.share or rate >= self.rate else 'NO'} ({ratio:.2f}, {rate:.2f} GB/s)"


@dataclass
class Route:
    """One table: size -> contender -> microseconds."""

    title: str
    floors: dict[str, str]  # contender -> the floor that it is compared with
    targets: Sequence[Target] = ()
    rows: dict[int, dict[str, Series]] = field(default_factory=dict)
    own: dict[str, Series] = field(default_factory=dict)  # contender -> Python's part of a transfer of 8 bytes
    notes: list[str] = field(default_factory=list)

    def add(self, size: int, name: str, seconds: Sequence[float]) -> None:
        """Add the times of one round."""
        self.rows.setdefault(size, {}).setdefault(name, Series()).rounds.append([s * 1e6 for s in seconds])

    def fail(self, name: str, reason: str) -> None:
        """Note why a contender failed, and drop its times."""
        self.notes.append(f"{name}: no figures: {reason}")
        for row in self.rows.values():
            row.pop(name, None)

    @property
    def names(self) -> list[str]:
        """Contenders that have times."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    def markdown(self) -> str:
        """Return the table: medians, rates, and in brackets the ratio to the contender's floor."""
        lines = [f"## {self.title}", "", _row(["", *self.names]), _row(["---", *["---:"] * len(self.names)])]
        for size, row in self.rows.items():
            lines.append(_row([size_name(size), *(self._cell(size, row, name) for name in self.names)]))
        lines += ["", *(f"- {note}" for note in self.notes)]
        lines += [f"- {name}, 8 B: {self._own(series)}" for name, series in self.own.items()]
        for target in self.targets:
            lines += target.lines(self)
        return "\n".join(lines) + "\n"

    def _cell(self, size: int, row: dict[str, Series], name: str) -> str:
        if name not in row:
            return "-"
        text = f"{microseconds(row[name].median)} us"
        if size >= 1 << 12:
            text += f", {size / row[name].median / 1e3:.3g} GB/s"
        floor = row.get(self.floors.get(name, ""))
        return f"{text} ({floor.over(row[name]):.2f})" if floor else text

    @staticmethod
    def _own(series: Series) -> str:
        each = [statistics.median(times) for times in series.rounds]
        return f"Python's own part is {microseconds(statistics.median(each))} us of a read"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plot(route: Route, file: Path) -> str | None:
    """Draw time over size and rate over size. Return None, or the reason why there is no plot."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is missing; pip install 'monarch_backend[bench]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5))
    for panel, rate in zip(axes, (False, True), strict=True):
        for index, name in enumerate(route.names):
            points = {size: row[name].median for size, row in route.rows.items() if name in row}
            values = [size / us / 1e3 if rate else us for size, us in points.items()]
            style = "--" if name in route.floors.values() else "-"
            panel.loglog(list(points), values, style, color=f"C{index}", marker="o", markersize=3, label=name)
        panel.set_ylabel("GB/s" if rate else "median, us")
        panel.grid(True, which="major", alpha=0.3)
        panel.set_xticks(list(route.rows), [size_name(size) for size in route.rows], rotation=45, fontsize=7)
        panel.minorticks_off()
    axes[0].legend(fontsize=7)
    figure.suptitle(route.title)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return None
