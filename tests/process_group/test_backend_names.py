"""MONARCH_AS: a program that asks for torch's backends by name gets groups of this package, and sees torch's names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend import _autoload
from monarch_backend.process_group import MonarchProcessGroup, _backend_names
from tests.support.ranks import init, run_ranks

ROOT = Path(__file__).parents[2]


def _groups(rank: int, address: str, backend: str | None) -> dict[str, Any]:
    """Make the default group and three more; return their kinds and names, and the result of an all_reduce in each."""
    _autoload.take_names()
    init(rank, 2, address, backend)  # type: ignore[arg-type]
    groups = {
        "default": dist.group.WORLD,
        "new": dist.new_group([0, 1]),
        "named": dist.new_group([0, 1], backend="gloo"),
        "mesh": dist.device_mesh.init_device_mesh("cpu", (2,)).get_group(),
    }
    single = [dist.new_group([member]) for member in range(2)]
    found: dict[str, Any] = {"of another rank": single[1 - rank] is dist.GroupMember.NON_GROUP_MEMBER}
    for name, group in groups.items():
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x, group=group)
        ours = isinstance(group, MonarchProcessGroup)
        found[name] = ours, dist.get_backend(group), dist.get_backend_config(group), x.tolist()
    dist.destroy_process_group()
    return found


def _expected(backend: str, config: str, named: bool = True) -> list[dict[str, Any]]:
    total = [3.0, 3.0, 3.0]
    group = (True, backend, config, total)
    gloo = (named, "gloo", "cpu:gloo,cuda:gloo", total)
    return [{"default": group, "new": group, "named": gloo, "mesh": group, "of another rank": True}] * 2


@pytest.mark.parametrize(
    ("names", "backend", "config"),
    [
        ("gloo", "gloo", "cpu:gloo,cuda:gloo"),
        ("gloo", "GLOO", "cpu:gloo,cuda:gloo"),
        ("gloo,nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("gloo", "cuda:nccl,cpu:gloo", "cuda:nccl,cpu:gloo"),
        ("gloo", None, "cpu:gloo"),
        ("gloo", "monarch", "cpu:monarch,cuda:monarch"),
        ("nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
    ],
)
def test_groups_for_a_name_of_torch_are_ours(names: str, backend: str | None, config: str) -> None:
    if backend is None and torch.accelerator.is_available():
        pytest.skip("without a name torch makes the group of the accelerator")
    found = run_ranks(_groups, 2, backend, backend=None, env={"MONARCH_AS": names})
    shown = found[0]["default"][1] if backend is None else backend.lower()  # torch may call the default undefined
    assert found == _expected(shown, config, named="gloo" in names)


def _plain(rank: int, address: str, backend: str) -> bool:
    _autoload.take_names()
    init(rank, 2, address, backend)
    ours = isinstance(dist.group.WORLD, MonarchProcessGroup)
    dist.barrier()  # a rank that ends early closes the connections that others of Gloo still make
    dist.destroy_process_group()
    return ours


@pytest.mark.parametrize(("names", "backend"), [("", "gloo"), ("nccl", "gloo"), ("gloo", "cpu:gloo,cuda:gloo")])
def test_groups_for_other_names_are_torchs(names: str, backend: str) -> None:
    assert run_ranks(_plain, 2, backend, backend=None, env={"MONARCH_AS": names}) == ["cpu:gloo" in backend] * 2


@pytest.mark.parametrize(
    ("names", "backend", "request_"),
    [
        ("gloo", "gloo", "cpu:monarch,cuda:gloo"),
        ("nccl", "nccl", "cuda:monarch"),
        ("nccl", "cpu:gloo,cuda:nccl", "cuda:monarch,cpu:gloo"),
        ("gloo,nccl", "cpu:gloo,cuda:nccl", "cpu:monarch,cuda:monarch"),
        ("gloo", "cuda:gloo", ""),
        ("gloo", "nccl", ""),
        ("", "gloo", ""),
        ("gloo", "undefined", "cpu:monarch"),
    ],
)
def test_only_the_tensors_of_the_names_device_move(
    names: str, backend: str, request_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "undefined" and torch.accelerator.is_available():
        pytest.skip("without a name torch makes the group of the accelerator")
    monkeypatch.setenv("MONARCH_AS", names)
    assert _backend_names.request_for(backend) == request_


SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
dist.new_group([0])
dist.new_group([1])
os.write(1, f"{type(dist.group.WORLD).__name__} {dist.get_backend()} {x.tolist()}\\n".encode())  # in one piece
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["torchrun", "run --as", "MONARCH_AS run"])
def test_a_script_under_a_launcher_reports_the_change_once(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    module = "torch.distributed.run" if launcher == "torchrun" else "monarch_backend"
    words = [] if launcher == "torchrun" else ["run", *(["--as", "gloo"] if launcher == "run --as" else [])]
    env = {**os.environ, **({} if launcher == "run --as" else {"MONARCH_AS": "gloo"})}
    done = subprocess.run(
        [sys.executable, "-m", module, *words, "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MonarchProcessGroup gloo [2.0, 2.0]") == 2
    assert done.stderr.count("monarch_backend: MONARCH_AS=gloo: moves CPU tensors of groups for 'gloo'\n") == 1


def _bad_value(rank: int, address: str) -> str:
    _autoload.take_names()
    with pytest.raises(ValueError, match="MONARCH_AS='mpi': give gloo, nccl, or gloo,nccl") as caught:
        init(rank, 1, address, "gloo")
    return str(caught.value)


def test_bad_value_is_refused_before_a_group_is_made() -> None:
    assert run_ranks(_bad_value, 1, backend=None, env={"MONARCH_AS": "mpi"})


def test_bad_value_ends_the_launcher() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "monarch_backend", "run", "--as", "mpi", "--standalone", "script.py"],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode != 0
    assert "MONARCH_AS='mpi': give gloo, nccl, or gloo,nccl" in done.stderr


def _gloo_options(rank: int, address: str) -> bool:
    _autoload.take_names()
    init(rank, 1, address, "gloo", pg_options=dist.ProcessGroupGloo._Options())  # type: ignore[attr-defined]
    ours = isinstance(dist.group.WORLD, MonarchProcessGroup)
    dist.destroy_process_group()
    return ours


def test_options_of_gloo_are_ignored_as_by_torch() -> None:
    assert run_ranks(_gloo_options, 1, backend=None, env={"MONARCH_AS": "gloo"}) == [True]
