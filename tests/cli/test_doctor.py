"""`monarch-backend doctor` reports what is present, what is missing and how to get it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import monarch_backend
from monarch_backend import _verbs
from monarch_backend._rdma.routes import selection
from monarch_backend.cli import doctor, main
from tests.rdma import pretended_gpu as pretended


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in (
        torch.__version__,
        "route cpu",
        "gloo",
        "NCCL" if not torch.version.hip else "RCCL",
        "torch_xla",
        "verbs route",
        "memory of other hosts",
        "memory of GPUs",
        "locked memory",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("environment", "backend", "reason"),
    [
        ({}, "shm+gloo", "shared memory between ranks of one host"),
        ({"MONARCH_SHM": "0"}, "gloo", "no shared memory: MONARCH_SHM=0"),
    ],
)
def test_cpu_route_without_group_names_shared_memory(
    environment: dict[str, str], backend: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    route = monarch_backend.routes()["cpu"]
    assert route.backend == backend and reason in route.why
    finding = next(found for found in doctor.examine() if found.subject == "route cpu")
    assert finding.state == f"{backend}: {route.why}"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_doctor_without_reader_ends_quietly(unbuffered: str) -> None:
    """As in `monarch-backend doctor | head -0`. An unbuffered stream fails in print(), a buffered one at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "monarch_backend.cli", "doctor"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_json_has_a_remedy_for_all_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = {f["subject"]: f for f in json.loads(capsys.readouterr().out)}
    assert findings["route cpu"]["remedy"] == ""
    for name, finding in findings.items():
        if finding["state"] in ("none", "not installed", "not registered"):
            assert finding["remedy"], f"{name} is missing and nothing says how to get it"


def test_no_cpu_route_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert main(["doctor"]) == 1
    assert "built without Gloo" in capsys.readouterr().out


def verbs_findings() -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.examine()}


def test_verbs_are_explained_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONARCH_RDMA_TRANSPORT", raising=False)
    monkeypatch.setattr(_verbs, "describe", lambda: [_verbs.Diagnostic("verbs route", "none", "no verbs device")])
    monkeypatch.setattr(selection, "available", lambda: "no verbs device")
    monkeypatch.setattr(doctor, "_library", lambda name: f"does not load: {name}")
    found = verbs_findings()
    assert found["verbs ports"].state == "none" and "NIC" in found["verbs ports"].remedy
    assert "libibverbs1" in found["libibverbs"].remedy
    assert found["memory of other hosts"] == doctor.Finding("memory of other hosts", "by tcp")


def test_verbs_are_explained_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [
        _verbs.Diagnostic("verbs port rxe0:1", "ACTIVE, Ethernet; 3: RoCEv2 10.77.0.1"),
        _verbs.Diagnostic("locked memory", "64 KiB", "ulimit -l unlimited"),
        _verbs.Diagnostic("verbs route", "can be used"),
    ]
    monkeypatch.delenv("MONARCH_RDMA_TRANSPORT", raising=False)
    monkeypatch.setattr(_verbs, "describe", lambda: facts)
    monkeypatch.setattr(selection, "available", lambda: None)
    found = verbs_findings()
    assert "verbs ports" not in found
    assert found["verbs port rxe0:1"].state.startswith("ACTIVE")
    assert "ulimit" in found["locked memory"].remedy
    assert found["memory of other hosts"].state == "by verbs"
    order = list(found)
    assert order[order.index("verbs route") - 2 :][:4] == [
        "libibverbs", "verbs packages", "verbs route", "memory of other hosts",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "why_not", "state", "remedy"),
    [
        ("tcp", None, "by tcp, as MONARCH_RDMA_TRANSPORT says", ""),
        ("verbs", None, "by verbs, as MONARCH_RDMA_TRANSPORT says", ""),
        ("verbs", "no verbs device", "by tcp", "MONARCH_RDMA_TRANSPORT=verbs has no effect"),
        ("infiniband", None, "no route", "MONARCH_RDMA_TRANSPORT='infiniband'"),
    ],
)
def test_rdma_transport_setting_is_checked(
    monkeypatch: pytest.MonkeyPatch, wanted: str, why_not: str | None, state: str, remedy: str
) -> None:
    monkeypatch.setenv("MONARCH_RDMA_TRANSPORT", wanted)
    monkeypatch.setattr(selection, "available", lambda: why_not)
    found = verbs_findings()["memory of other hosts"]
    assert found.state == state
    assert found.remedy.startswith(remedy)


def test_memory_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MONARCH_GPU_IPC", raising=False)
    monkeypatch.setenv("MONARCH_GPU_DRIVER", "/nowhere/libcuda.so.1")
    found = doctor._memory_of_gpus(tmp_path)
    assert found.state == "no route: none of /nowhere/libcuda.so.1 loads" and "driver" in found.remedy
    driver = pretended.library()
    monkeypatch.setenv("MONARCH_GPU_DRIVER", driver)
    words = f"{driver}: on one host by IPC; to other hosts NICs by dma-buf, else through pinned memory"
    assert doctor._memory_of_gpus(tmp_path) == doctor.Finding("memory of GPUs", words)
    (tmp_path / "nvidia_peermem").mkdir()
    monkeypatch.setenv("MONARCH_GPU_IPC", "0")
    state = doctor._memory_of_gpus(tmp_path).state
    assert "since MONARCH_GPU_IPC=0; to other hosts NICs by nvidia_peermem (peer memory) or dma-buf, else" in state


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: monarch-backend" in capsys.readouterr().err
