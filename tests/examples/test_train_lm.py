"""examples/train_lm.py as a user starts it: all parallelisms agree, and an interrupted run resumes."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

BACKEND = "monarch"
SCRIPT = Path(__file__).parents[2] / "examples" / "train_lm.py"
TINY = "--device cpu --dim 32 --layers 2 --heads 4 --context 32 --batch 8 --eval-every 3 --eval-batches 1 --sample 8"
STEPS = 6
TOLERANCE = 2e-5  # nats per byte; float rounding was measured at 5e-7 after 8 steps
TIMEOUT = 200  # a launch takes 5 to 10 s on two free cores


class Launch:
    """One run of the script in its own process group, under torchrun unless nproc is 0."""

    def __init__(self, nproc: int, arguments: str, scratch: Path):
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={nproc} --log-dir={scratch}".split()
        # Variables of a test runner that torchrun started must not reach the script.
        inherited = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        inherited += ("PYTHONWARNINGS", "TORCH_DEVICE_BACKEND_AUTOLOAD")
        environment = {name: value for name, value in os.environ.items() if name not in inherited}
        # as torchrun sets it for its ranks; more threads would only wait for each other
        environment["OMP_NUM_THREADS"] = "1"
        command = [
            sys.executable,
            *(torchrun if nproc else []),
            str(SCRIPT),
            *f"--backend {BACKEND} {arguments}".split(),
        ]
        caches = {name: str(scratch / name) for name in ("MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR")}
        self.log = scratch / f"log-{time.monotonic_ns()}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=scratch,
                env=environment | caches,
                start_new_session=True,
            )

    def wait(self) -> tuple[int, str]:
        """Return the exit code and the output. No process of the run outlives this call."""
        try:
            code = self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill_all()
            pytest.fail(f"still running after {TIMEOUT} s:\n{self.log.read_text(errors='replace')[-4000:]}")
        return code, self.log.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Return the pids of the ranks that torchrun has started."""
        pids = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True)
        return [int(pid) for pid in pids.stdout.split()]

    def kill_all(self) -> None:
        # torchrun starts each rank in its own session, so killing torchrun's process group would leave the ranks.
        for pid in self.ranks():
            os.kill(pid, signal.SIGKILL)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Lab:
    """Runs the script with tiny settings. Each named run has its own folder of checkpoints."""

    scratch: Path

    def out(self, name: str) -> Path:
        return self.scratch / name

    def launch(self, name: str, nproc: int, parallel: str, extra: str = "") -> Launch:
        files = f"--out {self.out(name)} --losses-json {self.out(name)}.json"
        return Launch(nproc, f"--parallel {parallel} {TINY} {files} {extra}", self.scratch)

    def train(self, name: str, nproc: int, parallel: str, extra: str = f"--steps {STEPS}") -> dict:
        return self.losses(name, self.launch(name, nproc, parallel, extra))

    def losses(self, name: str, run: Launch) -> dict:
        """Return the losses of a run that must succeed."""
        code, output = run.wait()
        assert code == 0, output
        assert "Warning" not in output and "[W" not in output, output
        return json.loads(Path(f"{self.out(name)}.json").read_text())

    def steps_saved(self, name: str) -> list[int]:
        folders = self.out(name).glob("checkpoints/step-*")
        return sorted(int(match[1]) for path in folders if (match := re.fullmatch(r"step-(\d+)", path.name)))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("train_lm"))


@pytest.fixture(scope="module")
def reference(lab: Lab) -> dict:
    """Losses of one process without a process group, for as many steps as any test below compares."""
    return lab.train("reference", 0, "none", "--steps 60")


@pytest.fixture(scope="module")
def ddp(lab: Lab) -> Iterator[Launch]:
    """Start the run before the reference, if a test lists this fixture first.

    The imports of both take most of the time.
    """
    run = lab.launch("ddp", 2, "ddp", f"--steps {STEPS}")
    yield run
    if run.process.poll() is None:
        run.kill_all()


def assert_agrees(losses: dict, reference: dict, steps: int) -> None:
    """Check the whole curve. A resumed run restores the losses before it from the checkpoint."""
    assert losses["train"] == pytest.approx(reference["train"][:steps], abs=TOLERANCE, rel=0)
    heldout, expected = dict(losses["heldout"]), dict(reference["heldout"])
    common = heldout.keys() & expected.keys()
    assert len(common) == steps // 3
    assert {k: heldout[k] for k in common} == pytest.approx({k: expected[k] for k in common}, abs=TOLERANCE, rel=0)


