"""Options of a process mesh (environment, bootstrap, CPU affinity) and the output of its processes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import platform
from monarch_backend.actor import Actor, ProcMesh, current_rank, endpoint, this_host
from tests.actor.actors import until
from tests.actor.support import PATIENCE, Faults
from tests.support.terminal import Terminal


class Speaker(Actor):
    """Actor that produces output in every way, and reports about its process."""

    @endpoint
    def print(self, text: str, error: bool = False) -> None:
        print(text, file=sys.stderr if error else sys.stdout)

    @endpoint
    def print_rank(self) -> None:
        print(f"I am {current_rank().rank}")

    @endpoint
    def log(self, level: int, text: str) -> None:
        logging.getLogger("speaker").log(level, text)

    @endpoint
    def log_exception(self) -> None:
        try:
            raise ValueError("of the speaker")
        except ValueError:
            logging.getLogger("speaker").exception("it failed")

    @endpoint
    def write(self, number: int, text: str) -> None:
        """Write to the descriptor without Python's streams, as C code does."""
        os.write(number, text.encode())

    @endpoint
    def child(self) -> None:
        import subprocess

        subprocess.run(["echo", "from a child"], check=True)

    @endpoint
    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @endpoint
    def cpus(self) -> set[int]:
        return os.sched_getaffinity(0)

    @endpoint
    def process(self) -> dict[str, Any]:
        title = Path("/proc/self/cmdline").read_text().rstrip("\0 ") if platform.HAS_PRCTL else ""
        return {"argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "title": title, "pid": os.getpid()}

    @endpoint
    def fork(self) -> int:
        """Fork a child that ends with ``sys.exit``. Return its exit status."""
        pid = os.fork()
        if pid == 0:
            sys.exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    @endpoint
    def load_data(self) -> list[float]:
        """Load data with a worker that torch forks from this process."""
        import torch

        data = torch.utils.data.TensorDataset(torch.arange(8.0))
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
        return [batch.sum().item() for (batch,) in loader]

    @endpoint
    def spawn_speaker(self) -> Any:
        procs = this_host().spawn_procs({"nested": 2})
        procs.logging_option(aggregate_window_sec=PATIENCE)
        self.nested = procs.spawn("nested", Speaker)
        return self.nested


@pytest.fixture
def shown(capfd: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capfd)


@contextmanager
def folding(**dimensions: int) -> Iterator[ProcMesh]:
    """Yield processes whose equal lines are merged, however busy the machine is.

    A line that all ranks have written is shown at once. Other lines are shown when the mesh is stopped.
    """
    with this_host().spawn_procs(dimensions) as procs:
        procs.logging_option(aggregate_window_sec=PATIENCE)
        yield procs


@pytest.fixture
def procs(shown: Terminal, faults: Faults) -> Iterator[ProcMesh]:
    with folding(gpus=4) as procs:
        yield procs


# Output of the processes


def test_equal_output_of_all_ranks_is_one_line(procs: ProcMesh, shown: Terminal) -> None:
    speakers = procs.spawn("speakers", Speaker)
    speakers.print.call("hello").get(PATIENCE)
    shown.wait("[gpus 0-3] hello")
    speakers.print.call("to stderr", error=True).get(PATIENCE)
    shown.wait("[gpus 0-3] to stderr", stream="err")
    speakers.slice(gpus=slice(0, None, 2)).print.call("some of us").get(PATIENCE)
    speakers.slice(gpus=3).print.call("alone").get(PATIENCE)
    speakers.print_rank.call().get(PATIENCE)
    procs.stop().get(PATIENCE)
    shown.wait("[gpus 0,2] some of us", "[gpus 3] alone", *(f"[gpus {rank}] I am {rank}" for rank in range(4)))
    assert shown.out.count("hello") == shown.err.count("to stderr") == 1


def test_output_names_ranks_of_two_dimensions(shown: Terminal, faults: Faults) -> None:
    with folding(hosts=2, gpus=2) as procs:
        speakers = procs.spawn("speakers", Speaker)
        speakers.print.call("everybody").get(PATIENCE)
        speakers.slice(hosts=1).print.call("one host").get(PATIENCE)
    shown.wait("[hosts 0-1 gpus 0-1] everybody", "[hosts 1 gpus 0-1] one host")


def test_output_of_c_and_of_children_is_shown(procs: ProcMesh, shown: Terminal) -> None:
    speakers = procs.spawn("speakers", Speaker)
    speakers.write.call(1, "from C\n").get(PATIENCE)
    speakers.write.call(2, "from C, too\n").get(PATIENCE)
    speakers.child.call().get(PATIENCE)
    shown.wait("[gpus 0-3] from C", "[gpus 0-3] from a child")
    shown.wait("[gpus 0-3] from C, too", stream="err")


def test_log_records_have_level_and_name(procs: ProcMesh, shown: Terminal) -> None:
    speakers = procs.spawn("speakers", Speaker)
    speakers.log.call(logging.DEBUG, "nobody wants to know").get(PATIENCE)
    speakers.log.call(logging.INFO, "good to know").get(PATIENCE)
    speakers.log_exception.call().get(PATIENCE)
    shown.wait("[gpus 0-3] INFO:speaker:good to know", "[gpus 0-3] ValueError: of the speaker", stream="err")
    assert "nobody wants to know" not in shown.err
    assert "[gpus 0-3] ERROR:speaker:it failed" in shown.err.splitlines()
    assert shown.err.count("ValueError: of the speaker") == 1, "a traceback of many ranks is one, too"


def test_log_level_can_be_changed(procs: ProcMesh, shown: Terminal) -> None:
    speakers = procs.spawn("speakers", Speaker)
    for option, expected in (("DEBUG", ["debug", "info", "error"]), (logging.ERROR, ["error"])):
        procs.logging_option(level=option)
        for level in ("debug", "info", "error"):
            speakers.log.call(getattr(logging, level.upper()), f"{level} at {option}").get(PATIENCE)
        shown.wait(f"[gpus 0-3] ERROR:speaker:error at {option}", stream="err")
        said = [line.rpartition(":")[2] for line in shown.err.splitlines() if line.endswith(f" at {option}")]
        assert said == [f"{level} at {option}" for level in expected]


def test_output_can_go_to_files_only(procs: ProcMesh, shown: Terminal, tmp_path: Path) -> None:
    procs.logging_option(stream_to_client=False, to_files=str(tmp_path))
    speakers = procs.spawn("speakers", Speaker)
    speakers.print_rank.call().get(PATIENCE)
    speakers.print.call("an error", error=True).get(PATIENCE)
    (folder,) = tmp_path.iterdir()
    until(lambda: len(list(folder.iterdir())) == 8, "a file for each rank and stream")
    for rank in range(4):
        until(lambda rank=rank: (folder / f"gpus_{rank}.stdout").read_text() == f"I am {rank}\n", "its line")
        until(lambda rank=rank: (folder / f"gpus_{rank}.stderr").read_text() == "an error\n", "its line")
    assert (shown.out, shown.err) == ("", "")
    procs.logging_option(stream_to_client=True)
    speakers.print.call("on the screen again").get(PATIENCE)
    shown.wait("[gpus 0-3] on the screen again")


def test_output_is_not_deduplicated_without_a_window(procs: ProcMesh, shown: Terminal) -> None:
    procs.logging_option(aggregate_window_sec=None)
    procs.spawn("speakers", Speaker).print.call("at once").get(PATIENCE)
    shown.wait(*(f"[gpus {rank}] at once" for rank in range(4)))


def test_output_of_two_meshes_is_not_merged(shown: Terminal, faults: Faults) -> None:
    with folding(left=2) as left, folding(right=2) as right:
        for procs in (left, right):
            procs.spawn("speakers", Speaker).print.call("the same").get(PATIENCE)
        shown.wait("[left 0-1] the same", "[right 0-1] the same")


def test_nested_processes_are_named_with_their_owner(shown: Terminal, faults: Faults) -> None:
    with folding(gpus=1) as procs:
        speaker = procs.spawn("speaker", Speaker)
        speaker.spawn_speaker.call_one().get(PATIENCE).print.call("from below").get(PATIENCE)
        shown.wait("[gpus 0] [nested 0-1] from below")


def test_output_at_the_end_of_processes_is_not_lost(shown: Terminal, faults: Faults) -> None:
    lines = 2000
    with folding(gpus=2) as procs:
        speakers = procs.spawn("speakers", Speaker)
        speakers.print.broadcast("\n".join(f"line {i}" for i in range(lines)))
    shown.wait(f"[gpus 0-1] line {lines - 1}")
    assert shown.out.splitlines() == [f"[gpus 0-1] line {i}" for i in range(lines)]


# Environment and bootstrap of the processes


def test_environment_reaches_the_processes(shown: Terminal, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "the controller's")
    monkeypatch.setenv("OVERRIDDEN", "here")
    with this_host().spawn_procs({"gpus": 2}, env={"ADDED": "yes", "OVERRIDDEN": "there"}) as procs:
        speakers = procs.spawn("speakers", Speaker)
        found = speakers.environment.call("HERE", "ADDED", "OVERRIDDEN", "NEVER").get(PATIENCE)
        assert list(found.values()) == [["the controller's", "yes", "there", None]] * 2
    assert "ADDED" not in os.environ


def test_bootstrap_runs_first(shown: Terminal, faults: Faults) -> None:
    """The bootstrap sees the variables of ``env=``. It runs before the actor's class is imported."""

    def bootstrap() -> None:
        import os
        import sys

        imported = [name for name in sys.modules if name.startswith("tests.")]
        from monarch_backend._core import platform

        # The stack signal has a thread.
        threads = len(os.listdir("/proc/self/task")) - platform.HAS_MEMFD if platform.HAS_PROC else 1
        os.environ["DEVICE"] = os.environ["FROM_ENV"] + f" {imported} {threads}"

    with this_host().spawn_procs({"gpus": 2}, bootstrap=bootstrap, env={"FROM_ENV": "accelerator"}) as procs:
        speakers = procs.spawn("speakers", Speaker)
        assert list(speakers.environment.call("DEVICE").get(PATIENCE).values()) == [["accelerator [] 1"]] * 2


def test_process_resembles_its_controller(procs: ProcMesh) -> None:
    speakers = procs.spawn("speakers", Speaker)
    for rank, process in enumerate(speakers.process.call().get(PATIENCE).values()):
        assert (process["argv"], process["path"], process["cwd"]) == (sys.argv, sys.path, os.getcwd())
        assert process["title"] == (f"monarch gpus {rank}" if platform.HAS_PRCTL else "")


@pytest.mark.needs("affinity")
def test_proc_bind_sets_cpu_affinity(shown: Terminal, faults: Faults) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    for proc_bind, expected in (
        ([[allowed[0]], [allowed[-1]]], [{allowed[0]}, {allowed[-1]}]),
        (lambda rank: [allowed[-1]] if rank else None, [set(allowed), {allowed[-1]}]),
    ):
        with this_host().spawn_procs({"gpus": 2}, proc_bind=proc_bind) as procs:
            assert list(procs.spawn("speakers", Speaker).cpus.call().get(PATIENCE).values()) == expected
    with this_host().spawn_procs({"gpus": len(allowed)}, proc_bind="cores") as procs:
        found = list(procs.spawn("speakers", Speaker).cpus.call().get(PATIENCE).values())
        assert set().union(*found) == set(allowed) and sum(len(cpus) for cpus in found) == len(allowed)


def test_forks_of_a_worker_do_not_disturb_it(procs: ProcMesh, shown: Terminal) -> None:
    """Data loaders fork their workers like this."""
    speakers = procs.slice(gpus=slice(0, 2)).spawn("speakers", Speaker)
    assert list(speakers.load_data.call().get(PATIENCE).values()) == [[6.0, 22.0]] * 2
    assert list(speakers.fork.call().get(PATIENCE).values()) == [7, 7]
    speakers.print.call("still here").get(PATIENCE)
    procs.stop().get(PATIENCE)
    shown.wait("[gpus 0-1] still here")
    assert shown.err == ""
