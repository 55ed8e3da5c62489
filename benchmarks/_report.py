"""Report of collectives.py: the tables in Markdown, and one plot for each number of ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "monarch"


@dataclass
class Series:
    """Times of one contender in one case, in microseconds: a list for each round."""

    rounds: list[list[float]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(value for times in self.rounds for value in times)

    @property
    def p99(self) -> float:
        """99th percentile. With fewer than 100 times it is the maximum."""
        values = sorted(value for times in self.rounds for value in times)
        return values[min(int(len(values) * 0.99), len(values) - 1)]

    def over(self, other: Series) -> float:
        """Return the median of the rounds' ratios. Both times of a ratio were measured under the same noise."""
        pairs = zip(self.rounds, other.rounds, strict=False)
        return statistics.median(statistics.median(mine) / statistics.median(its) for mine, its in pairs)


# (case, size) -> contender -> times
Table = dict[tuple[str, int], dict[str, Series]]


def size_name(size: int) -> str:
    """Return a size with its unit: 8 B, 64 KiB, 1 MiB."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def microseconds(value: float) -> str:
    """Return a number with three significant digits, and from 100 on without a fraction."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(series: Series | None, ours: Series | None, name: str) -> str:
    if series is None or not series.rounds:
        return "-"
    text = f"{microseconds(series.median)} / {microseconds(series.p99)}"
    if name != OURS and ours is not None and ours.rounds:
        text += f" ({series.over(ours):.2f})"
    return text


def markdown(table: Table, contenders: Sequence[str]) -> str:
    """Return the table. A cell is: median / 99th percentile, in microseconds (median of the ratios to monarch)."""
    lines = [_row(["", "size", *contenders]), _row(["---"] * (len(contenders) + 2))]
    for (case, size), entries in table.items():
        cells = [_cell(entries.get(name), entries.get(OURS), name) for name in contenders]
        if any(cell != "-" for cell in cells):
            lines.append(_row([case, size_name(size) if size else "", *cells]))
    return "\n".join(lines)


def plot(table: Table, contenders: Sequence[str], floors: Sequence[str], title: str, file: Path) -> str | None:
    """Draw latency over size, a chart for each collective. Return None, or the reason why there is no plot."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is missing; pip install 'monarch_backend[bench]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(case for case, size in table if size))
    columns = min(3, len(cases))
    rows = -(-len(cases) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.8 * rows), squeeze=False, sharex=True)
    for panel in axes.flat[len(cases) :]:
        panel.set_visible(False)
    for panel, case in zip(axes.flat, cases, strict=False):
        for index, name in enumerate((*contenders, *floors)):
            style: dict[str, Any] = {"color": f"C{index}", "marker": "o", "markersize": 3}
            if name in floors:
                style = {"color": "black", "linestyle": (":", "-.")[floors.index(name) % 2], "linewidth": 1}
            points = _points(table, None if name in floors else case, name)
            if points:
                panel.loglog(points.keys(), points.values(), label=name, **style)
        panel.set_title(case, fontsize=10)
        panel.grid(True, which="major", alpha=0.3)
        ticks = [size for other, size in table if other == case and size]
        panel.set_xticks(ticks, [size_name(size) for size in ticks], rotation=45, fontsize=7)
        panel.minorticks_off()
        panel.set_ylabel("median, us")
    figure.suptitle(title)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=8, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return None


def _points(table: Mapping[tuple[str, int], dict[str, Series]], case: str | None, name: str) -> dict[int, float]:
    """Return size -> median for a contender in a case. For a floor, ``case`` is None."""
    return {
        size: entries[name].median
        for (other, size), entries in table.items()
        if case in (other, None) and size and name in entries and entries[name].rounds
    }
