"""Recording of actors, and `monarch-backend replay`, which runs one of them again in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from monarch_backend._actor.execution.async_runner import AsyncActorRunner
from monarch_backend._actor.runtime import program
from monarch_backend._replay import replay_file
from monarch_backend._replay.recording import RecordedAsyncRunner
from monarch_backend._replay.replay_file import Closed, Ended, Header, ReplayError, ReplayFile, Started
from monarch_backend._replay.scope import Scope
from monarch_backend._replay.script import Script
from monarch_backend.actor import ActorError, ActorMesh, CancelledError, ProcMesh, SupervisionError, this_host
from monarch_backend.cli import main
from tests.actor.replayed_actors import Caller, Divider, Interleaved, RecordCounter, Reducer, Source, Weights
from tests.actor.script_runner import Run, WarmInterpreter
from tests.actor.support import PATIENCE, Faults
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("faults")


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmInterpreter]:
    with this_host().spawn_procs({"gpus": 1}) as procs:
        procs.initialized.get(PATIENCE)
    modules = ("monarch_backend.actor", "monarch_backend.cli", "monarch_backend._replay.player")
    with WarmInterpreter(str(program().owner.starter.spawner.address), modules=modules) as interpreter:
        yield interpreter


class Replays:
    """Runs of the command in forks, with lines for pdb."""

    def __init__(self, warm: WarmInterpreter, folder: Path) -> None:
        self._warm, self.folder = warm, folder

    def run(self, *arguments: str, typed: Sequence[str] = ()) -> Run:
        root = str(Path(__file__).resolve().parents[2])
        source = (
            f"import io, sys\nsys.path.insert(0, {root!r})\nsys.stdin = io.StringIO({chr(10).join([*typed, ''])!r})\n"
            f"from monarch_backend.cli import main\nsys.exit(main({['replay', str(self.folder), *arguments]!r}))\n"
        )
        return self._warm.complete(self.folder.parent / "replay.py", source)

    def outcome(self, actor: str, rank: int = 0, *options: str) -> dict[str, Any]:
        done = self.run(actor, str(rank), "--json", *options)
        assert done.out, done.err
        found: dict[str, Any] = json.loads(done.out)
        assert done.returncode == bool(found["deviations"]), done.err
        return found

    def is_exact(self, actor: str, rank: int = 0) -> None:
        """Assert that each recorded message is replayed without a deviation."""
        found = self.outcome(actor, rank)
        assert found["deviations"] == []
        assert found["stopped"] == ""
        assert found["messages"] == found["recorded"] > 0

    def path(self, actor: str, rank: int = 0) -> Path:
        return replay_file.find(self.folder, actor, rank)[0][0]

    def wait_for_calls(self, actor: str, count: int) -> None:
        """Wait until the recorded actor has made this number of calls."""

        def has_made_them() -> bool:
            with contextlib.suppress(ReplayError):  # the file is not there, or has no header
                return len(Script(self.path(actor)).effects) == count
            return False

        wait_until(has_made_them)


@pytest.fixture
def replays(warm: WarmInterpreter, tmp_path: Path) -> Replays:
    return Replays(warm, tmp_path / "recorded")


@contextlib.contextmanager
def recorded(folder: Path, count: int = 1, **env: str) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": count}, name="workers", replay=folder, env=env) as procs:
        yield procs


@pytest.fixture
def source() -> Iterator[ActorMesh]:
    """Two actors that are not recorded."""
    with this_host().spawn_procs({"gpus": 2}) as procs:
        yield procs.spawn("source", Source)


def _record_division(folder: Path) -> None:
    with recorded(folder, 2) as procs:
        divider = procs.spawn("divider", Divider, 0)
        for _ in range(2):
            divider.step.call(1).get(PATIENCE)
        with pytest.raises(ActorError, match="ZeroDivisionError"):
            divider.step.call(1).get(PATIENCE)


def test_failing_actor_stops_in_pdb_at_its_endpoint_and_at_the_error(replays: Replays) -> None:
    _record_division(replays.folder)
    done = replays.run("divider", "1", typed=["p self.value, amount", "continue", "p self.value", "continue"])
    assert done.returncode == 0, done.err
    assert "message 3 of 3 of divider gpus 1: step, ZeroDivisionError: division by zero\n" in done.out
    assert "-> self.value += amount\n(Pdb) (2, 1)\n" in done.out
    assert "message 3 (step): ZeroDivisionError: division by zero\n" in done.out
    assert "-> return 12 / (3 - self.value)\n(Pdb) 3\n" in done.out
    assert done.out.endswith("3 of 3 messages replayed: as recorded\n")


def test_pdb_stops_at_the_chosen_message_and_ends_there(replays: Replays) -> None:
    _record_division(replays.folder)
    done = replays.run("divider", "0", "--to", "2", typed=["p self.value", "next", "p self.value", "continue"])
    assert done.returncode == 0, done.err
    assert re.findall(r"^\(Pdb\) (\d)$", done.out, re.MULTILINE) == ["1", "2"]
    assert done.out.endswith("2 of 3 messages replayed: as recorded\n")
    done = replays.run("divider", "0", "--at", "0", typed=["p value", "quit"])
    assert "__init__(self, value: int) -> None:\n(Pdb) 0\n" in done.out
    assert "the replay has ended: quit\n" in done.out
    done = replays.run("divider", "0", "--at", "9")
    assert done.returncode == 1
    assert "has no message 9: it has 0 (the constructor) to 3" in done.err


def test_stop_after_the_end_of_the_replay_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", str(tmp_path / "absent.replay"), "--to", "2", "--at"]
    assert main([*command, "3"]) == 2
    assert "pdb would not stop at message 3: the replay ends after message 2. Give" in capsys.readouterr().err
    assert main([*command, "2"]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_pdb_in_a_terminal_takes_typed_lines(tmp_path: Path) -> None:
    _record_division(tmp_path)
    control, terminal = pty.openpty()
    command = [sys.executable, "-m", "monarch_backend.cli", "replay", str(tmp_path), "divider", "0"]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        os.write(control, b"p self.value * 1000\ncontinue\ncontinue\n")
        shown = b""
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(control, 4096):
                shown += data
        os.close(control)
        assert process.wait(PATIENCE) == 0
    assert b"2000\r\n" in shown
    assert b"3 of 3 messages replayed: as recorded" in shown


def test_context_of_the_actor_is_replayed(replays: Replays) -> None:
    with recorded(replays.folder, 2) as procs:
        divider = procs.spawn("divider", Divider, 0)
        assert divider.slice(gpus=1).where.call_one().get(PATIENCE)[2:] == ("divider", "gpus 1")
        divider.where.call().get(PATIENCE)
        divider.tell.broadcast(5)
        divider.step.call(1).get(PATIENCE)
    replays.is_exact("divider", 1)


def test_tensors_and_random_numbers_are_replayed(replays: Replays) -> None:
    with recorded(replays.folder) as procs:
        weights = procs.spawn("weights", Weights, [100, 100])
        sent = torch.arange(10_000.0).reshape(100, 100)
        weights.add.call_one(sent).get(PATIENCE)
        weights.noise.call_one().get(PATIENCE)
    replays.is_exact("weights")


def test_calls_of_the_actor_are_answered_from_the_file(replays: Replays, source: ActorMesh) -> None:
    with recorded(replays.folder) as procs:
        caller = procs.spawn("caller", Caller, source)
        caller.sums.call_one(3).get(PATIENCE)
        assert caller.catches.call_one().get(PATIENCE) == "negative: -1"
        assert caller.ports.call_one().get(PATIENCE) == [0, 1, 2]
        assert caller.port_of_earlier_message.call_one().get(PATIENCE) == 42
        assert caller.times_out.call_one().get(PATIENCE) == "late"
        assert caller.later.call_one().get(PATIENCE) == 7
        assert caller.limited.call_one().get(PATIENCE) == "gave up"
        assert caller.spawns.call_one().get(PATIENCE) == 6
        caller.as_method.call_one().get(PATIENCE)
        held = caller.answers_later.call_one()
        caller.answer.call_one().get(PATIENCE)
        assert held.get(PATIENCE) == "now"
        assert list(caller.count.call_one(200)) == list(range(200))
    source.release.call().get(PATIENCE)
    replays.is_exact("caller")


@pytest.mark.slow
def test_loss_of_a_peer_is_replayed(replays: Replays, faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 2}) as others, recorded(replays.folder) as procs:
        caller = procs.spawn("caller", Caller, others.spawn("source", Source))
        assert caller.loses_peer.call_one().get(PATIENCE) == ["unknown", "not sent"]
        faults.next()
    replays.is_exact("caller")


def test_call_of_a_thread_raises_an_error_that_names_it(replays: Replays, source: ActorMesh) -> None:
    with recorded(replays.folder) as procs:
        assert procs.spawn("caller", Caller, source).from_thread.call_one().get(PATIENCE) == [True]
    [deviation] = replays.outcome("caller")["deviations"]
    assert "source.value was called by a thread that the actor has started" in deviation


def test_collectives_and_registered_memory_raise_errors_that_name_them(replays: Replays) -> None:
    with recorded(replays.folder, 2) as procs:
        procs.process_group(backend="gloo").get(PATIENCE)
        reducer = procs.spawn("reducer", Reducer)
        assert list(reducer.reduce.call(1.0).get(PATIENCE).values()) == [(3.0, 2), (3.0, 2)]
        reducer.register.call().get(PATIENCE)
    first, second = replays.outcome("reducer", 1)["deviations"]
    assert (
        "ReplayError: the collective allreduce is not recorded, so a replay cannot answer it now, and returned (3.0, 2)"
        in first
    )
    assert "ReplayError: registered memory, or an attached host, is not recorded" in second


@pytest.mark.slow
def test_order_of_concurrent_messages_is_replayed(replays: Replays, source: ActorMesh) -> None:
    with recorded(replays.folder) as procs:
        actor = procs.spawn("actor", Interleaved, source)
        slow = [actor.slow.call_one(name) for name in "ab"]
        asked = [actor.asks.call_one(base) for base in (10, 20)]
        actor.open.call_one().get(PATIENCE)
        for future in asked:
            future.get(PATIENCE)
        seen = [future.get(PATIENCE) for future in slow]
        sleeping = [actor.sleeps.call_one(f"{seconds}", seconds) for seconds in (0.5, 0.01)]
        assert [future.get(PATIENCE)[-1] for future in sleeping] == ["0.5 slept", "0.01 slept"]
        assert actor.blocks.call_one(30).get(PATIENCE) > 0
        assert actor.in_thread.call_one().get(PATIENCE) == 6
        assert list(actor.items.call_one(100)) == list(range(100))
        hanging = actor.hangs.call_one()
        assert "cancelled" not in actor.sleeps.call_one("c", 0.0).get(PATIENCE)
        hanging.cancel()
        hanging.ignore()
        wait_until(lambda: "cancelled" in actor.sleeps.call_one("d", 0.0).get(PATIENCE))
        with pytest.raises(ActorError, match="absent"):
            actor.fails.call_one().get(PATIENCE)
    assert seen[0][:2] == ["a starts", "b starts"]
    replays.is_exact("actor")
    done = replays.run("actor", "0", typed=["next", "next", "continue", "continue"])
    assert done.returncode == 0, done.err
    assert "-> await asyncio.sleep(0)\n" in done.out and '-> raise KeyError("absent")\n' in done.out
    assert "the replay has ended: quit\n" in replays.run("actor", "0", typed=["quit"]).out


def test_steps_between_replies_that_arrive_together_are_replayed(replays: Replays, source: ActorMesh) -> None:
    with recorded(replays.folder) as procs:
        actor = procs.spawn("actor", Interleaved, source)
        races = [actor.races.call_one(name, 40) for name in "ab"]
        counts = []
        while not all(race.done() for race in races):  # messages start between the replies
            counts.append(actor.notes.call_one(f"note {len(counts)}").get(PATIENCE))
        seen = races[0].get(PATIENCE)
    rounds: dict[str, list[str]] = defaultdict(list)
    for words in (text.split() for text in seen if text.startswith("a ")):
        rounds[words[-1]].append(words[1])
    assert any(places != sorted(places) != places[::-1] for places in rounds.values())  # steps of a round alternate
    replays.is_exact("actor")


def test_message_that_was_cancelled_before_its_first_step_is_not_replayed(replays: Replays, tmp_path: Path) -> None:
    with recorded(replays.folder) as procs:
        procs.spawn("actor", Interleaved, None).notes.call_one("first").get(PATIENCE)
    path = replays.path("actor")
    written = list(replay_file.records(path))
    written.pop()  # Closed
    [started] = [record for record in written if isinstance(record, Started)]
    later = msgspec.structs.replace(started, message=2, at=started.at + 1, position=(started.position[0] + 1, 0))
    path.unlink()
    file = ReplayFile(path, 1 << 20, 1 << 30)
    for record in [*written, later, Ended(2, "", True, False)]:
        assert file.write(record) is None
    file.close("it was stopped", is_complete=True)
    replays.is_exact("actor")


def test_end_of_a_message_that_never_began_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancel_task(*_: Any) -> None:
        """Do nothing: the message's task has not begun."""

    monkeypatch.setattr(AsyncActorRunner, "_execute_async", cancel_task)
    runner, ended = object.__new__(RecordedAsyncRunner), list[Scope]()
    runner._scopes = {}
    recorder: Any = SimpleNamespace(start=lambda _: Scope(None, 1), end=ended.append)
    runner._recorder = recorder
    message: Any = ()
    asyncio.run(runner._execute_async(message))
    assert [(scope.is_cancelled, scope.has_begun) for scope in ended] == [(True, False)]
    assert runner._scopes == {}