# test_resume_after_kill also compares the curve of an fsdp run.
@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "nproc"), [("tp", 2), ("fsdp", 2), ("fsdp+tp", 4)])
def test_parallelisms_agree_with_one_process(lab: Lab, reference: dict, parallel: str, nproc: int) -> None:
    _agrees(lab, lab.train(parallel, nproc, parallel), reference, parallel, nproc)


@pytest.mark.slow  # `make demo` runs ddp, too
def test_ddp_agrees_with_one_process(lab: Lab, ddp: Launch, reference: dict) -> None:
    _agrees(lab, lab.losses("ddp", ddp), reference, "ddp", 2)


def _agrees(lab: Lab, losses: dict, reference: dict, parallel: str, nproc: int) -> None:
    assert losses["world_size"] == nproc
    assert_agrees(losses, reference, STEPS)
    assert lab.steps_saved(parallel) == [STEPS]


def test_run_writes_a_png_and_learns(lab: Lab, reference: dict) -> None:
    assert (lab.out("reference") / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert reference["train"][0] == pytest.approx(5.55, abs=0.1)  # log 256, the loss of a uniform guess
    assert reference["heldout"][-1][1] < 4.0


@pytest.mark.slow
def test_resume_after_kill(lab: Lab, reference: dict) -> None:
    """Kill one rank of an fsdp run, resume it as fsdp, then as tp. The loss curve is that of an uninterrupted run."""
    for turn in range(5):
        name = f"killed-{turn}"
        run = lab.launch(name, 2, "fsdp", "--steps 1000000 --checkpoint-every 4")
        deadline = time.monotonic() + TIMEOUT
        while not lab.steps_saved(name) and time.monotonic() < deadline and run.process.poll() is None:
            time.sleep(0.02)
        os.kill(run.ranks()[-1], signal.SIGKILL)
        code, output = run.wait()
        assert code != 0, output
        newest = lab.steps_saved(name)[-1]
        if newest + 6 <= len(reference["train"]):  # else the machine was too slow between the check and the kill
            break
    assert newest + 6 <= len(reference["train"]), "the kill came later than the reference run is long"
    for parallel, steps in (("fsdp", newest + 3), ("tp", newest + 6)):
        losses = lab.train(name, 2, parallel, f"--steps {steps} --resume")
        assert_agrees(losses, reference, steps)
        assert lab.steps_saved(name)[-1] == steps


def load_script(monkeypatch: pytest.MonkeyPatch, **environment: str):
    """Load the script as a module, as one rank under torchrun with these variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("train_lm", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_lm", module)  # dataclasses look up the module by its name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("world_size", "arguments", "message"),
    [
        (2, "--parallel pipeline", "invalid choice: 'pipeline'"),
        (2, "--parallel none", "--parallel none is one process, and torchrun started 2"),
        (None, "--parallel ddp", "start --parallel ddp with: torchrun --standalone --nproc-per-node=2"),
        (3, "--parallel fsdp+tp --tp-size 2", "world size 3 is not divisible by --tp-size 2"),
        (3, "--parallel tp --dim 96 --context 126", "--heads 4 is not divisible by the tensor-parallel size 3"),
        (2, "--parallel tp --context 127", "--context 127 is not divisible by the tensor-parallel size 2"),
        (2, "--parallel ddp --dim 100 --heads 3", "--dim 100 must be a multiple of twice --heads 3"),
        (2, "--parallel ddp --batch 7", "--batch 7, the global batch, is not divisible by 2 data-parallel ranks"),
        (2, "--parallel ddp --steps 0", "--steps must be at least 1"),
        (2, "--parallel ddp --resume", "no complete checkpoint in {out}/checkpoints; start without --resume"),
    ],
)
def test_bad_arguments_raise_errors_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    world_size: int | None,
    arguments: str,
    message: str,
) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": str(world_size)} if world_size else {}
    script = load_script(monkeypatch, **ranks)
    with pytest.raises(SystemExit) as stop:
        script.main([*arguments.split(), "--device", "cpu", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert message.format(out=tmp_path) in capsys.readouterr().err


def test_half_written_checkpoints_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("step-4", "step-20", "step-100.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    script = load_script(monkeypatch)
    assert script.newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-20"


def test_fresh_run_sets_old_checkpoints_aside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-900").mkdir(parents=True)
    script = load_script(monkeypatch)
    script.set_aside_old_checkpoints(tmp_path)
    assert script.newest_checkpoint(tmp_path) is None
    assert (tmp_path / "checkpoints.previous" / "step-900").is_dir()
