"""The two halves of the ordinary run: no test falls between them."""

from __future__ import annotations

from pathlib import Path

from tests import halves


def test_each_test_is_in_one_of_them() -> None:
    first, second = (
        [file for path in map(Path, half) for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
        for half in halves.halves()
    )
    assert sorted(first + second) == sorted(halves.HERE.rglob("test_*.py"))
    assert second
