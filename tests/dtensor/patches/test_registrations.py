"""Each entry that the package makes in a table of torch has a row, and each row names entries that are made.

registrations_probe.py records the entries in a new process. The page with the rows is generated from the manifests.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from monarch_backend._core import patches, torch_version
from monarch_backend._core.patches import Registration
from monarch_backend._replay.torch_manifest import REPLAY
from monarch_backend.dtensor._patches import registrations
from monarch_backend.process_group import _c10d_manifest

ROOT = Path(__file__).parents[3]
RELEASE = torch_version.torch_version()
PLAIN = _c10d_manifest.REGISTRATIONS
ALL = (*PLAIN, *registrations.CONTROLLER, *registrations.WORKER)
IN_METADATA = "entry points "
"""Prefix of tables in package metadata, which are no Python objects: see `test_entry_points_of_torch_have_rows`."""
MAKES_ENTRIES = re.compile(
    r"torch\.library\.(?:Library|define|impl|register_\w+|custom_op)\(|_register_device_module\(|Backend\.register_backend\("
    r"|register_op_strategy|register_prop_rule\(|register_sharding\(|_register_single_dim_pointwise\("
    r"|torch\._C\._(?:set_(?:dtensor|only)\w*|ensure\w+|dispatch_tls_set\w+)\("
    r"|\._custom_op_handlers|\.op_(?:single_dim_)?strategy_funcs|\.op_to_\w+|\brules\[\S+\] = "
    r"|trace_rules\.add\(|_type_dispatch_impl\(|traceable_tensor_subclasses\.add\(|world\.pg_map\["
)
"""Code that makes an entry in a table of torch, or that refers to the table."""
MAKES_NONE = {
    "monarch_backend.dtensor._per_rank.shard_origins",  # looks up which operators have a strategy
    "monarch_backend.dtensor._torch_internals.own_handlers",  # takes a handler out while torch runs its own code
    "monarch_backend.dtensor._patches.registrations",
    "monarch_backend.process_group._backend_names",  # changes the name in torch's entry for a group of ours
}


class Made(NamedTuple):
    """Entries of one table that a program has changed. ``own``: ids of torch's own values, by entry."""

    names: Sequence[str]
    changed: frozenset[str]
    every: frozenset[str]
    own: dict[str, int]


