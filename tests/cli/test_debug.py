"""`monarch-backend debug` for a job: Ctrl-C while a command runs on another host."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend import cli
from monarch_backend._job.inspection import Inspection
from monarch_backend._processes.debugging.client import WaitingProcess
from monarch_backend.cli import debug

RUN = ["debug", "run", "next", "--program", "a-job"]


class Hosts(Inspection):
    """Hosts of a job that never answer a command."""

    def __init__(self, *, interrupts: str) -> None:
        self.interrupts = interrupts
        self.sent: list[str] = []

    def __exit__(self, *_: object) -> None:
        pass

    def waiting(self) -> tuple[list[tuple[str, WaitingProcess]], list[Any]]:
        if self.interrupts == "list":
            signal.raise_signal(signal.SIGINT)
        return [("far", WaitingProcess("1", 1, "rank 0"))], []

    def _asked(self, host: str) -> Any:
        return SimpleNamespace(debug=SimpleNamespace(call_one=self._send))

    def _send(self, processes: list[WaitingProcess], command: str, until_resumed: bool) -> Any:
        self.sent.append(command)
        return SimpleNamespace(get=self._wait)

    def _wait(self) -> None:
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait()  # without end


@pytest.mark.parametrize(
    ("interrupts", "text"),
    [("command", "interrupted; the processes go on with the command\n"), ("list", "interrupted\n")],
)
def test_ctrl_c_during_a_command_to_another_host_ends_the_program(
    interrupts: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = Hosts(interrupts=interrupts)
    monkeypatch.setattr(debug, "_looking_at", lambda program: hosts)
    assert cli.main(RUN) == 1
    assert capsys.readouterr().err.endswith(text)
    assert hosts.sent == (["next"] if interrupts == "command" else [])