def test_deviation_names_the_message_and_both_results(replays: Replays) -> None:
    with recorded(replays.folder, SHIFT="one") as procs:
        divider = procs.spawn("divider", Divider, 0)
        divider.environment.call_one("SHIFT").get(PATIENCE)
        divider.step.call_one(1).get(PATIENCE)
    [deviation] = replays.outcome("divider")["deviations"]
    assert deviation == "message 1 (environment) returned None now, and 'one' when recorded"
    done = replays.run("divider", "0", "--no-pdb")
    assert done.returncode == 1
    assert done.out.endswith(f"deviation: {deviation}\n2 of 2 messages replayed: 1 deviation\n")


@pytest.mark.slow
def test_recording_survives_a_kill_in_the_middle(replays: Replays, source: ActorMesh, faults: Faults) -> None:
    with recorded(replays.folder) as procs:
        caller = procs.spawn("caller", Caller, source)
        caller.catches.call_one().get(PATIENCE)
        waiting = caller.waits.call_one()
        replays.wait_for_calls("caller", 2)
        procs.kill().get(PATIENCE)
        with pytest.raises(SupervisionError):
            waiting.get(PATIENCE)
    found = replays.outcome("caller")
    assert found["stopped"] == "message 2 waits for source.hold, and the file ends here"
    assert (found["messages"], found["recorded"], found["deviations"]) == (2, 2, [])
    assert found["end"] == "its process was killed, or still runs"
    done = replays.run("caller", "0", typed=["next", "continue"])
    assert "-> self.source.slice(gpus=0).hold.call_one().get()\n" in done.out


