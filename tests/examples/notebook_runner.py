"""Runner of notebooks: execute all cells and read their outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat

from tests.examples.example_runner import run

DOCS = Path(__file__).parents[2] / "docs" / "tutorials"
EXECUTE = """
import sys

import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
# Unix sockets, in this folder: no port to collide with, and no notice that TCP is not encrypted.
client = NotebookClient(notebook, timeout=60, kernel_name="python3")
client.create_kernel_manager()
client.km.transport, client.km.ip = "ipc", "kernel"
client.execute()
nbformat.write(notebook, "executed.ipynb")
"""


def execute(name: str, scratch: Path) -> nbformat.NotebookNode:
    """Run a notebook in ``scratch`` and return it with its outputs."""
    run("-", str(DOCS / name), scratch, stdin=EXECUTE)
    return nbformat.read(scratch / "executed.ipynb", 4)


def text(notebook: nbformat.NotebookNode, stream: str = "stdout") -> str:
    """Return the text that the cells have written to a stream."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == stream)


def pictures(notebook: nbformat.NotebookNode) -> list[int]:
    """Return the number of pictures in each cell's output."""
    return [sum("image/png" in output.get("data", {}) for output in cell.get("outputs", [])) for cell in notebook.cells]


def is_stored(name: str, executed: nbformat.NotebookNode, count: int) -> None:
    """Check that the notebook in the repository was run as a whole, and has ``count`` pictures in the same cells."""
    stored = nbformat.read(DOCS / name, 4)
    assert pictures(stored) == pictures(executed)
    assert sum(pictures(stored)) == count
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run all cells, then save it"
    assert (DOCS / name).stat().st_size < 300_000
