"""Pictures of notebook cells: `python docs/tutorials/draw_cells.py` writes a PNG for each entry of CELLS.

A picture shows a cell as it is stored in the notebook: its source, the text that it printed, its figure.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CELLS = {
    "actors_death.png": ("actors.ipynb", "killed = time.perf_counter()"),
    "actors_restart.png": ("actors.ipynb", 'legend = {"answered"'),
    "one_controller_loss.png": ("one_controller.ipynb", 'styles = (("first processes"'),
}
COLUMNS, LINE = 112, 0.15  # characters of a line, inches


def cell(notebook: str, text: str) -> dict[str, Any]:
    """Return the only code cell of the notebook that contains the text."""
    cells = json.loads((FOLDER / notebook).read_text())["cells"]
    (found,) = (each for each in cells if each["cell_type"] == "code" and text in "".join(each["source"]))
    return dict(found)


def digest(content: dict[str, Any]) -> str:
    """Return a digest of what a picture shows. The picture stores it as metadata."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parts(content: dict[str, Any]) -> tuple[str, str, Any]:
    """Return the source, the printed text and the figure (None if there is none)."""
    import matplotlib.image

    text, figure = "", None
    for output in content["outputs"]:
        text += "".join(output.get("text", ""))
        if png := output.get("data", {}).get("image/png"):
            figure = matplotlib.image.imread(io.BytesIO(base64.b64decode(png)))
    return "".join(content["source"]), text.strip(), figure


def wrapped(text: str) -> str:
    """Return the text with long lines broken, as a notebook's output is."""
    lines = (line[at : at + COLUMNS] for line in text.splitlines() for at in range(0, max(len(line), 1), COLUMNS))
    return "\n".join(lines)


def draw(content: dict[str, Any], path: Path) -> None:
    """Write the picture of a cell."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    source, text, image = parts(content)
    blocks = [(wrapped(source), "#f4f6f8")] + ([(wrapped(text), "#ffffff")] if text else [])
    heights = [LINE * (block.count("\n") + 2) for block, _ in blocks] + (
        [image.shape[0] / 100] if image is not None else []
    )
    figure, rows = plt.subplots(len(heights), figsize=(9, sum(heights)), height_ratios=heights, squeeze=False)
    figure.subplots_adjust(0.005, 0, 0.995, 1, hspace=0)
    for (axes,), (block, colour) in zip(rows, blocks, strict=False):
        axes.set(facecolor=colour, xticks=[], yticks=[])
        axes.spines[:].set_color("#cfd8dc" if colour != "#ffffff" else colour)
        at = {"transform": axes.transAxes, "va": "center", "family": "monospace", "fontsize": 8}
        axes.text(0.01, 0.5, block, parse_math=False, **at)
    if image is not None:
        rows[-1, 0].imshow(image, aspect="equal")
        rows[-1, 0].axis("off")
    figure.savefig(path, dpi=110, metadata={"Source": digest(content), "Software": None})
    plt.close(figure)


if __name__ == "__main__":
    for name, (notebook, text) in CELLS.items():
        draw(cell(notebook, text), FOLDER / name)