@pytest.mark.slow
def test_cancelled_message_is_replayed_as_cancelled(replays: Replays, source: ActorMesh) -> None:
    with recorded(replays.folder) as procs:
        caller = procs.spawn("caller", Caller, source)
        waiting = caller.waits.call_one()
        replays.wait_for_calls("caller", 1)
        waiting.cancel()
        with pytest.raises(CancelledError):
            waiting.get(PATIENCE)
        caller.catches.call_one().get(PATIENCE)
    source.release.call().get(PATIENCE)
    replays.is_exact("caller")


@pytest.mark.slow
def test_limit_of_bytes_ends_the_recording_and_the_file_says_so(
    replays: Replays, capfd: pytest.CaptureFixture[str]
) -> None:
    with recorded(replays.folder, MONARCH_REPLAY_BYTES="300000") as procs:
        weights = procs.spawn("weights", Weights, [100, 100])
        for _ in range(8):
            weights.add.call_one(torch.ones(100, 100)).get(PATIENCE)
        path = replays.path("weights")
        assert 200_000 < path.stat().st_size < 301_000
    script = Script(path)
    assert script.closed is not None and not script.closed.is_complete
    assert script.end == f"the limit of 300000 bytes is reached (MONARCH_REPLAY_BYTES) at message {script.last}"
    assert f"recording of weights, rank 0, for a replay has stopped: {script.end}" in capfd.readouterr().err
    found = replays.outcome("weights")
    assert found["deviations"] == [] and 0 < found["messages"] <= script.last < 8
    done = replays.run("weights", "0", "--no-pdb")
    assert done.returncode == 0
    assert done.out.endswith(f"the file ends early: {script.end}\n")


