"""Controllers and hosts with other versions: which are refused, and which packages stay unchanged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from monarch_backend._hosts.agent import _is_code
from monarch_backend._hosts.protocol import Versions

HERE = Versions.here()


def _host(**others: str) -> Versions:
    return msgspec.structs.replace(HERE, **others)


def test_other_torch_version_is_refused_unless_allowed() -> None:
    [said] = HERE.differences(_host(torch="1.13.1"))
    assert said == f"torch is 1.13.1 there and {HERE.torch} with the controller"
    assert not Versions.here(any_torch=True).differences(_host(torch="1.13.1"))


@pytest.mark.parametrize("any_torch", [False, True])
def test_another_python_or_package_is_refused_always(any_torch: bool) -> None:
    mine = Versions.here(any_torch)
    assert [said.split()[0] for said in mine.differences(_host(python="3.1.4"))] == ["python"]
    assert [said.split()[0] for said in mine.differences(_host(monarch_backend="7"))] == ["monarch_backend"]
    assert not mine.differences(_host(python=HERE.python.rpartition(".")[0] + ".99"))


@pytest.mark.parametrize(("version", "is_code"), [(None, True), (HERE.torch + "+cu126", True), ("1.2.3", False)])
def test_directory_with_another_torch_is_not_code(tmp_path: Path, version: str | None, is_code: bool) -> None:
    if version is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    assert _is_code(str(tmp_path)) == is_code
    assert not _is_code(str(tmp_path / "missing"))
