"""breakpoint() in processes of a mesh: they wait, and `monarch-backend debug` lists, commands and continues them."""

from __future__ import annotations

import asyncio
import bdb
import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import platform
from monarch_backend._processes import local_sockets
from monarch_backend._processes.debugging import client
from monarch_backend._processes.debugging.client import Attachment, WaitingProcess
from monarch_backend._processes.debugging.messages import Peer
from monarch_backend._telemetry import programs
from monarch_backend.actor import (
    Actor,
    ActorError,
    ActorMesh,
    CancelledError,
    SupervisionError,
    concurrent_endpoint,
    current_rank,
    endpoint,
    this_host,
)
from monarch_backend.cli import main
from tests.actor.script_runner import WarmInterpreter
from tests.actor.support import PATIENCE, Faults
from tests.support.terminal import Terminal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("faults")


_NEEDS_PROC = pytest.mark.skipif(
    not platform.HAS_MEMFD, reason="finds programs, and the pids of clients, as Linux does"
)


class Trainer(Actor):
    """Actor whose endpoints stop at breakpoints."""

    @endpoint
    def step(self, number: int) -> int:
        double = number + current_rank().rank
        breakpoint()
        self.result = double * 2
        return self.result

    @endpoint
    def two_stops(self) -> list[str]:
        seen = []
        breakpoint()
        seen.append("first")
        breakpoint()
        seen.append("second")
        return seen

    @endpoint
    def last_line(self) -> None:
        breakpoint()

    @endpoint
    def fails(self, values: list[int]) -> int:
        return self._seventh(values)

    def _seventh(self, values: list[int]) -> int:
        return values[7]

    @endpoint
    def traced(self) -> bool:
        return sys.gettrace() is not None

    @endpoint
    def in_thread(self) -> None:
        def stop() -> None:
            breakpoint()
            return

        threads = [threading.Thread(target=stop, name=f"thread {number}") for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class AsyncTrainer(Actor):
    """Actor with an event loop."""

    @concurrent_endpoint
    async def step(self) -> str:
        await asyncio.sleep(0)
        breakpoint()
        return "done"

    @concurrent_endpoint
    async def fails(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("wrong")


@pytest.fixture(scope="module")
def trainers() -> Iterator[ActorMesh]:
    with this_host().spawn_procs({"gpus": 2}, name="trainers") as procs:
        mesh = procs.spawn("trainers", Trainer)
        mesh.traced.call().get(PATIENCE)  # they have started before the first test looks for leaks
        yield mesh


@pytest.fixture(autouse=True)
def _nothing_waits_afterwards() -> Iterator[None]:
    yield
    left = _here()
    for _ in client.send_command(left, "quit"):  # so that a failed test does not stop the next ones
        pass
    assert not left


def _here() -> list[WaitingProcess]:
    """Return the waiting processes of this test's own fork server: other tests may run at the same time."""
    ours = os.getpid()
    return [each for each in client.waiting_processes() if _is_descendant(each.pid, ours)]


def _is_descendant(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            return False
    return False


def _wait_for(count: int) -> list[WaitingProcess]:
    def enough() -> list[WaitingProcess] | None:
        found = _here()
        return found if len(found) == count and all(each.label for each in found) else None

    found = wait_until(enough)
    assert found is not None
    return found


def _answers(processes: list[WaitingProcess], command: str) -> list[str]:
    answers = dict(client.send_command(processes, command))
    return [answers[process] for process in processes]


def _continue(processes: list[WaitingProcess]) -> None:
    assert {text for _, text in client.send_command(processes, "continue", until_resumed=True)} == {
        "the program continues"
    }


def test_ranks_wait_at_once_answer_a_command_and_continue(
    trainers: ActorMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = Terminal(capfd)
    future = trainers.step.call(10)
    first, second = _wait_for(2)
    assert [each.label for each in (first, second)] == ["gpus 0 of trainers", "gpus 1 of trainers"]
    assert (first.function, first.file) == ("step", __file__)
    assert _answers([first, second], "p double") == ["10\n", "11\n"]
    assert _answers([second], "double = 50") == [""]
    _continue([first, second])
    assert list(future.get(PATIENCE).values()) == [20, 100]
    for each in (first, second):
        line = f"{each.label} (pid {each.pid}) waits at {each.where}: monarch-backend debug"
        shown.wait(f"[{each.label.removesuffix(' of trainers')}] {line}", stream="err")
    assert not any(trainers.traced.call().get(PATIENCE).values()), "tracing would slow the program"


def test_assigned_variables_stay_after_other_commands_and_clients(trainers: ActorMesh) -> None:
    future = trainers.slice(gpus=1).step.call_one(10)
    process = _wait_for(1)[0]
    answers = [_answers([process], each)[0] for each in ("double = 50", "extra = 1", "where", "p double", "p extra")]
    assert "step()" in answers[2] and answers[3:] == ["50\n", "1\n"]
    assert Attachment(process).run(_leave, list) == "detached: the process waits on"
    assert _answers([process], "p double") == ["50\n"]
    _continue([process])
    assert future.get(PATIENCE) == 100


@pytest.mark.parametrize("is_answered", [False, True])
def test_command_to_a_process_that_ends_its_wait_says_so(is_answered: bool) -> None:
    with _closing_listener(is_answered) as address:
        process = WaitingProcess("1.1", 1, address=address)
        [(_, text)] = client.send_command([process], "continue", until_resumed=True)
    assert text == "it does not wait any more: its call or its process has ended"


def test_command_that_cannot_be_sent_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    monkeypatch.setattr(client, "connect", lambda _: Peer(ours, 1))
    [(_, text)] = client.send_command([WaitingProcess("1.1", 1)], "continue")
    assert text == "it does not wait any more: its call or its process has ended"
    assert ours.fileno() == -1


@contextlib.contextmanager
def _closing_listener(is_answered: bool) -> Iterator[str]:
    """Listen as a waiting process that closes its socket before it has read the command, or accepted a client."""
    address = local_sockets.address_of(f"test-closing-{os.getpid()}")
    listener = local_sockets.listen_at(address, 1)

    def close() -> None:
        select.select([listener], [], [])
        if is_answered:
            connection, _ = listener.accept()
            select.select([connection], [], [])  # unread data resets the connection
            connection.close()
        local_sockets.close(listener)

    closing = threading.Thread(target=close)
    closing.start()
    try:
        yield address
    finally:
        closing.join()


@_NEEDS_PROC
def test_command_line_lists_selects_folds_and_continues(
    trainers: ActorMesh, capsys: pytest.CaptureFixture[str]
) -> None:
    future = trainers.step.call(10)
    first, second = _wait_for(2)
    mine = ["--program", str(first.pid)]
    assert main(["debug", *mine]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:3] for line in lines] == [
        [each.label, f"pid {each.pid}", each.where] for each in (first, second)
    ]
    assert main(["debug", str(first.pid), "--json"]) == 0
    assert [each["pid"] for each in json.loads(capsys.readouterr().out)] == [first.pid, second.pid]
    assert main(["debug", "run", "p number", *mine]) == 0
    assert capsys.readouterr().out == "[gpus 0-1 of trainers] 10\n"
    assert main(["debug", "run", "p double", "--ranks", "gpus=1", *mine]) == 0
    assert capsys.readouterr().out == "[gpus 1 of trainers] 11\n"
    assert main(["debug", "run", "p double", "--json", *mine]) == 0
    assert [each["answer"] for each in json.loads(capsys.readouterr().out)] == ["10\n", "11\n"]
    assert main(["debug", "run", "p 1", "--ranks", "gpus=7", *mine]) == 1
    assert "no waiting process is 'gpus=7'; there are: gpus 0 of trainers" in capsys.readouterr().err
    assert main(["debug", "attach", "gpus=0-1", *mine]) == 1
    assert f"attach to one of them: {first.id} (gpus 0 of trainers), {second.id}" in capsys.readouterr().err
    assert main(["debug", "run", *mine]) == 2
    assert main(["debug", "continue", *mine]) == 0
    assert future.get(PATIENCE)


def test_each_stop_is_answered_and_stepping_ends_with_the_endpoint(trainers: ActorMesh) -> None:
    future = trainers.slice(gpus=0).step.call_one(1)
    seen: list[str] = []
    while "the program continues" not in seen:  # pdb of Python 3.13 stops a line earlier
        seen += _answers(_wait_for(1), "next")
    assert any(text.endswith("step()\n-> return self.result\n") for text in seen)
    assert any("--Return--" in text for text in seen) and len(seen) in (3, 4)
    assert future.get(PATIENCE) == 2


def test_next_breakpoint_stops_again(trainers: ActorMesh) -> None:
    future = trainers.slice(gpus=1).two_stops.call_one()
    _continue(_wait_for(1))
    [process] = _wait_for(1)
    assert _answers([process], "p seen") == ["['first']\n"]
    _continue([process])
    assert future.get(PATIENCE) == ["first", "second"]
    future = trainers.slice(gpus=1).last_line.call_one()
    _continue(_wait_for(1))
    assert future.get(PATIENCE) is None


def test_breakpoints_of_pdb_stop_later_calls(trainers: ActorMesh) -> None:
    one = trainers.slice(gpus=1)
    future = one.step.call_one(1)
    [process] = _wait_for(1)
    assert "Breakpoint 1 at" in _answers([process], "break Trainer._seventh")[0]
    _continue([process])
    assert future.get(PATIENCE) == 2
    future = one.fails.call_one([1] * 8)
    [process] = _wait_for(1)
    assert process.function == "_seventh"
    assert "Deleted" in _answers([process], "clear 1")[0]
    _continue([process])
    assert future.get(PATIENCE) == 1
    assert not one.traced.call_one().get(PATIENCE)


def test_quit_is_an_error_of_the_endpoint(trainers: ActorMesh) -> None:
    future = trainers.slice(gpus=0).step.call_one(1)
    assert _answers(_wait_for(1), "quit") == ["the endpoint ends with BdbQuit"]
    error = future.exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, bdb.BdbQuit)
    assert not trainers.slice(gpus=0).traced.call_one().get(PATIENCE), "the actor lives on"


@_NEEDS_PROC
def test_threads_of_a_process_wait_each_for_itself(trainers: ActorMesh, capsys: pytest.CaptureFixture[str]) -> None:
    future = trainers.slice(gpus=0).in_thread.call_one()
    both = _wait_for(2)
    assert {each.thread for each in both} == {"thread 0", "thread 1"} and len({each.pid for each in both}) == 1
    [second] = client.select_processes([both[1].id], both)
    assert _answers([second], "p threading.current_thread().name") == [f"{second.thread!r}\n"]
    assert main(["debug", str(second.pid)]) == 0
    assert [line.split()[5] for line in capsys.readouterr().out.splitlines()] == [each.id for each in both]
    _continue(both)
    future.get(PATIENCE)


def test_completion_is_that_of_pdb_in_the_process(trainers: ActorMesh) -> None:
    future = trainers.slice(gpus=0).step.call_one(1)
    [process] = _wait_for(1)
    attachment = Attachment(process)
    lines = iter(["p double", "continue"])
    shown: list[str] = []

    def read_line(prompt: str) -> str:
        shown.append(prompt)
        assert attachment.names("dou", "p dou", 2, 5) == ["double"]
        assert attachment.names("number.bit_l", "p number.bit_l", 2, 14) == ["number.bit_length"]
        assert "longlist" in attachment.names("long", "long", 0, 4)
        assert attachment.names("nothing.at", "p nothing.at", 2, 12) == []
        return next(lines)

    assert attachment.run(read_line, shown.append) == "the program continues"
    assert "(Pdb) " in shown and "1\n" in shown
    assert future.get(PATIENCE) == 2


def test_empty_line_repeats_only_a_command_of_the_same_client(trainers: ActorMesh) -> None:
    future = trainers.slice(gpus=0).step.call_one(1)
    [process] = _wait_for(1)
    assert _answers([process], "self.count = getattr(self, 'count', 0) + 1") == [""]
    assert _answers([process], "") == [""]
    lines = iter(["", "p self.count", "", "continue"])
    shown: list[str] = []
    assert Attachment(process).run(lambda _: next(lines), shown.append) == "the program continues"
    assert [text for text in shown if text.strip().isdecimal()] == ["1\n", "1\n"]
    assert future.get(PATIENCE) == 2


@_NEEDS_PROC
def test_empty_command_is_refused(trainers: ActorMesh, capsys: pytest.CaptureFixture[str]) -> None:
    future = trainers.step.call(1)
    mine = ["--program", str(_wait_for(2)[0].pid)]
    assert main(["debug", "run", "number = 7", *mine]) == 0
    for command in ("", "  "):
        assert main(["debug", "run", command, *mine]) == 2
        assert "the command is empty" in capsys.readouterr().err
    assert main(["debug", "continue", *mine]) == 0
    assert future.get(PATIENCE)


@_NEEDS_PROC
def test_second_client_is_refused_until_the_first_has_left(
    trainers: ActorMesh, capfd: pytest.CaptureFixture[str]
) -> None:
    future = trainers.slice(gpus=0).step.call_one(1)
    [process] = _wait_for(1)

    def read_line(prompt: str) -> str:
        [seen] = _wait_for(1)
        assert seen.attached == os.getpid()
        refusal = f"process {os.getpid()} is attached to it"
        assert _answers([process], "continue") == [refusal]
        assert Attachment(process).run(_never, print) == refusal
        raise EOFError

    assert Attachment(process).run(read_line, print) == "detached: the process waits on"
    shown = Terminal(capfd)
    shown.wait(
        f"[gpus 0] gpus 0 of trainers (pid {process.pid}) still waits at {process.where}: monarch-backend debug",
        stream="err",
    )
    _continue(_wait_for(1))
    assert future.get(PATIENCE) == 2


def _leave(prompt: str) -> str:
    raise EOFError(prompt)


def _never(prompt: str) -> str:
    raise AssertionError(prompt)


@pytest.mark.parametrize("how", ["cancel", "stop"])
@pytest.mark.parametrize("place", ["main thread", "other thread"])
@pytest.mark.parametrize("actor", [Trainer, AsyncTrainer])
def test_end_of_the_call_or_mesh_ends_the_wait(how: str, actor: type[Any], place: str) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    if place == "other thread":
        procs.spawn("first", Trainer)
    mesh = procs.spawn("trainer", actor)
    future = mesh.step.call_one(*([1] if actor is Trainer else []))
    [process] = _wait_for(1)
    if how == "cancel":
        future.cancel()
        assert isinstance(future.exception(PATIENCE), CancelledError)
        wait_until(lambda: not _here())
        again = mesh.step.call_one(*([1] if actor is Trainer else []))
        _continue(_wait_for(1))
        assert again.get(PATIENCE)
    procs.stop().get(PATIENCE)
    if how == "stop":
        error = future.exception(PATIENCE)
        assert isinstance(error, ActorError) and "BdbQuit: the process is to stop" in str(error)
    with pytest.raises(OSError):
        client.connect(process.address)


def test_killed_process_waits_no_more(faults: Faults) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    future = procs.spawn("trainer", Trainer).step.call_one(1)
    [process] = _wait_for(1)
    attachment = Attachment(process)

    def read_line(prompt: str) -> str:
        os.kill(process.pid, signal.SIGKILL)
        assert isinstance(future.exception(PATIENCE), SupervisionError)
        return "p 1"

    assert attachment.run(read_line, print) == "the process has ended"
    assert "SIGKILL" in faults.next().report()


def test_process_waits_without_its_controller_only_until_that_ends(warm: WarmInterpreter, tmp_path: Path) -> None:
    script = (
        "from monarch_backend.actor import this_host\n"
        "from tests.actor.test_breakpoint import Trainer\n"
        "this_host().spawn_procs({'gpus': 1}).spawn('trainer', Trainer).step.call_one(1).get()\n"
    )
    run = warm.start(tmp_path / "script.py", script)
    run.read_until("waits at")
    pid = int(run.err.partition("(pid ")[2].partition(")")[0])
    assert [each.label for each in client.waiting_processes() if each.pid == pid] == ["gpus 0 of procs-0"]
    run.signal(signal.SIGINT)
    assert "KeyboardInterrupt" in warm.finish().err
    assert not [each for each in client.waiting_processes() if each.pid == pid]


@pytest.fixture
def warm() -> Iterator[WarmInterpreter]:
    from monarch_backend._actor.runtime import program

    with WarmInterpreter(str(program().owner.starter.spawner.address)) as interpreter:
        yield interpreter
        interpreter.drop()


def test_killed_client_leaves_the_process_waiting_for_another(trainers: ActorMesh, tmp_path: Path) -> None:
    future = trainers.slice(gpus=1).step.call_one(1)
    [process] = _wait_for(1)
    with _attached(process) as (_, read_until, pid):
        read_until(b"(Pdb) ")
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not _wait_for(1)[0].attached)
    assert _answers([process], "p double") == ["1\n"]
    _continue([process])
    assert future.get(PATIENCE) == 2


def test_terminal_completes_names_of_the_process(trainers: ActorMesh) -> None:
    future = trainers.slice(gpus=1).step.call_one(1)
    [process] = _wait_for(1)
    with _attached(process) as (terminal, read_until, _):
        shown = read_until(b"(Pdb) ")
        assert b"gpus 1 of trainers (pid %d) waits at " % process.pid in shown and b"-> " in shown
        os.write(terminal, b"p doub\t")
        read_until(b"double")
        os.write(terminal, b" + 40\n")
        read_until(b"41")
        os.write(terminal, b"c\n")
        read_until(b"the program continues")
    assert future.get(PATIENCE) == 2


@contextlib.contextmanager
def _attached(process: WaitingProcess) -> Iterator[tuple[int, Callable[[bytes], bytes], int]]:
    """Run `monarch-backend debug attach` in a pseudo-terminal. Yield its descriptor, a reader, and the pid."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "monarch_backend.cli", "debug", "attach", str(process.pid)]
    environment = {**os.environ, "TERM": "dumb"}
    debugger = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = bytearray()

    def read_until(text: bytes) -> bytes:
        while text not in seen:
            seen.extend(os.read(ours, 1024))
        shown = bytes(seen)
        seen.clear()
        return shown

    try:
        yield ours, read_until, debugger.pid
        debugger.wait(PATIENCE)
    finally:
        debugger.kill()
        debugger.wait()
        os.close(ours)


@pytest.mark.skipif(not platform.HAS_PEER_CREDENTIALS, reason="elsewhere the folder of the sockets keeps others out")
def test_connection_of_another_user_is_closed(trainers: ActorMesh) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user's process needs root")
    future = trainers.slice(gpus=0).step.call_one(1)
    [process] = _wait_for(1)
    child = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1][1:]); s.settimeout(30)\n"
        'try:\n    s.send(b\'{"do": "run", "command": "continue"}\\n\'); left = s.recv(1)\n'
        "except (BrokenPipeError, ConnectionResetError):\n    left = b''\n"
        "sys.exit(left != b'')\n"
    )
    subprocess.run([sys.executable, "-c", child, process.address], check=True, timeout=PATIENCE)
    _continue(_wait_for(1))
    assert future.get(PATIENCE) == 2


def test_socket_of_another_process_is_no_waiting_process() -> None:
    address = local_sockets.address_of(f"debug-{os.getpid()}-00000000")
    listener = local_sockets.listen_at(address, 1)

    def answer() -> None:
        with listener.accept()[0] as sock:
            sock.sendall(b"no JSON\n")

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        assert _here() == []
        answering.join()
    finally:
        local_sockets.close(listener)


@pytest.mark.parametrize(
    "data", [b"no JSON\n", b"[]\n", b'{"do": "unknown"}\n', b"\xff" * 100 + b"\n", b'{"do": "names"}\n']
)
def test_bad_request_does_not_harm_the_wait(trainers: ActorMesh, data: bytes) -> None:
    future = trainers.slice(gpus=0).step.call_one(1)
    [process] = _wait_for(1)
    with contextlib.closing(client.connect(process.address)) as peer:
        peer.socket.sendall(data)
        with contextlib.suppress(EOFError, ConnectionError):
            assert not {"output", "prompt"} & peer.receive()[0].keys()
    assert _answers([process], "p double") == ["1\n"]
    _continue([process])
    assert future.get(PATIENCE) == 2


@pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")
def test_recording_shows_the_wait(trainers: ActorMesh, capsys: pytest.CaptureFixture[str]) -> None:
    future = trainers.slice(gpus=0).step.call_one(1)
    [process] = _wait_for(1)
    [program] = programs.select(str(process.pid))
    [recorded] = [each for each in program.processes if each.pid == process.pid]
    [activity] = [each for each in recorded.activities if each["kind"] == "wait"]
    assert (activity["name"], activity["state"], activity["detail"]) == ("breakpoint", "waiting", process.where)
    assert main(["ps", str(process.pid)]) == 0
    assert f"      waits at {process.where} for " in capsys.readouterr().out
    _continue([process])
    future.get(PATIENCE)


@pytest.mark.parametrize("actor", [Trainer, AsyncTrainer])
def test_post_mortem_waits_where_the_endpoint_has_raised(actor: type[Any]) -> None:
    with this_host().spawn_procs({"gpus": 1}, post_mortem=True) as procs:
        mesh = procs.spawn("trainer", actor)
        arguments = [[1, 2]] if actor is Trainer else []
        future = mesh.fails.call_one(*arguments)
        [process] = _wait_for(1)
        assert process.function == ("_seventh" if actor is Trainer else "fails")
        kind = "IndexError" if actor is Trainer else "ValueError"
        assert process.where.endswith(f" in {process.function} after {kind}")
        if actor is Trainer:
            assert _answers([process], "p values") == ["[1, 2]\n"]
            assert "in fails" not in _answers([process], "up")[0]
        assert not future.done()
        _continue([process])
        error = future.exception(PATIENCE)
        assert isinstance(error, ActorError) and type(error.__cause__).__name__ == kind
        future = mesh.fails.call_one(*arguments)
        _wait_for(1)
        future.cancel()
        assert isinstance(future.exception(PATIENCE), CancelledError)


@pytest.mark.parametrize(("chosen", "result"), [("0", "first"), ("os.getpid", "first")])
def test_environment_names_another_debugger_or_none(chosen: str, result: str) -> None:
    with this_host().spawn_procs({"gpus": 1}, env={"PYTHONBREAKPOINT": chosen}) as procs:
        assert procs.spawn("trainer", Trainer).two_stops.call_one().get(PATIENCE)[0] == result


@pytest.mark.slow
def test_debugpy_waits_for_an_editor_and_stops_at_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("debugpy")
    shown = Terminal(capfd)
    with this_host().spawn_procs({"gpus": 1}, env={"PYTHONBREAKPOINT": "debugpy.breakpoint"}) as procs:
        future = procs.spawn("trainer", Trainer).step.call_one(1)
        wait_until(lambda: "for a client of debugpy: 127.0.0.1:" in shown.err)
        port = int(shown.err.rpartition("127.0.0.1:")[2].split()[0])
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock, sock.makefile("rwb") as file:
            editor = Editor(file)
            editor.request("initialize", adapterID="test", pathFormat="path")
            editor.request("attach", justMyCode=False)
            editor.read_until(lambda message: message.get("event") == "initialized")
            editor.request("configurationDone")
            stopped = editor.read_until(lambda message: message.get("event") == "stopped")
            number = editor.request("stackTrace", threadId=stopped["body"]["threadId"])
            stack = editor.read_until(lambda message: message.get("request_seq") == number)
            top = stack["body"]["stackFrames"][0]
            assert (top["name"].rpartition(".")[2], top["source"]["path"]) == ("step", __file__)
            editor.request("continue", threadId=stopped["body"]["threadId"])
            assert future.get(PATIENCE) == 2


@pytest.mark.slow
def test_stop_ends_the_wait_for_an_editor(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("debugpy")
    shown = Terminal(capfd)
    procs = this_host().spawn_procs({"gpus": 1}, env={"PYTHONBREAKPOINT": "debugpy.breakpoint"})
    future = procs.spawn("trainer", Trainer).step.call_one(1)
    wait_until(lambda: "for a client of debugpy: 127.0.0.1:" in shown.err)
    procs.stop().get(PATIENCE)
    assert "BdbQuit: the process is to stop" in str(future.exception(PATIENCE))


class Editor:
    """Client of the Debug Adapter Protocol, as an editor is one."""

    def __init__(self, file: Any) -> None:
        self._file, self._number = file, 0

    def request(self, command: str, **arguments: Any) -> int:
        """Send a request and return its number."""
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._file.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._file.flush()
        return self._number

    def read_until(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first message that is wanted."""
        while True:
            length = int(self._file.readline().split()[1])
            self._file.readline()
            message: dict[str, Any] = json.loads(self._file.read(length))
            if is_wanted(message):
                return message
