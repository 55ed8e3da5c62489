"""What the commands show of a rank that uses a GPU: `make test-gpu`. tests/xla/test_device_hang.py needs no GPU."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_backend import cli
from monarch_backend._telemetry import gpu_memory, py_spy
from monarch_backend.actor import Actor, endpoint, this_host
from tests.actor.conftest import _fork_server, faults  # noqa: F401
from tests.support.device_hang import check_commands, waiting_program
from tests.support.gpus import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.usefixtures("faults"),
]


class Multiplier(Actor):
    @endpoint
    def multiply(self) -> float:
        a = torch.ones(256, 256, device="cuda:0")
        return float((a @ a)[0, 0].item())

    @endpoint
    def keep(self, size: int) -> None:
        self.kept = torch.ones(size, dtype=torch.uint8, device="cuda:0")


def test_rank_that_waits_for_a_kernel_is_shown_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting_program(tmp_path, "cuda") as program:
        check_commands(program.pid, capsys)
        if py_spy.find() is not None:
            assert cli.main(["stack", str(program.pid), "--native"]) == 0
            assert "libcuda" in capsys.readouterr().out


def test_profile_has_the_kernels_of_a_rank(tmp_path: Path) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    try:
        worker: Any = procs.spawn("multiplier", Multiplier)
        assert worker.multiply.call_one().get(timeout=120) == 256.0  # the device is in use
        future = procs.profile(seconds=0.5)
        while not future.done():
            worker.multiply.call_one().get(timeout=120)
        result = future.get(timeout=120)
        assert result.problems == {}
        result.save(str(tmp_path / "trace.json"))
    finally:
        procs.stop().get(60)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(each.get("cat") == "kernel" for each in events)
    assert any(each.get("name") == "aten::mm" for each in events)


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="the driver of NVIDIA counts the memory")
def test_ps_shows_gpu_memory_where_the_driver_knows_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    procs = this_host().spawn_procs({"gpus": 1}, name="keepers")
    try:
        worker: Any = procs.spawn("multiplier", Multiplier)
        worker.keep.call_one(256 << 20).get(timeout=120)
        known = gpu_memory.of_processes()
        assert known, "NVML counts no process"
        assert cli.main(["ps", "--json"]) == 0
        programs = [each for each in json.loads(capsys.readouterr().out) if each["pid"] == os.getpid()]
        found = [each for program in programs for each in program["processes"]]
        [keeper] = [each for each in found if each["label"] == "gpus 0 of keepers"]
        if keeper["pid"] not in known:
            pytest.skip("the driver knows the processes of this container by other pids")
        assert keeper["gpu_memory"] >= 256 << 20
    finally:
        procs.stop().get(60)
