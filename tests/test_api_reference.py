"""The API reference of docs/ is complete, and each docstring has raised exceptions, units and an example."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch_backend
from monarch_backend import actor
from monarch_backend._actor import supervision

DOCS = Path(__file__).parents[1] / "docs"
_spec = importlib.util.spec_from_file_location("docs_api", DOCS / "api.py")
assert _spec and _spec.loader
api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(api)
PAGES = {
    facade: page
    for page in (DOCS / "reference" / "api").glob("*.md")
    for facade in re.findall(r"^<!-- api: (\S+) -->$", page.read_text(), re.MULTILINE)
}

WITHOUT_EXAMPLE = {
    "monarch_backend.process_group.create": "takes an object that only torch's init_process_group and new_group make",
}
"""Classes and functions without an example, and the reasons.

Exceptions need none: their docstrings say when they are raised.
"""

NOT_ARGUMENTS = {"StopIteration", "StopAsyncIteration", "NotImplementedError"}
"""Exceptions of protocols and of abstract methods, which a docstring need not name."""

SECONDS = {"timeout", "seconds", "heartbeat", "silence"}
"""Parameters whose unit a docstring must give."""


def test_reference_has_every_facade() -> None:
    assert set(PAGES) == set(api.FACADES)
    public = {"monarch_backend." + m.name for m in pkgutil.iter_modules(monarch_backend.__path__) if m.name[0] != "_"}
    assert public - set(api.FACADES) <= {"monarch_backend.cli"}


@pytest.mark.parametrize("facade", api.FACADES)
def test_reference_has_every_public_name(facade: str) -> None:
    module = importlib.import_module(facade)
    entries = api.with_entries(PAGES[facade].read_text())
    for name in getattr(module, "__all__", ()):
        entry = rf"^\.\. auto\w+:: {facade}\.{name}$|^- ``{facade}\.{name}`` is :py:obj:`"
        assert re.search(entry, entries, re.MULTILINE), f"{PAGES[facade].name} lacks {name}"
        value = getattr(module, name)
        if callable(value):
            assert value.__doc__, f"{facade}.{name} has no docstring"


def test_reference_index_has_every_page() -> None:
    index = (DOCS / "reference" / "api" / "index.md").read_text().split()
    for page in PAGES.values():
        assert page.stem in index


@pytest.mark.parametrize("facade", api.FACADES)
def test_docstrings_have_raises_units_and_an_example_that_runs(facade: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests of actors replace this hook for the whole session.
    monkeypatch.setattr(actor, "unhandled_fault_hook", supervision.end_program)
    found = [
        finding
        for name in api.public_names(facade)
        if api.home(facade, name) == facade
        for finding in findings(f"{facade}.{name}", getattr(importlib.import_module(facade), name))
    ]
    assert not found, f"{facade} lacks {len(found)}\n" + "\n".join(found)


def test_exemptions_are_in_use() -> None:
    for path in WITHOUT_EXAMPLE:
        facade, _, name = path.rpartition(".")
        assert ">>>" not in (getattr(importlib.import_module(facade), name).__doc__ or "")


def findings(path: str, value: Any) -> Iterator[str]:
    """Yield what is missing in the docstrings of a public class and its methods, or of a public function."""
    if not callable(value):
        return
    doc = value.__doc__ or ""
    if not isinstance(value, type):
        yield from missing_text(path, value, doc, "")
    else:
        seen: set[str] = set()
        for kind in value.__mro__:
            members = vars(kind) if kind is value or kind not in api.public_classes() else {}
            for name, member in members.items():
                if name not in seen and kind.__module__.startswith("monarch_backend"):
                    yield from missing_in_member(path, name, member, doc)
            seen |= vars(kind).keys()
    if isinstance(value, type) and issubclass(value, BaseException):
        if not re.search(r"\braise[sd]?\b", doc, re.IGNORECASE):
            yield f"{path}: when it is raised"
    elif ">>>" in doc:
        if f"{value.__module__}.{value.__qualname__}" not in examples_that_run(value.__module__):
            yield f"{path}: its example is not run"
    elif path not in WITHOUT_EXAMPLE:
        yield f"{path}: an example"


def missing_in_member(path: str, name: str, member: Any, doc: str) -> Iterator[str]:
    """Yield what is missing in the docstring of a method.

    ``doc`` is the docstring of its class. It may have the exceptions of operators.
    """
    function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    if not inspect.isfunction(function) or (name.startswith("_") and not name.endswith("__")):
        return
    own = function.__doc__ or ""
    if not name.startswith("_"):
        yield from missing_text(f"{path}.{name}", function, own, doc)
    elif name != "__getattr__":
        yield from missing_raises(f"{path}.{name}", function, own + doc)


def missing_text(path: str, function: Callable[..., Any], doc: str, doc_of_class: str) -> Iterator[str]:
    """Yield what is missing in the docstring of a function. The docstring of its class may have the units."""
    if not doc:
        yield f"{path}: a docstring"
        return
    yield from missing_raises(path, function, doc)
    for name, parameter in inspect.signature(function).parameters.items():
        kind = str(parameter.annotation)
        if name in SECONDS and "timedelta" not in kind and not re.search(r"\bseconds?\b", doc + doc_of_class):
            yield f"{path}: the unit of {name}"
        if re.search(r"\bD?Tensor\b", kind) and not re.search(r"\b(shape|dtype)", doc + doc_of_class):
            yield f"{path}: shape and dtype of {name}"


def missing_raises(path: str, function: Callable[..., Any], doc: str) -> Iterator[str]:
    for name in sorted(raised_by(function)):
        if not re.search(rf"\b{name}\b" if name else r"\b[Rr]aise", doc):
            yield f"{path}: raises {name or 'an exception'}"


def raised_by(function: Callable[..., Any]) -> set[str]:
    """Return the names of the classes in the function's own ``raise`` statements; "" for a statement without a name."""
    if inspect.unwrap(function).__code__.co_filename.startswith("<"):  # generated, for example by dataclass
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    names, nodes = set(), list(tree.body[0].body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(raised).rpartition(".")[2]
            names.add(name if name[0].isupper() else "")
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            nodes += ast.iter_child_nodes(node)
    return names - NOT_ARGUMENTS


@functools.cache
def examples_that_run(module: str) -> set[str]:
    """Return the names of the objects whose examples test_package.py runs with this module."""
    return {found.name for found in doctest.DocTestFinder().find(sys.modules[module]) if found.examples}