@functools.cache
def made_by(program: str) -> tuple[Made, ...]:
    """Return the entries that a program of registrations_probe.py makes, by table."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.dtensor.patches.registrations_probe", program],
        capture_output=True, text=True, timeout=500, check=False, cwd=ROOT,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tuple(
        Made(each["names"], frozenset(each["changed"]), frozenset(each["all"]), each["own"])
        for each in json.loads(done.stdout.splitlines()[-1])
    )


def named_entries(row: Registration) -> Iterator[str]:
    """Yield the entries that a row names, in the forms of C++ tables and of Python tables."""
    if not isinstance(row.entries, str):
        yield from row.entries
        return
    reference, _, argument = row.entries.rstrip(")").partition("(")
    found: Any = patches.named(reference)
    for each in found(argument) if argument else found:
        yield f"aten::{each}" if isinstance(each, str) else str(each)
        if not isinstance(each, str):
            yield each.name()


def entries_of(row: Registration, made: Made) -> set[str]:
    """Return the entries of a table that a row covers."""
    known = {each for pattern in named_entries(row) for each in fnmatch.filter(made.every, pattern)}
    own = {made.own[each] for each in row.like if each in made.own}
    return known | {each for each, number in made.own.items() if number in own}


def without_row(made: Iterable[Made], rows: Iterable[Registration]) -> list[str]:
    """Return the entries that no row names."""
    found = []
    for table in made:
        of_table = [row for row in rows if row.is_for(RELEASE) and set(row.tables) & set(table.names)]
        named = {each for row in of_table for each in entries_of(row, table)}
        found += [f"{table.names[0]}: {each}" for each in sorted(table.changed - named)]
    return found


def not_made(made: Sequence[Made], rows: Iterable[Registration]) -> list[str]:
    """Return the tables and entries that rows name and no program makes.

    An entry counts if it is torch's own in all of the row's tables.
    """
    found = []
    for row in rows:
        if not row.is_for(RELEASE) or row.tables[0].startswith(IN_METADATA):
            continue
        of_row = [table for table in made if set(row.tables) & set(table.names)]
        named = {each for table in of_row for each in entries_of(row, table)}
        changed = {each for table in of_row for each in table.changed}
        if not of_row or not named:
            found.append(f"{row.tables}: {row.entries or row.like}")
        found += [f"{row.tables[0]}: {each}" for each in sorted(named - changed)]
    return found


def test_entries_of_a_controller_have_rows() -> None:
    assert without_row(made_by("controller"), (*PLAIN, *registrations.CONTROLLER)) == []


def test_entries_of_a_worker_have_rows() -> None:
    rows = (*PLAIN, *registrations.WORKER, *registrations.CONTROLLER)  # a worker imports a new operator, too
    assert without_row(made_by("worker"), rows) == []


def test_program_with_the_backend_only_makes_no_others() -> None:
    assert without_row(made_by("plain"), PLAIN) == []
    assert {name for table in made_by("plain") for name in table.names} == set(PLAIN[0].tables)


def test_rows_name_entries_that_are_made() -> None:
    assert not_made((*made_by("controller"), *made_by("worker")), ALL) == []


def test_made_up_entries_are_found() -> None:
    found = without_row(made_by("made_up"), ALL)
    handlers = "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers"
    assert sorted(found) == [
        "code that dynamo skips: json.decoder",
        "device modules: maia",
        "dispatch key Negative: aten::sigmoid",
        "dispatch key Negative: aten::sinh",
        "shapes of fake tensors: aten::sigmoid",
        "torch._C: _set_deterministic_algorithms",
        f"{handlers}: aten.sigmoid.default",
        "torch.serialization:_package_registry: builtins:tuple",
    ]


def test_made_up_rows_are_found() -> None:
    tables = ("torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",)
    made = made_by("controller")
    row = functools.partial(
        Registration, by="", at="first mesh", scope="process", kind="fix", why="", test="", since=(2, 0)
    )
    assert not_made(made, [row(tables, ("aten.slice_scatter.default", "aten.gather.default"))]) == []
    assert not_made(made, [row(tables, ("aten.sigmoid.default",))]) == [f"{tables}: ('aten.sigmoid.default',)"]
    assert not_made(made, [row(("torch:gone",), ("a",))]) == ["('torch:gone',): ('a',)"]
    unchanged = sorted(made[0].every - made[0].changed)[0]
    assert not_made(made, [row(tables, (unchanged,))]) == [f"{tables[0]}: {unchanged}"]


def test_entry_points_of_torch_have_rows() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    groups = set(re.findall(r'^\[project\.entry-points\."?(torch[\w.]+)"?\]$', text, re.MULTILINE))
    assert groups == {
        table.removeprefix(IN_METADATA) for row in ALL for table in row.tables if table.startswith(IN_METADATA)
    }


def test_modules_that_make_entries_are_named_by_a_row() -> None:
    """Modules that need a GPU or torch_xla are included, although no program here runs them."""
    found = set()
    for path in (ROOT / "monarch_backend").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if MAKES_ENTRIES.search(path.read_text()):
            found.add(module)
    makes = {row.by for row in (*ALL, *REPLAY) if not row.tables[0].startswith(IN_METADATA)}
    assert found - MAKES_NONE == makes
    assert found >= MAKES_NONE


@pytest.mark.parametrize(
    "row", [*ALL, *REPLAY], ids=lambda row: f"{row.by.rpartition('.')[2]}-{row.test.rpartition('::')[2]}"
)
def test_row_names_a_test_that_exists_and_says_why(row: Registration) -> None:
    path, _, name = row.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()
    assert row.why.endswith(".") and (row.entries or row.like)
    assert (ROOT / (row.by.replace(".", "/") + ".py")).is_file()
