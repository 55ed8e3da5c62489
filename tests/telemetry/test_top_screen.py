"""The screen of `monarch-backend top`: keys and rows by textual's pilot, and the command in a pseudo-terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry.program_recording import Unread
from monarch_backend._telemetry.programs import Process, Program, select
from monarch_backend._telemetry.subject import ThisMachine
from tests.support.leaks import children_of
from tests.support.waiting import wait_until
from tests.telemetry.programs import busy_program

pytest.importorskip("textual", reason="needs pip install 'monarch_backend[top]'")

from textual.pilot import Pilot
from textual.widgets import Input, Log, Static

from monarch_backend.cli.top_screen import Page, Question, Top, Tree

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="programs are found in /proc")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with busy_program(str(tmp_path_factory.mktemp("program"))) as process:
        yield process


class Screen:
    """The application with a pilot that presses its keys."""

    def __init__(self, app: Top, pilot: Pilot[None]) -> None:
        self.app, self.press = app, pilot.press
        self.pause = pilot.pause

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the application work until the condition is true."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, self.text
            await self.pause(0.01)

    @property
    def tree(self) -> Tree:
        return self.app.screen_stack[0].query_one(Tree)

    @property
    def names(self) -> list[str]:
        return [str(self.tree.get_row_at(number)[0]).strip() for number in range(self.tree.row_count)]

    @property
    def chosen(self) -> str:
        return self.names[self.tree.cursor_row]

    @property
    def problem(self) -> str:
        return str(self.app.screen_stack[0].query_one(Static).render())

    @property
    def text(self) -> str:
        """The visible screen."""
        screen = self.app.screen
        return "\n".join(strip.text for strip in screen._compositor.render_strips())

    @property
    def is_page(self) -> bool:
        return isinstance(self.app.screen, Page)

    @property
    def output(self) -> str:
        return "\n".join(self.app.screen.query_one(Log).lines) if self.is_page else ""


def use(there: Any, name: str, steps: Callable[[Screen], Coroutine[Any, Any, None]]) -> None:
    """Show the application, take the steps, and check that q has ended it and no thread or process is left."""

    async def run() -> None:
        app = Top(there, name, 0.2)
        async with app.run_test(size=(170, 24)) as pilot:
            screen = Screen(app, pilot)
            await screen.until(lambda: screen.tree.row_count)
            await steps(screen)
            await pilot.press("q")
            if isinstance(there, Programs):
                there.may_look.release()  # the end of the application waits for the look
        assert app.return_code == 0

    threads, children = set(threading.enumerate()), children_of(os.getpid())
    asyncio.run(run())
    assert set(threading.enumerate()) == threads
    assert set(children_of(os.getpid())) <= set(children)


def test_keys_show_stack_and_lines_of_the_chosen_process(running: subprocess.Popen[str]) -> None:
    async def steps(screen: Screen) -> None:
        assert screen.names[1:] == [
            "gpus 0 of trainers", "worker rank 0", "concurrent rank 0",
            "gpus 1 of trainers", "worker rank 1", "concurrent rank 1",
        ]  # fmt: skip
        await screen.press("down", "down", "down", "down", "down", "s")
        await screen.until(lambda: "in sleep" in screen.output)
        assert "stack of gpus 1 of trainers (pid " in screen.text and "gpus 0" not in screen.output
        await screen.press("escape", "l")
        await screen.until(lambda: ": sleeps" in screen.output)
        await screen.press("q")
        assert not screen.is_page and screen.chosen == "worker rank 1"

    with ThisMachine(str(running.pid)) as there:
        use(there, str(running.pid), steps)


def test_escape_ends_the_command_of_a_page(running: subprocess.Popen[str]) -> None:
    before = children_of(os.getpid())

    async def steps(screen: Screen) -> None:
        await screen.press("down", "l")  # of a process that writes nothing
        await screen.until(lambda: set(children_of(os.getpid())) - set(before))
        await screen.until(lambda: "logs of gpus 0 of trainers" in screen.text and ": no output yet" in screen.text)
        await screen.press("escape")
        await screen.until(lambda: children_of(os.getpid()) == before)
        await screen.until(lambda: "gpus 1 of trainers" in screen.text)
        await screen.press("l")  # it runs when the application quits
        await screen.until(lambda: set(children_of(os.getpid())) - set(before))
        await screen.press("ctrl+c")

    with ThisMachine(str(running.pid)) as there:
        use(there, str(running.pid), steps)


@pytest.mark.parametrize(
    ("keys", "question", "answer"),
    [
        (["down"], "Kill gpus 0 of trainers (pid ", ("9", "killed gpus 0 of trainers")),
        ([], "with all its processes?", ("y", "with SIGTERM, and its 2 processes ended")),
    ],
)
def test_process_is_killed_after_a_question(
    keys: list[str], question: str, answer: tuple[str, str], tmp_path: Path
) -> None:
    with busy_program(str(tmp_path)) as process, ThisMachine(str(process.pid)) as there:

        async def steps(screen: Screen) -> None:
            await screen.press(*keys, "k")
            await screen.until(lambda: question in screen.text and "SIGKILL" in screen.text)
            await screen.press("n", "k", "escape", "k", "q")
            assert not isinstance(screen.app.screen, Question) and not screen.is_page
            assert [each.exit_code for each in select(str(process.pid))[0].processes] == [None] * 3
            key, output = answer
            await screen.press("k", key)
            await screen.until(lambda: output in screen.output)
            assert process.wait(30) != 0  # also where one process is lost
            await screen.press("escape")
            await screen.until(lambda: "no running program is" in screen.text)
            await screen.press("s", "l", "k")
            assert not screen.is_page and screen.tree.row_count == 0

        use(there, str(process.pid), steps)


class Programs:
    """A subject whose programs a test sets. Each look but the first waits for `look_again`."""

    def __init__(self, labels: list[str]) -> None:
        self.labels, self.host = labels, ""
        self.changed: dict[str, dict[str, int]] = {}
        self._pids: dict[str, int] = {}
        self._count = 0
        self.may_look = threading.Semaphore(1)

    def look(self) -> tuple[list[Program], dict[Any, Any], list[Unread]]:
        assert self.may_look.acquire(timeout=60)
        self._count += 1
        pids = [self._pids.setdefault(label, len(self._pids) + 1) for label in self.labels]
        processes = [
            replace(
                Process(pid, label, "running", int(pid != 1), 1.0, None, (1 << 30) + self._count, 1.0, []),
                **self.changed.get(label, {}),
            )
            for pid, label in zip(pids, self.labels, strict=True)
        ]
        unread = [Unread(7, "hosts[1]", f"it is [bold]gone[/bold] {self._count}")]
        found = [Program(1, "train.py [red]x[/red] \x1b[2J[", processes)]
        if self.host:
            found.append(Program(1, "python", [replace(processes[0], pid=3, label="agent"), processes[1]], self.host))
        return found, {}, unread

    async def look_again(self, screen: Screen) -> None:
        """Let the application look, and wait until it shows what it has found."""
        count = self._count + 1
        self.may_look.release()
        await screen.until(lambda: f" {count}" in screen.problem)
        await screen.pause()


def test_text_of_programs_is_shown_as_it_is() -> None:
    there = Programs(["program 1", "[link=https://example.com]gpus 0[/]", "\x9b31mred"])

    async def steps(screen: Screen) -> None:
        shown = screen.text
        assert "train.py [red]x[/red] \ufffd[2J[" in shown
        assert "[link=https://example.com]gpus 0[/]" in shown and "\ufffd31mred" in shown
        assert "not read: " in shown and "it is [bold]gone[/bold]" in shown
        await screen.press("down", "k")
        await screen.until(lambda: "Kill [link=https://example.com]gpus 0[/] (pid 2)?" in screen.text)
        await screen.press("n", "s")
        await screen.until(lambda: "no running program is '1'" in screen.output)
        assert "stack of [link=https://example.com]gpus 0[/] (pid 2)" in screen.text
        await screen.press("escape")

    use(there, "", steps)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The arguments of the commands of pages. Each page runs a program in their place, and has its output."""
    started: list[tuple[str, ...]] = []
    start = asyncio.create_subprocess_exec

    async def substitute(
        _python: str, _m: str, _module: str, *words: str, **options: Any
    ) -> asyncio.subprocess.Process:
        started.append(words)
        return await start(sys.executable, "-c", f"print({OUTPUT!r}, end='')", **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", substitute)
    return started


OUTPUT = "\x1b[31mred\x1b[0m [b]bold[/b]\n\x1b]0;title\x07a\tb\x9b2J\r\n" + 5000 * "x" + "\n\x00end"


@pytest.mark.usefixtures("commands")
def test_output_of_a_page_has_no_control_characters() -> None:
    async def steps(screen: Screen) -> None:
        await screen.press("s")
        await screen.until(lambda: "end" in screen.output)
        assert screen.output == f"red [b]bold[/b]\na       b\ufffd2J\n{4096 * 'x'}\n\ufffdend"
        await screen.press("escape")

    use(Programs(["program 1"]), "", steps)


def test_commands_choose_the_process_of_the_row(commands: list[tuple[str, ...]]) -> None:
    there = Programs(["program 1", "gpus 0"])

    async def steps(screen: Screen) -> None:
        there.host = "hosts[1] (b)"
        await there.look_again(screen)
        await screen.press("home")
        for name in screen.names:
            for keys in (["s"], ["l"], ["k", "9"]):
                count = len(commands)
                await screen.press(*keys)
                if name not in ("this machine", "hosts[1] (b)"):
                    await screen.until(lambda count=count: len(commands) > count and screen.is_page)
                    await screen.press("escape")
                await screen.until(lambda: not screen.is_page)
            await screen.press("down")

    use(there, "job", steps)
    on_host = ("job", "--rank=gpus 0")
    assert commands == [
        ("stack", "1"), ("logs", "1", "--follow"), ("kill", "1", "--signal", "KILL"),
        ("stack", "1", "--rank=2"), ("logs", "1", "--rank=gpus 0", "--follow"),
        ("kill", "1", "--rank=2", "--signal", "KILL"),
        ("stack", "job", "--rank=agent"), ("logs", "job", "--rank=agent", "--follow"),
        ("kill", "job", "--rank=agent", "--signal", "KILL"),
        ("stack", *on_host), ("logs", *on_host, "--follow"), ("kill", *on_host, "--signal", "KILL"),
    ]  # fmt: skip


def test_chosen_row_and_scroll_position_stay_when_rows_come_and_go() -> None:
    there = Programs(["program 1", *(f"gpus {number}" for number in range(100))])

    async def steps(screen: Screen) -> None:
        await screen.press("pagedown", "pagedown", *["down"] * 5, *["up"] * 4)
        chosen, top = screen.chosen, screen.tree.scroll_offset.y
        offset = screen.tree.cursor_row - top
        assert top > 20
        del there.labels[10:13]
        await there.look_again(screen)
        assert (screen.chosen, screen.tree.scroll_offset.y) == (chosen, top - 3)
        there.labels[1:1] = [f"new {number}" for number in range(60)]
        await there.look_again(screen)
        assert (screen.chosen, screen.tree.cursor_row - screen.tree.scroll_offset.y) == (chosen, offset)
        screen.tree.scroll_to(y=0, animate=False, immediate=True)  # as a mouse does
        await screen.press("s")  # rows also change below a page
        for number in range(2):
            there.labels.append(f"last {number}")
            await there.look_again(screen)
        await screen.press("escape")
        assert (screen.chosen, screen.tree.scroll_offset.y) == (chosen, 0)
        there.labels.remove(chosen)
        await there.look_again(screen)
        assert screen.chosen == f"gpus {int(chosen.split()[1]) + 1}"

    use(there, "", steps)


def test_keys_work_while_a_look_has_not_ended() -> None:
    async def steps(screen: Screen) -> None:
        await screen.press("down", "k")
        await screen.until(lambda: "Kill gpus 0" in screen.text)
        await screen.press("n")

    use(Programs(["program 1", "gpus 0"]), "", steps)


def test_only_rows_that_differ_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Programs(["program 1", "gpus 0"])
    drawn: list[str] = []
    monkeypatch.setattr(Tree, "update_cell", lambda _, key, *rest: drawn.append(key))
    monkeypatch.setattr(Tree, "clear", lambda *_, **__: drawn.append("all"))

    async def steps(screen: Screen) -> None:
        drawn.clear()
        await there.look_again(screen)
        assert not drawn  # a byte more of memory is the same text
        there.changed = {"gpus 0": {"memory": 1 << 32}}
        await there.look_again(screen)
        await there.look_again(screen)
        assert len(drawn) == 1 and "gpus 0" in drawn[0]

    use(there, "", steps)


def test_column_appears_with_its_first_content() -> None:
    there = Programs(["program 1", "gpus 0"])

    async def steps(screen: Screen) -> None:
        assert "MEMORY" in screen.text and "RESTARTS" not in screen.text
        there.changed = {"gpus 0": {"restarts": 123456789}}
        await there.look_again(screen)
        assert "RESTARTS" in screen.text and " 123456789" in screen.text

    use(there, "", steps)


def test_filter_shows_rows_with_a_text(running: subprocess.Popen[str]) -> None:
    async def steps(screen: Screen) -> None:
        await screen.press("slash", *"Sleep")
        await screen.until(lambda: len(screen.names) == 3)
        assert screen.names[1:] == ["gpus 1 of trainers", "worker rank 1"]
        await screen.press("enter", "down", "down")
        assert screen.chosen == "worker rank 1"
        await screen.press("escape")
        assert screen.tree.row_count == 7 and screen.chosen == "worker rank 1"
        assert not screen.app.query_one(Input).display
        await screen.press("slash", "q", "escape")  # q is a letter there
        assert screen.tree.row_count == 7 and not screen.problem

    with ThisMachine(str(running.pid)) as there:
        use(there, str(running.pid), steps)


class _Terminal:
    """A pseudo-terminal with `monarch-backend top` in it."""

    def __init__(self, *arguments: str) -> None:
        self._controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))
        os.set_blocking(self._controller, False)
        self._modes = termios.tcgetattr(terminal)
        self._terminal = terminal
        command = [sys.executable, "-m", "monarch_backend.cli", "top", *arguments]
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"}
        )
        self.shown = ""

    def has(self, text: str) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.shown += os.read(self._controller, 1 << 16).decode(errors="replace")
        return text in self.shown

    def press(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def ended(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        wait_until(lambda: self.has("") and self.process.poll() is not None)
        self.has("")
        return self.process.wait()

    @property
    def is_restored(self) -> bool:
        """Whether the terminal has its modes and its first screen again."""
        return termios.tcgetattr(self._terminal) == self._modes and self.shown.count("\x1b[?1049l") == 1

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
        os.close(self._controller)


@contextlib.contextmanager
def _terminal(*arguments: str) -> Iterator[_Terminal]:
    terminal = _Terminal(*arguments)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize(("end", "code"), [("q", 0), ("\x03", 0), (signal.SIGTERM, 143)])
def test_command_shows_rows_and_restores_the_terminal(
    end: str | signal.Signals, code: int, running: subprocess.Popen[str]
) -> None:
    with _terminal(str(running.pid), "--interval", "0.1") as terminal:
        wait_until(lambda: terminal.has("worker rank 1"))
        if isinstance(end, str):
            terminal.press(end)
        else:
            terminal.process.send_signal(end)
        assert terminal.ended() == code
        assert terminal.is_restored


def test_command_ends_when_there_is_no_such_program() -> None:
    with _terminal("no such program") as terminal:
        assert terminal.ended() == 1
        assert "no running program is 'no such program'" in terminal.shown
        assert "\x1b[?1049h" not in terminal.shown
