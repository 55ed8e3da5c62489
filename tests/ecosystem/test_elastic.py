"""torch.distributed.elastic over "monarch": a killed rank, a restart by torchrun, and the losses of an undisturbed run.

The script is a user's: no import of monarch_backend, torchrun's environment variables, a checkpoint in a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

backend, folder, kill = sys.argv[1], sys.argv[2], sys.argv[3] == "kill"
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = {"step": 0, "losses": []}
path = os.path.join(folder, "checkpoint.pt")
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state = saved["state"]
while state["step"] < 6:
    generator = torch.Generator().manual_seed(100 * rank + state["step"])
    x = torch.randn(8, 4, generator=generator)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    state = {"step": state["step"] + 1, "losses": [*state["losses"], mean.item().hex()]}
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": state}, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
    if kill and attempt == 0 and rank == 1 and state["step"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump({"losses": state["losses"], "attempt": attempt, "backend": dist.get_backend()}, file)
dist.destroy_process_group()
"""


def _launch(folder: Path, backend: str, kill: bool, restarts: int = 2) -> tuple[int, str]:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", str(script), backend, str(folder)]
    command.append("kill" if kill else "calm")
    env = dict(os.environ, OMP_NUM_THREADS="1")
    # Its own session, so that a launcher that hangs can be ended with all of its ranks.
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def _result(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "result.json").read_text()))


@pytest.mark.filterwarnings("default")  # torchrun's own are its affair
def test_a_killed_rank_is_restarted_and_ends_with_the_same_losses(tmp_path: Path) -> None:
    for name, backend, kill in (("calm", "gloo", False), ("killed", "monarch", True)):
        code, output = _launch(tmp_path / name, backend, kill)
        assert code == 0, output
    calm, killed = _result(tmp_path / "calm"), _result(tmp_path / "killed")
    assert (calm["attempt"], killed["attempt"]) == (0, 1)
    assert killed["backend"] == "monarch"
    assert killed["losses"] == calm["losses"]


def test_without_restarts_left_the_job_fails_and_names_the_signal(tmp_path: Path) -> None:
    code, output = _launch(tmp_path / "once", "monarch", kill=True, restarts=0)
    assert code == 1
    assert "Signal 9 (SIGKILL)" in output
    assert "rank      : 1" in output
