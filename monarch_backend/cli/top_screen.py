"""The screen of `monarch-backend top`, drawn with textual: the tree, and pages with the output of other commands."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import re
import signal
import sys
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, Log, Static

from monarch_backend.cli.arguments import nothing_there
from monarch_backend.cli.top_rows import COLUMNS, Row, chosen, line, printable, rows_of, widths

if TYPE_CHECKING:
    from monarch_backend._telemetry.subject import Member, Subject

MAX_LINES = 10_000
MAX_LINE = 4096
"""Kept lines of a page, and characters of each."""

_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


def show(there: Subject, name: str, interval: float) -> int:
    """Show the programs, each ``interval`` seconds anew, until the user quits. Return the exit code.

    ``name`` is the PROGRAM argument, for the commands that the keys run.
    """

    async def run() -> int:
        app = Top(there, name, interval)
        ended = functools.partial(app.exit, return_code=128 + signal.SIGTERM)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended)
        await app.run_async()
        return app.return_code or 0

    return asyncio.run(run())


class Top(App[None]):
    """The application. A look reads on a thread, so keys work while other hosts have not answered."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "monarch-backend top"
    CSS = """
    DataTable, Log { height: 1fr; }
    Input { display: none; border: none; height: 1; }
    Question { align: center middle; }
    Question Static { text-align: center; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "quit", show=False, priority=True)]

    def __init__(self, there: Subject, name: str, interval: float) -> None:
        super().__init__()
        self._there, self._interval = there, interval
        self._table, self._problem, self._filter = Tree(name), Static(), Filter(placeholder="text in a row")
        self._rows: list[Row] = []

    def compose(self) -> ComposeResult:
        """Return the widgets of the first screen."""
        yield self._table
        yield self._problem
        yield self._filter
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self._follow()

    @work
    async def _follow(self) -> None:
        while True:
            self._rows, problem = await asyncio.to_thread(self._look)
            self._problem.update(Text(printable(problem or ("" if self._rows else nothing_there()))))
            self._show()
            await asyncio.sleep(self._interval)

    def _look(self) -> tuple[list[Row], str]:
        try:
            programs, rates, unread = self._there.look()
        except (LookupError, OSError) as error:  # the program has ended
            return [], str(error)
        return rows_of(programs, rates), "; ".join(f"not read: {each}" for each in unread)

    def _show(self) -> None:
        self._table.show(chosen(self._rows, self._filter.value))

    def on_input_changed(self) -> None:
        """Show the rows with the text that is typed."""
        self._show()

    def on_input_submitted(self) -> None:
        """Return to the rows."""
        self._table.focus()

    def action_filter(self) -> None:
        """Ask for a text. Only the rows with it are shown."""
        self._filter.display = True
        self._filter.focus()

    def action_end_filter(self) -> None:
        """Show all rows again."""
        self._filter.value = ""
        self._filter.display = False
        self._table.focus()


class Filter(Input):
    """The field for the text of the rows to show."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.end_filter", "All rows")]


