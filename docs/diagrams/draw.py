"""Diagrams of the documentation: `python docs/diagrams/draw.py` writes an SVG file beside each text file.

A line of a text file is one element. Positions and sizes are in units of 10 pixels.

    size WIDTH HEIGHT
    group X Y WIDTH HEIGHT LABEL        a frame with its label at the top
    box NAME X Y WIDTH HEIGHT LABEL     a rectangle; "|" in the label begins a new line
    arrow FROM TO LABEL                 from the edge of one box to the edge of another; the label may be missing
    text X Y LABEL
"""

from __future__ import annotations

from html import escape
from pathlib import Path

UNIT = 10
FOLDER = Path(__file__).parent
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
font-family="sans-serif" font-size="13" text-anchor="middle">
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0 0 L8 4 L0 8 z" fill="#455a64"/></marker></defs>
<rect width="{width}" height="{height}" fill="#ffffff"/>"""


def draw(description: str) -> str:
    """Return the SVG text of a description. Raise ValueError for an element that does not exist."""
    boxes: dict[str, tuple[float, float, float, float]] = {}
    below, above = [], []
    head = ""
    for line in filter(None, map(str.strip, description.splitlines())):
        kind, _, rest = line.partition(" ")
        if kind == "size":
            width, height = (int(float(v) * UNIT) for v in rest.split())
            head = HEAD.format(width=width, height=height)
        elif kind == "group":
            *numbers, label = rest.split(maxsplit=4)
            x, y, w, h = (float(v) * UNIT for v in numbers)
            below += [_rectangle(x, y, w, h, "#f4f6f8", "#90a4ae"), _text(x + w / 2, y + 18, label, bold=True)]
        elif kind == "box":
            name, *numbers, label = rest.split(maxsplit=5)
            x, y, w, h = boxes[name] = tuple(float(v) * UNIT for v in numbers)  # type: ignore[assignment]
            lines = label.split("|")
            above.append(_rectangle(x, y, w, h, "#e3f2fd", "#1565c0"))
            first = y + h / 2 + 5 - 8 * (len(lines) - 1)
            above += [_text(x + w / 2, first + 16 * i, part) for i, part in enumerate(lines)]
        elif kind == "arrow":
            start, end, label = (*rest.split(maxsplit=2), "")[:3]
            above += _arrow(boxes[start], boxes[end], label)
        elif kind == "text":
            x, y, label = rest.split(maxsplit=2)
            above.append(_text(float(x) * UNIT, float(y) * UNIT, label))
        else:
            raise ValueError(f"no element {kind!r} in the line {line!r}; there are size, group, box, arrow, text")
    return "\n".join([head, *below, *above, "</svg>"]) + "\n"


def _rectangle(x: float, y: float, w: float, h: float, fill: str, stroke: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5" fill="{fill}" stroke="{stroke}"/>'


def _text(x: float, y: float, label: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="#263238"{weight}>{escape(label)}</text>'


def _arrow(start: tuple[float, ...], end: tuple[float, ...], label: str) -> list[str]:
    """Between the facing edges: horizontal if the boxes share rows, else vertical."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = start, end
    top, bottom = max(ay, by), min(ay + ah, by + bh)
    if top < bottom:
        y1 = y2 = (top + bottom) / 2
        x1, x2 = (ax + aw, bx) if ax < bx else (ax, bx + bw)
        at = (x1 + x2) / 2, y1 - 6
    else:
        left, right = max(ax, bx), min(ax + aw, bx + bw)
        x1, x2 = ((left + right) / 2,) * 2 if left < right else (ax + aw / 2, bx + bw / 2)
        y1, y2 = (ay + ah, by) if ay < by else (ay, by + bh)
        at = (x1 + x2) / 2 + 4, (y1 + y2) / 2 + 4
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#455a64" marker-end="url(#tip)"/>'
    if not label:
        return [line]
    anchor = "" if top < bottom else ' text-anchor="start"'
    return [line, f'<text x="{at[0]:g}" y="{at[1]:g}" fill="#455a64" font-size="12"{anchor}>{escape(label)}</text>']


if __name__ == "__main__":
    for file in sorted(FOLDER.glob("*.txt")):
        file.with_suffix(".svg").write_text(draw(file.read_text()))
