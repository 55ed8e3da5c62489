"""Locks for which threads wait: their owners in stacks, and in the line of a long wait."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry import discovery, folded_stacks, lock_owners, process_stacks, whereabouts
from monarch_backend._telemetry.stacks import Stacks
from tests.support.running_script import running_script
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not platform.HAS_MEMFD or "t" in sys.abiflags, reason="requests need memory files and the stack signal"
)

SCRIPT = """
import threading
from monarch_backend._telemetry import recorder

recorder.area()
taken = threading.Event()


class Slots:
    __slots__ = ("lock",)

    def __init__(self):
        self.lock = threading.Lock()


{code}
"""

INVERSION = """
a, b = threading.{kind}(), threading.{kind}()
met = threading.Barrier(2)


def other():
    with b:  # takes b
        met.wait()
        with a:
            pass


threading.Thread(target=other, name="loader", daemon=True).start()
print("ready", flush=True)
with a:  # takes a
    met.wait()
    with b:
        pass
"""

ONE_LOCK = """
class Holder:
    lock = None


holder = Holder()
holder.lock = {lock}


def hold():
    {hold}


thread = threading.Thread(target=hold, name="loader", daemon=True)
thread.start()
taken.wait()
print("ready", flush=True)
{wait}
"""

RELEASED = "with holder.lock:\n        taken.set()\n        threading.Condition(holder.lock).wait()"
TWICE = "with holder.lock:  # takes it\n    with holder.lock:\n        pass"
ACQUIRED = "holder.lock.acquire()\n    taken.set()\n    threading.Event().wait()"
IN_BLOCK = "with holder.lock:  # takes it\n        taken.set()\n        threading.Event().wait()"
LEFT = "with holder.lock:\n        pass\n    holder.lock.acquire()\n    taken.set()\n    threading.Event().wait()"

LAMBDA = """begun = threading.Event()
    with holder.lock:
        work = lambda: [begun.set(), threading.Event().wait()]
    threading.Thread(target=work, name="worker", daemon=True).start()
    begun.wait()
    holder.lock.acquire()
    taken.set()
    threading.Event().wait()"""


@contextlib.contextmanager
def _waiting(path: Path, code: str, count: int = 1) -> Iterator[tuple[str, Stacks]]:
    """Run a program until ``count`` threads wait for locks. Yield the file, and the stacks."""
    with running_script(path, SCRIPT.format(code=code)) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"

        def waiting() -> Stacks | None:
            found = process_stacks.read(process.pid, with_py_spy=False)
            return found if sum(bool(each.lock) for each in found.threads) == count else None

        yield path.read_text(), wait_until(waiting)


def _line(source: str, mark: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if line.endswith(mark))


@pytest.mark.parametrize("kind", ["Lock", "RLock", "Condition"])
def test_threads_that_take_two_locks_in_both_orders_name_each_other(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "inversion.py"
    with _waiting(path, INVERSION.format(kind=kind), 2) as (source, found):
        [other] = [each for each in found.threads if each.name == "loader"]
        main = found.threads[-1]
        assert main.lock == f"the lock b, which loader has taken at {path}:{_line(source, '# takes b')}"
        assert other.lock == f"the lock a, which the main thread has taken at {path}:{_line(source, '# takes a')}"
        text = folded_stacks._block(found, False)
        assert f"      waits for {main.lock}\n    loader:\n" in text and text.endswith(f"      waits for {other.lock}")


@pytest.mark.parametrize(
    ("lock", "hold", "wait", "owner"),
    [
        ("threading.RLock()", ACQUIRED, "with holder.lock:\n    pass", ", which loader has"),
        ("threading.RLock()", IN_BLOCK, "holder.lock.acquire()", ", which loader has taken at {path}:{line}"),
        (
            "threading.Lock()",
            IN_BLOCK,
            "got = holder.lock.acquire(True)",
            ", which loader has taken at {path}:{line}",
        ),
        ("threading.Lock()", ACQUIRED, "with holder.lock:\n    pass", ""),
        ("threading.Lock()", RELEASED, TWICE, ", which this thread has taken at {path}:{line}"),
        ("threading.Lock()", LEFT, "with holder.lock:\n    pass", ""),
        ("threading.Lock()", LAMBDA, "with holder.lock:\n    pass", ""),
    ],
)
def test_owner_of_a_lock_is_named_where_it_is_known(
    lock: str, hold: str, wait: str, owner: str, tmp_path: Path
) -> None:
    path = tmp_path / "one_lock.py"
    with _waiting(path, ONE_LOCK.format(lock=lock, hold=hold, wait=wait)) as (source, found):
        line = _line(source, "# takes it") if "{line}" in owner else 0
        assert found.threads[-1].lock == "the lock holder.lock" + owner.format(path=path, line=line)


def test_thread_that_takes_a_lock_twice_is_its_own_owner(tmp_path: Path) -> None:
    path = tmp_path / "twice.py"
    code = 'one = Slots()\nprint("ready", flush=True)\nwith one.lock:  # takes it\n    with one.lock:\n        pass\n'
    with _waiting(path, code) as (source, found):
        text = f"the lock one.lock, which this thread has taken at {path}:{_line(source, '# takes it')}"
        assert found.threads[-1].lock == text
        recorded = (each for area in discovery.areas() for each in area.processes())
        process = next(each for each in recorded if each.pid == found.pid)
        assert whereabouts.place_of(process, 10).endswith(f"in <module> (with one.lock:), and waits for {text}")


SOURCE = """
def f(self, c):
    with self.a, open(c) as file, self.b:
        def g():
            return c
        try:
            c()
        except OSError:
            c()
        match c:
            case 1:
                c()
    with self.a: c()
    return [c for c in self.d()
            if c.acquire()]
"""


def test_blocks_around_a_line_are_those_of_its_function(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    blocks = {line: [text for text, _ in lock_owners._enclosing(str(path), line)] for line in range(1, 17)}
    inside = ["self.a", "self.b"]
    assert {line: found for line, found in blocks.items() if found} == dict.fromkeys((6, 7, 8, 9, 10, 11, 12), inside)
    assert lock_owners._taken_at(str(path), 3) == inside
    assert lock_owners._taken_at(str(path), 15) == ["c"]
    assert lock_owners._taken_at(str(path), 13) == [], "it may wait in c()"
    assert lock_owners._taken_at(str(path), 7) == [] and lock_owners._taken_at(str(path / "absent"), 3) == []