def test_nothing_is_encoded_after_the_limit_of_bytes(replays: Replays) -> None:
    with this_host().spawn_procs() as others, recorded(replays.folder, MONARCH_REPLAY_BYTES="65536") as procs:
        counter = procs.spawn("counter", RecordCounter, others.spawn("source", Source))
        counts = [counter.calls.call_one(bytes(20_000)).get(PATIENCE) for _ in range(6)]
    assert Script(replays.path("counter")).end.startswith("the limit of 65536 bytes is reached")
    assert 0 < counts[0] < counts[1] < counts[-2] == counts[-1]


def test_limit_of_the_folder_counts_the_files_of_all_restarts(
    replays: Replays, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = []
    with recorded(replays.folder, MONARCH_REPLAY_FOLDER_BYTES="300000") as procs:
        for _ in range(4):  # as restarts do, each constructs the actor again
            weights = procs.spawn("weights", Weights, [100, 100])
            for _ in range(2):
                weights.add.call_one(torch.ones(100, 100)).get(PATIENCE)
            ends.append(Script(replays.path("weights")).end)
            weights.stop().get(PATIENCE)
    assert 200_000 < replay_file.folder_size(replays.folder) < 301_000
    assert "the folder's limit of 300000 bytes is reached (MONARCH_REPLAY_FOLDER_BYTES)" in ends[-1]
    assert f"recording of weights, rank 0, for a replay has stopped: {ends[-1]}" in capfd.readouterr().err


HEADER = Header(
    "a", 0, (), (), "main", 0, False, 1, "A", "procs", "host", 1, 0.0, "0" * 32, "0" * 32, "0" * 32, 0, 1 << 20,
    "3", "", "", "/", [], [], b"", b"", None,
)  # fmt: skip


def _written(path: Path, count: int = 3) -> Path:
    file = ReplayFile(path, 1 << 20, 1 << 30)
    assert file.write(HEADER) is None
    assert file.write(Ended(0, "", False)) is None
    for number in range(1, count + 1):
        assert file.write(Started(number, 0.5, b"prefix", 0, number, "", "main", None, b"body", [b"buffer"])) is None
    file.close("stopped", is_complete=True)
    return path


@pytest.mark.parametrize("cut", [1, 5, 13, 40])
def test_incomplete_last_record_is_left_out(tmp_path: Path, cut: int) -> None:
    path = _written(tmp_path / "a.replay")
    whole = list(replay_file.records(path))
    assert isinstance(whole[-1], Closed)
    assert whole[-2] == Started(3, 0.5, b"prefix", 0, 3, "", "main", None, b"body", [b"buffer"])
    path.write_bytes(path.read_bytes()[:-cut])
    left = list(replay_file.records(path))
    assert whole[:-3] == left[: len(whole) - 3] and len(whole) - 2 <= len(left) < len(whole)


def test_record_that_is_written_in_part_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, writev = ReplayFile(tmp_path / "a.replay", 1 << 20, 1 << 30), os.writev
    assert file.write(HEADER) is None

    def full_disk(_descriptor: int, _data: bytes) -> int:
        raise OSError("no space is left")

    monkeypatch.setattr(os, "write", full_disk)
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: writev(descriptor, [parts[0], parts[1][:1]]))
    monkeypatch.setattr(file, "close", lambda *_, **__: monkeypatch.undo())
    assert file.write(Ended(0, "x" * 10, False)) == "writing has failed: no space is left in the constructor"
    file.close("there is space again", is_complete=False)
    assert list(replay_file.records(file.path)) == [HEADER, Closed("there is space again", False)]


