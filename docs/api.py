"""API reference: the entries of each public facade, and conversions of the project's text for Sphinx."""

from __future__ import annotations

import functools
import importlib
import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FACADES = tuple(
    "monarch_backend" + name
    for name in (
        "",
        ".process_group",
        ".telemetry",
        ".actor",
        ".mesh",
        ".hosts",
        ".job",
        ".rdma",
        ".dtensor",
        ".testing",
        ".errors",
    )
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
        value = getattr(importlib.import_module(facade), name)
        kind = _directive(value)
        lines += ["", f".. {kind}:: {facade}.{name}"]
        if isinstance(value, type):
            lines += [
                "   :members:",
                "   :undoc-members:",
                f"   :inherited-members: {', '.join(_documented_bases(value))}",
            ]
        lines += [""]
    return "\n".join([*lines, "```"])


@functools.cache
def public_classes() -> set[type]:
    """Return the classes that have an entry."""
    values = (getattr(importlib.import_module(facade), name) for facade in FACADES for name in public_names(facade))
    return {value for value in values if isinstance(value, type)}


def members(value: Any) -> list[str]:
    """Return the public methods and properties of a class, with those of its private bases in this package."""
    if not isinstance(value, type):
        return []
    kinds = [kind for kind in value.__mro__ if kind.__name__ not in _documented_bases(value)]
    found = {name: member for kind in reversed(kinds) for name, member in vars(kind).items() if name[0] != "_"}
    return [name for name, member in found.items() if callable(member) or isinstance(member, (property, classmethod))]


def _documented_bases(value: type) -> list[str]:
    """Return the bases whose members are documented elsewhere: with their own entry, or by another package."""
    return [kind.__name__ for kind in value.__mro__[1:] if not _is_private(kind)]


def _is_private(kind: type) -> bool:
    return kind.__module__.startswith("monarch_backend.") and kind not in public_classes()


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
