"""The table of settings is complete, documented, and checked where the package is first used."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import env

ROOT = Path(__file__).parents[1]
COLUMNS = ("variable", "type", "default", "unit", "values", "meaning")


def _rows() -> list[tuple[str, ...]]:
    """Return a row of `COLUMNS` for each setting, as text. An empty default means: unset."""
    return [
        (each.name, each.type, _default(each.default), each.unit, each.values, each.doc)
        for each in env.SETTINGS.values()
    ]


def _default(default: Any) -> str:
    if default is None or default == ():
        return ""
    return str(int(default)) if isinstance(default, bool) else str(default)


def _table() -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *((f"`{name}`", *rest) for name, *rest in _rows())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_settings_page_is_the_table() -> None:
    page, table = (ROOT / "docs/reference/settings.md").read_text(), _table()
    assert table in page, f"docs/reference/settings.md needs this table:\n{table}"


def test_every_variable_that_is_read_is_in_the_table() -> None:
    named = set()
    for file in [*(ROOT / "monarch_backend").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), ROOT / "setup.py"]:
        read = r'(?:"(MONARCH_[A-Z_]+)")' if file.suffix == ".py" else r'getenv\("(MONARCH_[A-Z_]+)"\)'
        named |= set(re.findall(read, file.read_text()))
    # an example of a misspelt name
    named = {name for name in named if not name.endswith("_")} - env.FOREIGN - {"MONARCH_SMH"}
    assert named - set(env.SETTINGS) == set()
    assert "MONARCH_GPU_DRIVER" in named and "MONARCH_SHM" in named


_READS = ("get", "pop", "setdefault", "getenv", "getenvb")


def _read(node: ast.AST) -> ast.expr | None:
    """Return the name that this expression reads from the environment, or None."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        of, name = node.value, node.slice
    elif isinstance(node, ast.Call) and node.args and getattr(node.func, "attr", "") in _READS:
        assert isinstance(node.func, ast.Attribute)
        of, name = node.func.value, node.args[0]
    else:
        return None
    return name if ast.unparse(of) in ("os", "os.environ", "os.environb", "environ", "environment") else None


def test_only_the_table_reads_the_environment() -> None:
    """Other modules call ``env.get``, and the compiled core reads no variable."""
    found = []
    for file in (ROOT / "monarch_backend").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = _read(node)
            if name is not None and "MONARCH_" in ast.unparse(name):
                found.append(f"{file.relative_to(ROOT)}:{name.lineno}")
    assert found == []
    native = {
        (file.name, name)
        for file in (ROOT / "csrc").rglob("*")
        if file.suffix in (".cpp", ".h") and "stress" not in file.parts
        for name in re.findall(r"\bgetenv\(([^)]*)\)", file.read_text())
    }
    assert native == set()


def test_reads_of_the_environment_are_found() -> None:
    texts = [
        'os.environ["MONARCH_A"]',
        'os.environ.get("MONARCH_A", "")',
        'os.getenv("MONARCH_A")',
        'environ.pop(f"MONARCH_{x}")',
        'os.environb.get(b"MONARCH_A")',
    ]
    for text in texts:
        name = _read(ast.parse(text, mode="eval").body)
        assert name is not None and "MONARCH_" in ast.unparse(name), text
    stored = ast.parse('os.environ["MONARCH_A"] = "1"').body[0]
    assert not any(_read(node) for node in ast.walk(stored))


def test_rows_have_a_cell_per_column() -> None:
    rows = _rows()
    assert rows[1][:4] == ("MONARCH_SHM_ARENA_BYTES", "integer", "268435456", "bytes")
    assert [row[0] for row in rows] == list(env.SETTINGS)
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert {row[1] for row in rows} == {"flag", "integer", "choice", "text", "path", "list"}
    for name, kind, _, unit, values, doc in rows:
        assert values and doc.endswith("."), name
        assert unit == "bytes" or not name.endswith("_BYTES"), name
        assert kind == "integer" or not unit, name


@pytest.mark.parametrize("name", [name for name, setting in env.SETTINGS.items() if setting.parse is not str])
def test_bad_value_raises_with_the_valid_ones(name: str) -> None:
    for text in ("yes?", "-1", "1.5", "\u00b2"):
        if name == "MONARCH_RDMA_DEVICES":
            text = f"{text}:0"
        with pytest.raises(ValueError, match=re.escape(f"{name}={text!r}: {env.SETTINGS[name].values}")):
            env.check({name: text})
    env.check({name: ""})


def test_unknown_name_raises_with_the_nearest_one() -> None:
    nearest = r"MONARCH_DEBUGG is not a setting; did you mean MONARCH_DEBUG\? Settings are: "
    with pytest.raises(ValueError, match=nearest):
        env.check({"MONARCH_DEBUGG": "1"})
    with pytest.raises(ValueError, match=r"MONARCH_XYZZY is not a setting\. Settings are: MONARCH_SHM, "):
        env.check({"MONARCH_XYZZY": "1"})
    with pytest.warns(RuntimeWarning, match="MONARCH_XYZZY is not a setting"):
        env.check({"MONARCH_XYZZY": "1", "MONARCH_UNKNOWN_SETTINGS": "warn"})


def test_names_of_others_are_accepted() -> None:
    env.check({"MONARCH_FILE_LOG": "debug", "MONARCH_TEST_SEED": "3", "MONARCHY": "1", "PATH": ""})


_USES = {
    "group": """
import torch.distributed as dist
dist.init_process_group("monarch", store=dist.HashStore(), rank=0, world_size=1)
""",
    "program": """
from monarch_backend.actor import this_host
this_host().spawn_procs({"gpus": 1})
""",
    "environment of processes": """
import os
from monarch_backend.actor import this_host
bad = {name: os.environ.pop(name) for name in ("MONARCH_BUSY_POL",)}
this_host().spawn_procs({"gpus": 1}, env=bad)
""",
    "up": "import sys; from monarch_backend.cli import main; sys.exit(main(['up']))",
    "run": "import sys; from monarch_backend.cli import main; sys.exit(main(['run', 'nothing.py']))",
}


@pytest.mark.parametrize("use", _USES)
def test_first_use_with_a_bad_setting_fails(use: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _USES[use]],
        env={**os.environ, "MONARCH_BUSY_POL": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (1, 2), done
    assert "MONARCH_BUSY_POL is not a setting; did you mean MONARCH_BUSY_POLL?" in done.stderr, done.stderr


def test_import_ignores_settings() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch, monarch_backend"],
        env={**os.environ, "MONARCH_BUSY_POL": "1", "MONARCH_SHM": "yes?"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
