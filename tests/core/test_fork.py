"""The registry of fork handlers: one order, all handlers run, objects are not kept alive."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_backend._core import fork
from monarch_backend._core.fork import Step

PACKAGE = Path(fork.__file__).parents[1]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Empty the registry of handlers. Return the list in which handlers record that they have run in this process."""
    for name in ("_before", "_after_in_parent", "_after_in_child"):
        monkeypatch.setattr(fork, name, fork._Phase())
    return []


def _note(seen: list[str], step: Step) -> None:
    """Register handlers that record that they have run."""
    fork.register(
        step,
        before=lambda: seen.append(f"before {step.name}"),
        after_in_parent=lambda: seen.append(f"parent {step.name}"),
        after_in_child=lambda: seen.append(f"child {step.name}"),
    )


def _child(text: Callable[[], str]) -> str:
    """Fork. Return what ``text`` returns in the child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, text().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


def test_steps_run_in_their_order_for_any_order_of_registration(seen: list[str]) -> None:
    for step in (Step.VERBS_ENGINES, Step.SHARED_MEMORY, Step.LOG_COLLECTORS):
        _note(seen, step)
    in_child = _child(lambda: " ".join(seen))
    order = ["LOG_COLLECTORS", "VERBS_ENGINES", "SHARED_MEMORY"]
    before = [f"before {name}" for name in reversed(order)]
    assert seen == [*before, *(f"parent {name}" for name in order)]
    assert in_child == " ".join([*before, *(f"child {name}" for name in order)])


def test_handlers_of_one_step_run_in_order_of_registration(seen: list[str]) -> None:
    for text in ("first", "second"):
        fork.register(Step.RUNTIME, after_in_child=lambda text=text: seen.append(text))  # type: ignore[misc]
    assert _child(lambda: " ".join(seen)) == "first second"


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_failed_handler_is_reported_and_others_run(
    seen: list[str], capfd: pytest.CaptureFixture[str], error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("on purpose")

    fork.register(Step.LOG_COLLECTORS, before=fail, after_in_parent=fail, after_in_child=fail)
    _note(seen, Step.LOG_COLLECTORS)
    _note(seen, Step.RUNTIME)
    assert _child(lambda: seen[-1]) == "child RUNTIME"
    assert seen == [
        "before RUNTIME",
        "before LOG_COLLECTORS",
        "parent LOG_COLLECTORS",
        "parent RUNTIME",
    ]
    reported = capfd.readouterr().err
    lines = re.findall(r"^monarch_backend: a fork handler failed \(pid (\d+), step LOG_COLLECTORS\)$", reported, re.M)
    assert len(lines) == 3
    assert len(set(lines)) == 2
    assert reported.count(f"{error.__name__}: on purpose") == 3


class _Owner:
    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name
        fork.register(Step.SPAWNERS, before=self.note, after_in_child=self.note)

    def note(self) -> None:
        self.seen.append(self.name)


def test_registry_does_not_keep_objects(seen: list[str]) -> None:
    kept, dropped = _Owner(seen, "kept"), _Owner(seen, "dropped")
    reference = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert reference() is None
    assert _child(lambda: " ".join(seen)) == "kept kept"
    assert [len(phase._handlers[Step.SPAWNERS]) for phase in (fork._before, fork._after_in_child)] == [1, 1]
    assert kept.seen == ["kept"]


def test_handler_that_ends_an_object_does_not_disturb_the_others(seen: list[str]) -> None:
    owners = [_Owner(seen, "a"), _Owner(seen, "b"), _Owner(seen, "c")]
    fork.register(Step.LOG_COLLECTORS, after_in_child=lambda: owners.pop(1))
    assert _child(lambda: " ".join(seen[3:])) == "a c"


def test_package_has_one_register_at_fork() -> None:
    calls = [
        str(file.relative_to(PACKAGE))
        for file in sorted(PACKAGE.rglob("*.py"))
        for _ in re.findall(r"\bregister_at_fork\(", file.read_text())
    ]
    assert calls == ["_core/fork.py"]


def test_each_step_is_used() -> None:
    used = {
        name
        for file in PACKAGE.rglob("*.py")
        if file.name != "fork.py"
        for name in re.findall(r"fork\.Step\.([A-Z_]+)", file.read_text())
    }
    assert used == set(Step.__members__)
