"""SIGINT handlers without processes: which handler is installed, and that no interrupt is lost or doubled.

The tests use only the handler, with a program that has a clock and timers. test_program_lifecycle.py tests Ctrl-C in
whole programs. test_backpressure.py tests Ctrl-C during a wait for memory.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from monarch_backend._actor.runtime import Runtime
from monarch_backend._actor.sigint import Interrupts
from monarch_backend.dtensor._controller import command_stream


class _ProgressLoop:
    """Timers that run when the test calls `fire`."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def now(self) -> float:
        return 0.0

    def later(self, _seconds: float, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def wake(self) -> None:
        pass

    def fire(self) -> None:
        """Run the due timers on another thread, as the standby thread does while the main thread runs user code."""
        calls, self.calls = self.calls, []
        for call in calls:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()


class _Program:
    disowned = False

    def __init__(self) -> None:
        self.progress = self.clock = _ProgressLoop()
        self.interrupts = Interrupts(cast(Runtime, self))

    def note(self, file: str = Interrupts.guard.__code__.co_filename) -> None:
        """Interrupt code that must not be left half done."""
        exec(compile("strike()", file, "exec"), {"strike": _interrupt})
        assert self.interrupts.noted


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _handler() -> Any:
    return signal.getsignal(signal.SIGINT)


def test_handler_of_another_program_is_replaced() -> None:
    """The handler of a simulated program, for example, would never raise here."""
    other, mine = _Program(), _Program()
    other.interrupts.guard()
    mine.interrupts.guard()
    mine.note()
    assert not other.interrupts.noted


def test_interrupt_of_the_replaced_handler_is_not_lost() -> None:
    other, mine = _Program(), _Program()
    other.interrupts.guard()
    other.note()
    mine.interrupts.guard()
    assert mine.interrupts.noted
    with pytest.raises(KeyboardInterrupt):
        mine.progress.fire()
    other.progress.fire()  # the interrupt is not raised twice
    assert not other.interrupts.noted
    assert not mine.interrupts.noted


def test_interrupt_does_not_split_a_controllers_message() -> None:
    program = _Program()
    program.interrupts.guard()
    program.note(command_stream.__file__)
    with pytest.raises(KeyboardInterrupt):
        program.progress.fire()


def test_user_handler_is_kept() -> None:
    numbers: list[int] = []

    def note(number: int, _frame: Any) -> None:
        numbers.append(number)

    signal.signal(signal.SIGINT, note)
    program = _Program()
    program.interrupts.guard()
    assert _handler() is note
    assert not numbers


def test_interrupt_is_passed_to_a_later_handler() -> None:
    """A notebook installs Python's handler. It receives each interrupt once, and later ones, too."""
    program = _Program()
    program.interrupts.guard()
    program.note()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        program.progress.fire()
    assert not program.interrupts.noted, "it would come a second time"
    program.interrupts.guard()
    program.note()
    with pytest.raises(KeyboardInterrupt):
        program.progress.fire()


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.SIG_DFL], ids=str)
def test_interrupt_without_a_receiver_is_raised_by_the_next_wait(disposition: Any) -> None:
    """The interrupt does not end the process. The next wait of the main thread raises it."""
    program = _Program()
    program.interrupts.guard()
    program.note()
    signal.signal(signal.SIGINT, disposition)
    program.progress.fire()
    assert program.interrupts.noted
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        program.interrupts.raise_here()
    program.interrupts.guard()
    program.note()
