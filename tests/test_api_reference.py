"""The API reference of docs/: complete, and each entry has a docstring."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import monarch_backend

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
