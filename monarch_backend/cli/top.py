"""`monarch-backend top`: running programs with rates, on the whole screen, and keys for what `ps` finds."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from monarch_backend.cli.arguments import add_program, fail, nothing_there

if TYPE_CHECKING:
    from monarch_backend._telemetry.programs import Process, Program
    from monarch_backend._telemetry.rates import ProcessKey, Rates
    from monarch_backend._telemetry.subject import Subject

HEADING = f"{'PID':>8} {'CPU%':>6} {'MEMORY':>9} {'MSG/S':>8} {'BYTES/S':>10} {'QUEUE':>6}  PROCESS"
KEYS = "q: quit   up, down: choose   s: stack   l: last lines   k: kill"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_program(parser, or_job=True)
    parser.add_argument("--once", action="store_true", help="print one table of rates instead of a screen")
    parser.add_argument("--json", action="store_true", help="with --once: print one JSON array")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=_seconds, default=1.0, help="time between two looks; 1 by default"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.01 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.01 to 3600")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Show rates. Return 0, or 1 with the reason if there is no such program, or no terminal for the screen."""
    from monarch_backend._job.errors import JobError
    from monarch_backend.cli.subject import look_at

    try:
        with look_at(args.program) as there:
            _, _, unread = there.look()
            for each in unread:
                fail("top", f"not read: {each}")
            if args.once or args.json:
                time.sleep(args.interval)
                rows = rows_of(*there.look()[:2])
                print(json.dumps([_as_json(row) for row in rows], indent=1) if args.json else _table(rows))
                return 0
            return _show_screen(there, args)
    except (LookupError, NotImplementedError, JobError) as error:
        return fail("top", error)