class Tree(DataTable[Text]):
    """The rows. A look changes only those that differ. The chosen row and the scroll position stay.

    ``name`` is that of a job, for processes on its other hosts.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "page('stack')", "Stack"),
        Binding("l", "page('logs', '--follow')", "Logs"),
        Binding("k", "kill", "Kill"),
        Binding("slash", "app.filter", "Filter", key_display="/"),
        Binding("escape", "app.end_filter", "All rows", show=False),
        Binding("q", "app.quit", "Quit"),
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    def __init__(self, name: str) -> None:
        super().__init__(cursor_type="row", fixed_columns=1)
        self._of = name
        self._rows: list[Row] = []
        self._widths = COLUMNS

    def show(self, rows: list[Row]) -> None:
        """Show these rows instead of the last ones."""
        before, self._rows = self._rows, rows
        needed = widths(rows, COLUMNS)
        if [row.key for row in before] != [row.key for row in rows] or any(
            needed[name] > width for name, width in self._widths.items()
        ):
            self._widths = needed
            self._replace(before)
            return
        for row, old in zip(rows, before, strict=True):
            if row.cells != old.cells:
                self.update_cell(row.key, "facts", self._facts(row))

    def _replace(self, before: list[Row]) -> None:
        at, top, left = self.cursor_row, self.scroll_offset.y, self.scroll_offset.x
        key = before[at].key if before else ""
        now = next((number for number, row in enumerate(self._rows) if row.key == key), at)
        self.clear(columns=True)
        name, *others = COLUMNS
        self.add_column(Text(name), key="name")
        self.add_column(Text(line(tuple(others), self._widths)), key="facts")
        for row in self._rows:
            self.add_row(Text(row.cells[0]), self._facts(row), key=row.key)
        self.set_reactive(DataTable.cursor_coordinate, Coordinate(max(0, min(now, len(self._rows) - 1)), 0))
        self._scroll(left, top + now - at)
        self.call_after_refresh(self._scroll, left, top + now - at)  # when textual knows the new height

    def _scroll(self, x: int, y: int) -> None:
        self.scroll_to(x, y, animate=False, force=True, immediate=True)

    def _facts(self, row: Row) -> Text:
        """Return all cells but the first as one, which textual draws faster, and reads no markup in."""
        text = Text(line(row.cells[1:], self._widths))
        _, _, state, *_ = row.cells
        is_bad = state in ("failed", "lost") or (state.startswith("ended ") and state != "ended with 0")
        start = self._widths["PID"] + 2
        text.stylize("red" if is_bad else "dim" if state == "idle" else "", start, start + len(state))
        return text

    def action_page(self, command: str, *options: str) -> None:
        """Show what another command prints for the chosen process."""
        if member := self._chosen():
            words = [command, *_arguments(member, self._of, command), *options]
            self.app.push_screen(Page(f"{command} of {_name(member)}", words))

    def action_kill(self) -> None:
        """Kill the chosen process after a question."""
        if member := self._chosen():
            words = ["kill", *_arguments(member, self._of, "kill"), "--signal"]

            def kill(name: str | None) -> None:
                if name:
                    self.app.push_screen(Page(f"kill {_name(member)}", [*words, name]))

            self.app.push_screen(Question(f"Kill {_name(member)}?"), kill)

    def _chosen(self) -> Member | None:
        member = self._rows[self.cursor_row].member if self._rows else None
        if member is None:
            self.app.bell()
        return member


def _is_whole(member: Member) -> bool:
    """Return whether this is the own process of a program of this machine. It stands for all of its processes."""
    program, process = member
    return process.pid == program.pid and not program.host


def _name(member: Member) -> str:
    program, process = member
    if _is_whole(member):
        return f"program {program.command} (pid {program.pid}) with all its processes"
    return f"{process.label} (pid {process.pid}){f' on {program.host}' * bool(program.host)}"


def _arguments(member: Member, job: str, command: str) -> list[str]:
    """Return the arguments of a command that choose a process. Output is kept by label, over restarts."""
    program, process = member
    if program.host:
        return [job, f"--rank={process.label}"]
    if _is_whole(member):
        return [str(program.pid)]
    return [str(program.pid), f"--rank={process.label if command == 'logs' else process.pid}"]


class Question(ModalScreen[str]):
    """A question whose answer is a signal's name, or "" for no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss('TERM')", "Yes, with SIGTERM"),
        Binding("9", "dismiss('KILL')", "Yes, with SIGKILL"),
        Binding("escape,n,q", "dismiss('')", "No"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Return the question, and the keys below."""
        yield Static(Text(printable(self._text)))
        yield Footer()


class Page(Screen[None]):
    """The output of a command, as it is written. The command is ended with the page."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Back")]

    def __init__(self, title: str, words: list[str]) -> None:
        super().__init__()
        self._heading, self._words = printable(title), words

    def compose(self) -> ComposeResult:
        """Return the title, and the output below."""
        yield Static(Text(f"{self._heading}: no output yet", "reverse"))
        yield Log(max_lines=MAX_LINES)
        yield Footer()

    def on_mount(self) -> None:
        """Start the command."""
        self._run_command()

    @work
    async def _run_command(self) -> None:
        log = self.query_one(Log)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "monarch_backend.cli", *self._words,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        rest = ""
        try:
            while chunk := await process.stdout.read(1 << 16):
                self.query_one(Static).update(Text(self._heading, "reverse"))
                *lines, rest = (rest + decoder.decode(chunk)).split("\n")
                log.write_lines([_line(each) for each in lines], scroll_end="--follow" in self._words)
            await process.wait()
            log.write_lines([_line(rest)] if rest or not log.line_count else [])
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _line(text: str) -> str:
    return printable(_ESCAPE_SEQUENCE.sub("", text)[:MAX_LINE].rstrip("\r").expandtabs())
