"""Rate limit of the package's log: equal lines above a number per window are dropped, and different lines never are."""

from __future__ import annotations

import importlib
import logging
import pkgutil

import pytest

import monarch_backend
from monarch_backend._core.log_limit import EQUAL_LINES, WINDOW_S, RepeatLimit


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def log(clock: _Clock) -> tuple[logging.Logger, list[str]]:
    logger, kept = logging.Logger("limited"), _Kept()
    logger.addFilter(RepeatLimit(clock))
    logger.addHandler(kept)
    return logger, kept.lines


def test_equal_lines_beyond_limit_are_dropped(log: tuple[logging.Logger, list[str]], clock: _Clock) -> None:
    logger, lines = log
    for _ in range(3):
        for _ in range(1000):
            logger.warning("disk %s is full", "a")
        clock.now += WINDOW_S
    assert len(lines) == 3 * EQUAL_LINES
    assert lines[0] == "disk a is full"
    assert lines[EQUAL_LINES - 1] == f"disk a is full (equal lines are dropped for the next {WINDOW_S:g} s)"
    assert lines[EQUAL_LINES] == f"disk a is full ({1000 - EQUAL_LINES} equal lines were dropped before this one)"


def test_different_lines_are_never_dropped(log: tuple[logging.Logger, list[str]]) -> None:
    logger, lines = log
    for i in range(5000):
        logger.warning("rank %d died", i)
    assert lines == [f"rank {i} died" for i in range(5000)]


def test_slow_repetition_is_never_dropped(log: tuple[logging.Logger, list[str]], clock: _Clock) -> None:
    logger, lines = log
    for _ in range(20):
        logger.warning("still waiting")
        clock.now += WINDOW_S
    assert lines == ["still waiting"] * 20


def test_line_with_wrong_arguments_reaches_handler(log: tuple[logging.Logger, list[str]]) -> None:
    logger, _ = log
    record = logger.makeRecord("limited", logging.WARNING, "x.py", 1, "%d ranks", ("two",), None)
    assert logger.filters[0].filter(record)  # type: ignore[union-attr]


def test_every_module_logs_through_the_limited_logger() -> None:
    """Filters of a logger do not apply to records of its children, so no module may have its own logger."""
    for package in (
        "_core",
        "_actor",
        "_mesh",
        "_processes",
        "_logs",
        "_transport.local",
        "_transport.network",
        "_hosts",
        "_launch",
        "dtensor._worker",
    ):
        found = importlib.import_module(f"{monarch_backend.__name__}.{package}")
        for module in pkgutil.walk_packages(found.__path__, f"{found.__name__}."):
            if not module.name.endswith("__"):
                importlib.import_module(module.name)
    names = [name for name in logging.root.manager.loggerDict if name.startswith("monarch_backend")]
    assert names == ["monarch_backend"]
    assert any(isinstance(each, RepeatLimit) for each in logging.getLogger("monarch_backend").filters)