def test_files_of_others_count_for_the_limit_of_the_folder(tmp_path: Path) -> None:
    file = ReplayFile(tmp_path / "a.replay", 1 << 20, 1 << 17)
    assert file.write(HEADER) is None
    (tmp_path / "b.replay").write_bytes(bytes(1 << 17))
    (tmp_path / "notes.txt").write_bytes(bytes(1 << 17))
    reason, written = None, 0
    while reason is None:
        reason = file.write(Ended(0, "x" * 100, False))
        written += 100
    assert reason.startswith(f"the folder's limit of {1 << 17} bytes is reached") and written <= (1 << 17) // 64
    with pytest.raises(OSError, match=r"have \d+ bytes, and the limit is 131072: delete old ones, or raise MONARCH_RE"):
        ReplayFile(tmp_path / "c.replay", 1 << 20, 1 << 17)
    assert not (tmp_path / "c.replay").exists()
    (tmp_path / "b.replay").unlink()
    ReplayFile(tmp_path / "c.replay", 1 << 20, 1 << 17).close("it was stopped", is_complete=True)


def test_damaged_record_is_an_error(tmp_path: Path) -> None:
    path = _written(tmp_path / "a.replay")
    data = bytearray(path.read_bytes())
    data[data.index(b"prefix")] ^= 1
    path.write_bytes(data)
    with pytest.raises(ReplayError, match=r"a\.replay is damaged: the record at byte \d+ does not match its checksum"):
        list(replay_file.records(path))
    path.write_bytes(b"not one")
    with pytest.raises(ReplayError, match="is not a replay file of this version"):
        list(replay_file.records(path))