def _show_screen(there: Subject, args: argparse.Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return fail("top", "the screen needs a terminal; --once prints one table")
    try:
        import curses
    except ImportError:
        return fail("top", "this Python has no curses, which the screen needs; --once prints one table")
    try:
        return int(curses.wrapper(lambda window: _Screen(window, there, args.program, args.interval).run()))
    except curses.error as error:
        return fail("top", f"the terminal has no screen ({error}); --once prints one table")
    except KeyboardInterrupt:
        return 0


@dataclass(frozen=True)
class Row:
    """A process with its program and its rates."""

    program: Program
    process: Process
    rates: Rates | None

    @property
    def is_program(self) -> bool:
        """Whether this is the program's own process."""
        return self.process.pid == self.program.pid and not self.program.host

    def arguments(self, job: str) -> list[str]:
        """Return the arguments that choose this process, for the other commands. On another host it is one of a job."""
        if self.program.host:
            return [job, "--rank", self.process.label]
        return [str(self.program.pid), *([] if self.is_program else ["--rank", self.process.label])]

    @property
    def name(self) -> str:
        """Text that names the process in a question."""
        if self.is_program:
            return f"program {self.program.command} with all its processes"
        return f"{self.process.label} (pid {self.process.pid}){f' on {self.program.host}' * bool(self.program.host)}"


def rows_of(programs: list[Program], rates: dict[ProcessKey, Rates]) -> list[Row]:
    """Return a row for each process that runs, and for each that has ended."""
    return [Row(each, process, rates.get((each.host, process.pid))) for each in programs for process in each.processes]


def _as_json(row: Row) -> dict[str, Any]:
    from monarch_backend._telemetry.programs import activities_as_json

    process = row.process
    return {
        "program": row.program.pid, "host": row.program.host, "pid": process.pid, "label": process.label,
        "state": process.state, "memory": process.memory, "activities": activities_as_json(process.activities),
        "rates": row.rates and asdict(row.rates),
    }  # fmt: skip


def _table(rows: list[Row]) -> str:
    return "\n".join([HEADING, *map(as_text, rows)]) if rows else nothing_there()


def as_text(row: Row) -> str:
    """Return the line of a process."""
    process, rates = row.process, row.rates
    memory = "" if process.memory is None else f"{process.memory / 2**20:.0f} MiB"
    numbers = f"{'':>6} {memory:>9} {'':>8} {'':>10}"
    if rates is not None:
        numbers = (
            f"{rates.cpu * 100:>6.1f} {memory:>9} {rates.messages_per_second:>8.0f} {short(rates.bytes_per_second):>10}"
        )
    queue = sum(int(each["queue"]) for each in process.activities)
    name = row.program.command if row.is_program else f"  {process.label}"
    name += f" on {row.program.host}" if row.program.host else ""
    return f"{process.pid:>8} {numbers} {queue:>6}  {name}: {_doing(process)}"


def _doing(process: Process) -> str:
    from monarch_backend.cli.ps import duration

    if process.exit_code is not None:
        return f"ended with {process.exit_code}"
    busy = [each for each in process.activities if each["state"] != "idle"]
    if not busy:
        return "idle" if process.activities else "running"
    longest = max(busy, key=lambda each: float(each["seconds"]))
    more = f" and {len(busy) - 1} more" if len(busy) > 1 else ""
    what = f"{longest['name']}.{longest['detail']}" if longest["detail"] else longest["name"]
    state = "waits for" if longest["kind"] == "wait" else longest["state"]
    return f"{state} {what} for {duration(float(longest['seconds']))}{more}"


def short(number: float) -> str:
    """Return a number of bytes for people.

    >>> [short(each) for each in (0, 999, 1500, 25e6, 3e9)]
    ['0', '999', '1.5 K', '25.0 M', '3.0 G']
    """
    for unit in ("", " K", " M", " G"):
        if number < 1000:
            return f"{number:.1f}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.1f} T"


class _Screen:
    """The screen: a table that follows the programs, and a page with the output of another command."""

    def __init__(self, window: Any, there: Subject, name: str | None, interval: float) -> None:
        self._window, self._there, self._name, self._interval = window, there, name or "", interval
        self._rows: list[Row] = []
        self._chosen = 0
        self._first = 0  # row at the top
        self._problem = ""

    def run(self) -> int:
        """Show the table until q is pressed. Return the exit code."""
        import curses

        with contextlib.suppress(curses.error):  # of a terminal that can't hide it
            curses.curs_set(0)
        due = 0.0
        while True:
            now = time.monotonic()
            if now >= due:
                self._look()
                due = now + self._interval
            self._draw()
            self._window.timeout(max(1, int((due - time.monotonic()) * 1000)))
            key = self._window.getch()
            if key == ord("q"):
                return 0
            if key in (curses.KEY_UP, curses.KEY_DOWN):
                self._chosen += 1 if key == curses.KEY_DOWN else -1
            elif key == ord("s"):
                self._show("stack")
            elif key == ord("l"):
                self._show("logs")
            elif key == ord("k"):
                self._kill()

    def _look(self) -> None:
        try:
            programs, rates, unread = self._there.look()
            self._rows, self._problem = rows_of(programs, rates), "; ".join(f"not read: {each}" for each in unread)
        except LookupError as error:  # the program has ended
            self._rows, self._problem = [], str(error)

    def _draw(self) -> None:
        import curses

        height, _ = self._window.getmaxyx()
        self._chosen = max(0, min(self._chosen, len(self._rows) - 1))
        room = max(1, height - 3)
        self._first = max(min(self._first, self._chosen), self._chosen - room + 1)
        self._window.erase()
        self._line(0, HEADING, curses.A_REVERSE)
        for number, row in enumerate(self._rows[self._first : self._first + room]):
            self._line(1 + number, as_text(row), curses.A_BOLD if self._first + number == self._chosen else 0)
        if not self._rows:
            self._line(1, self._problem or nothing_there(), 0)
        self._line(height - 1, f"{KEYS}   {self._problem}", curses.A_REVERSE)
        self._window.refresh()

    def _line(self, at: int, text: str, attribute: int) -> None:
        import curses

        height, width = self._window.getmaxyx()
        if 0 <= at < height:
            with contextlib.suppress(curses.error):  # the window was made smaller meanwhile
                self._window.addnstr(at, 0, text.replace("\0", ""), max(0, width - 1), attribute)

    def _show(self, command: str, *options: str) -> None:
        """Show the last lines that another command prints for the chosen process, until a key is pressed."""
        if not self._rows:
            return
        words = [
            sys.executable,
            "-m",
            "monarch_backend.cli",
            command,
            *self._rows[self._chosen].arguments(self._name),
            *options,
        ]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        self._page((done.stdout + done.stderr).splitlines() or [f"{command} has printed nothing"], "any key: back")

    def _kill(self) -> None:
        if self._rows:
            question = f"kill {self._rows[self._chosen].name}?"
            key = self._page([question], "y: yes, with SIGTERM   9: yes, with SIGKILL   any other key: no")
            if key in (ord("y"), ord("9")):
                self._show("kill", "--signal", "TERM" if key == ord("y") else "KILL")

    def _page(self, lines: list[str], foot: str) -> int:
        """Show lines on the whole screen. Return the key that was pressed."""
        import curses

        height, _ = self._window.getmaxyx()
        self._window.clear()
        for number, line in enumerate(lines[-max(1, height - 2) :]):
            self._line(number, line.expandtabs(), 0)
        self._line(height - 1, foot, curses.A_REVERSE)
        self._window.refresh()
        self._window.timeout(-1)
        key = int(self._window.getch())
        while key == curses.KEY_RESIZE:
            key = int(self._window.getch())
        self._window.clear()
        return key
