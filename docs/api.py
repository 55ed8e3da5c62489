"""API reference: the entries of each public facade, and conversions of the project's text for Sphinx."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FACADES = tuple(
    "monarch_backend" + name
    for name in ("", ".process_group", ".actor", ".mesh", ".hosts", ".job", ".rdma", ".dtensor", ".testing", ".errors")
)


def public_names(facade: str) -> list[str]:
    """Return the names that the facade exports, in the order of its ``__all__``."""
    return list(getattr(importlib.import_module(facade), "__all__", ()))


def home(facade: str, name: str) -> str:
    """Return the first facade that exports this object under this name: the object has its entry there."""
    value = getattr(importlib.import_module(facade), name)
    return next(f for f in FACADES if name in public_names(f) and getattr(importlib.import_module(f), name) is value)


def entries(facade: str) -> str:
    """Return the facade's part of its page: its docstring, then one entry for each public name."""
    lines = ["```{eval-rst}", f".. automodule:: {facade}", "   :no-members:", ""]
    for name in public_names(facade):
        first = home(facade, name)
        if first != facade:
            lines += [f"- ``{facade}.{name}`` is :py:obj:`{first}.{name}`"]
            continue
        kind = _directive(getattr(importlib.import_module(facade), name))
        lines += ["", f".. {kind}:: {facade}.{name}"]
        lines += ["   :members:", "   :undoc-members:"] if kind in ("autoclass", "autoexception") else []
        lines += [""]
    return "\n".join([*lines, "```"])


def _directive(value: Any) -> str:
    if isinstance(value, type):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if callable(value) else "autodata"


def with_entries(text: str) -> str:
    """Return the page ``text`` with the line ``<!-- api: FACADE -->`` replaced by the facade's entries."""
    return re.sub(r"^<!-- api: (\S+) -->$", lambda found: entries(found.group(1)), text, flags=re.MULTILINE)


def convert_docstring(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Change a docstring in place: single backquotes to double ones, names like ``MONARCH_`` to words, not links."""
    for number, line in enumerate(lines):
        line = re.sub(r"(?<![`:\w])`([^`\n]+)`(?![`_])", r"``\1``", line)
        lines[number] = re.sub(r"(?<![`\w])([A-Za-z]\w*)_(?![\w`])", r"\1\\_", line)


def without_outside_links(text: str, page: Path) -> str:
    """Return the ``text`` of a page with links to files outside docs/ replaced by their paths in the repository."""

    def replaced(link: re.Match[str]) -> str:
        label, target = link.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return link.group()
        path = os.path.relpath((page.parent / target.partition("#")[0]).resolve(), DOCS.parent)
        if path.startswith("docs" + os.sep):
            return link.group()
        return f"`{path}`" if path in label or label.endswith(Path(path).name) else f"{label} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)", replaced, text)