def test_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(tmp_path / "new" / "a.replay")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path.chmod(0o660)
    with pytest.raises(ReplayError, match=r"other users can write to it \(mode 660\), and a replay runs code"):
        list(replay_file.records(path))
    path.chmod(0o600)
    link = tmp_path / "link.replay"
    link.symlink_to(path)
    with pytest.raises(ReplayError, match="can't be read"):
        list(replay_file.records(link))
    os.mkfifo(tmp_path / "pipe.replay")
    with pytest.raises(ReplayError, match="it is not a file"):
        list(replay_file.records(tmp_path / "pipe.replay"))
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(ReplayError, match=f"it belongs to user {user}, and a replay runs code that is in the file"):
        list(replay_file.records(path))


def test_files_and_messages_are_listed(replays: Replays, capsys: pytest.CaptureFixture[str]) -> None:
    _record_division(replays.folder)
    folder = str(replays.folder)
    assert main(["replay", folder, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  it was")[0] for line in lines] == [
        f"divider {rank}  3 messages, message 3 failed" for rank in range(2)
    ]
    assert main(["replay", folder, "--list", "--json"]) == 0
    [first, second] = json.loads(capsys.readouterr().out)
    assert {first["rank"], second["rank"]} == {0, 1} and first["class"] == "Divider"
    assert main(["replay", folder, "divider", "1", "--list", "--json"]) == 0
    messages = json.loads(capsys.readouterr().out)
    assert [each["endpoint"] for each in messages] == ["__init__", "step", "step", "step"]
    assert messages[-1]["state"] == "ZeroDivisionError: division by zero"
    assert messages[-1]["sender"] == f"main (pid {os.getpid()})"
    assert main(["replay", messages_file(first), "--list"]) == 0
    assert "\n3  step  from main" in capsys.readouterr().out
    assert main(["replay", folder]) == 2
    assert "give ACTOR and RANK, one of: divider 0, divider 1" in capsys.readouterr().err
    assert main(["replay", folder, "absent", "0"]) == 1
    assert "has no actor 'absent' with rank 0; it has: divider 0, divider 1" in capsys.readouterr().err
    assert main(["replay", str(replays.folder.parent / "nothing.replay")]) == 1
    assert "No such file" in capsys.readouterr().err


def messages_file(row: dict[str, Any]) -> str:
    return str(row["file"])


def test_script_with_the_setting_is_recorded_with_its_own_class(warm: WarmInterpreter, replays: Replays) -> None:
    script = """
from monarch_backend.actor import Actor, endpoint, this_proc
class Doubler(Actor):
    @endpoint
    def double(self, value):
        return FACTOR * value
FACTOR = 2
if __name__ == "__main__":
    mesh = this_proc().spawn("doubler", Doubler)
    print(mesh.double.call_one(4).get())
"""
    done = warm.complete(replays.folder.parent / "script.py", script, env={"MONARCH_REPLAY": str(replays.folder)})
    assert done.out == "8\n", done.err
    (replays.folder.parent / "script.py").unlink()
    replays.is_exact("doubler")


def test_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with recorded(tmp_path / "file" / "folder") as procs:
        assert procs.spawn("divider", Divider, 0).step.call_one(1).get(PATIENCE) == 6
    assert "divider, rank 0, is not recorded for a replay: [Errno 20] Not a directory" in capfd.readouterr().err


def test_actors_are_not_recorded_without_the_setting(tmp_path: Path) -> None:
    assert program().local_actors.runner_classes[0].__module__ == "monarch_backend._actor.execution.runner"
    with recorded(tmp_path / "folder") as procs:
        procs.process_group(backend="gloo").get(PATIENCE)  # by an actor of the package
    assert not (tmp_path / "folder").exists()
