"""Graceful end of a process: threads, atexit hooks, globals and files are finalised before stop() returns."""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from monarch_backend.actor import Actor, endpoint, this_host
from tests.actor.script_runner import PATIENCE, python


class Note:
    """Writes its file when it is garbage-collected."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.write_text(f"{type(self).__name__} {note_name()}")


NAME = "collected"
SETTINGS = {"name": NAME}


def note_name() -> str:
    assert NAME == "collected", "a constant is cleared before an object that may use it"
    return SETTINGS["name"]


class Holder(Actor):
    """Leaves files, globals and hooks that the end of its process must finalise."""

    @endpoint
    def hold(self, folder: Path) -> None:
        globals()["_file"] = file = (folder / "file").open("w")
        file.write("of a global")
        globals()["_note"] = [Note(folder / "note")]
        globals()["last_note"] = Note(folder / "last")
        self.mine = Note(folder / "attribute")
        type(self).shared = (folder / "shared").open("w")  # type: ignore[attr-defined]
        type(self).shared.write("of a class")  # type: ignore[attr-defined]
        atexit.register((folder / "atexit").write_text, "hook")
        weakref.finalize(type(self), (folder / "finalizer").write_text, "called")
        threading.Thread(target=lambda: (time.sleep(0.3), (folder / "thread").write_text("joined"))).start()
        print("the last line", end="")

    @endpoint
    def count_finalizers(self) -> int:
        return sum(finalizer.atexit for finalizer in weakref.finalize._registry)  # type: ignore[attr-defined]

    @endpoint
    def wait_at_exit(self, seconds: float, path: Path) -> int:
        atexit.register(lambda: (time.sleep(seconds), path.write_text("hook")))
        return os.getpid()


WRITTEN = {
    "file": "of a global",
    "note": "Note collected",
    "last": "Note collected",
    "attribute": "Note collected",
    "shared": "of a class",
    "atexit": "hook",
    "finalizer": "called",
    "thread": "joined",
}


def written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_stop_of_processes_finalises_user_code(tmp_path: Path) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    procs.spawn("holder", Holder).hold.call_one(tmp_path).get(PATIENCE)
    procs.stop().get(PATIENCE)
    assert written(tmp_path) == WRITTEN


def test_forked_process_runs_no_finalizer_of_the_fork_server() -> None:
    """torch registers 134 finalizers, which take longer than the rest of a stop."""
    procs = this_host().spawn_procs({"gpus": 1})
    assert procs.spawn("holder", Holder).count_finalizers.call_one().get(PATIENCE) == 0
    procs.stop().get(PATIENCE)


def test_abort_and_kill_do_not_finalise_user_code(tmp_path: Path) -> None:
    for how in ("abort", "kill"):
        procs = this_host().spawn_procs({"gpus": 1})
        procs.spawn("holder", Holder).wait_at_exit.call_one(0.0, tmp_path / how).get(PATIENCE)
        getattr(procs, how)().get(PATIENCE)
    assert written(tmp_path) == {}


def test_atexit_hook_beyond_the_timeout_of_stop_is_killed(tmp_path: Path) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    pid = procs.spawn("holder", Holder).wait_at_exit.call_one(600.0, tmp_path / "hook").get(PATIENCE)
    began = time.monotonic()
    procs.stop(timeout=0.5).get(PATIENCE)
    assert time.monotonic() - began < 10.0
    assert written(tmp_path) == {}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_stop_waits_for_a_slow_atexit_hook(tmp_path: Path) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    procs.spawn("holder", Holder).wait_at_exit.call_one(4.0, tmp_path / "hook").get(PATIENCE)
    procs.stop().get(PATIENCE)
    assert written(tmp_path) == {"hook": "hook"}


def test_end_of_program_finalises_processes_whose_code_came_by_value(tmp_path: Path) -> None:
    """The actors of a script are pickled by value, so their globals belong to no module."""
    script = tmp_path / "script.py"
    held = tmp_path / "held"
    held.mkdir()
    source = Path(__file__).read_text().partition("WRITTEN = ")[0]
    script.write_text(f"""{source}
if __name__ == "__main__":
    kept = Note(Path({str(held)!r}) / "of the program")
    holder = this_host().spawn_procs({{"gpus": 1}}).spawn("holder", Holder)
    holder.hold.call_one(Path({str(held)!r})).get()
""")
    run: Any = python(str(script))
    said = re.sub("monarch_backend: waiting for gpus 0 .* to finish, .*\n", "", run.stderr)  # on a busy machine
    assert (run.returncode, said) == (0, "")
    assert written(held) == WRITTEN | {"of the program": "Note collected"}
    assert "the last line" in run.stdout
