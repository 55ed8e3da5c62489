"""Settings of the documentation site: `make docs` builds it, offline and with warnings as errors."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

import monarch_backend

sys.path.insert(0, str(Path(__file__).parent))

import api
import cli

project = "monarch_backend"
author = "the monarch_backend authors"
copyright = author  # noqa: A001
release = version = monarch_backend.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["**/*.ipynb"]
html_theme = "furo"
html_title = f"monarch_backend {release}"
html_static_path: list[str] = []

myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 4

autodoc_member_order = "groupwise"
autodoc_typehints = "none"  # Signatures have them; a second copy in the text repeats each parameter.
python_use_unqualified_type_names = True


def setup(app: Sphinx) -> None:
    """Connect the conversions of api.py and cli.py."""
    app.connect("source-read", convert_page)
    app.connect("autodoc-process-docstring", api.convert_docstring)
    app.connect("env-check-consistency", check_reference)


def check_reference(app: Sphinx, environment: BuildEnvironment) -> None:
    """Fail if a public name, or a public method of it, has no entry in the API reference."""
    found = environment.domains.python_domain.objects
    wanted = set()
    for facade in api.FACADES:
        for name in api.public_names(facade):
            path, value = f"{api.home(facade, name)}.{name}", getattr(importlib.import_module(facade), name)
            wanted |= {path, *(f"{path}.{member}" for member in api.members(value))}
    if missing := sorted(wanted - set(found)):
        raise ExtensionError(f"no entry in the API reference: {', '.join(missing)}")


def convert_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Insert the API entries and the help of commands; replace links to files outside docs/ by their paths."""
    source[0] = api.with_entries(api.without_outside_links(source[0], Path(app.srcdir) / f"{name}.md"))
    if name == "reference/cli":
        source[0] = cli.with_help(source[0])
        for path in cli.SOURCES:
            app.env.note_dependency(str(path))
