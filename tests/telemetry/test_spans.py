"""Spans and metrics: what the recording has of them, also without room, after a fork, and while nothing is recorded."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend import _native, actor, telemetry
from monarch_backend._core import platform
from monarch_backend._telemetry import recorder, spans, texts
from monarch_backend._telemetry.kinds import Kind, State, Status
from monarch_backend._telemetry.metrics import InstrumentKind, instruments, kind_of, number_of
from monarch_backend._telemetry.reader import Area, RecordedEvent, RecordedProcess
from monarch_backend._telemetry.recording_area import RecordingArea

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


@pytest.fixture
def area() -> Iterator[RecordingArea]:
    made = RecordingArea()
    yield made
    made.close()


def _run(area: RecordingArea, code: str) -> RecordedProcess:
    """Run code in a process that records, and return what it has recorded."""
    start = (
        f"from monarch_backend import _native\n_native.use_recording({area.descriptor}, {area.reserve('child')}, 'c')\n"
        "from monarch_backend._telemetry.metrics import get_meter\n"
        "from monarch_backend._telemetry.spans import span, traced\n"
    )
    subprocess.run([sys.executable, "-c", start + code], check=True, pass_fds=[area.descriptor], timeout=60)
    with Area(os.dup(area.descriptor)) as reader:
        [process] = reader.processes(events=True)
    return process


def _spans(process: RecordedProcess) -> list[RecordedEvent]:
    return [event for event in process.events if event.kind == Kind.SPAN]


def _double(bits: int) -> float:
    return float(struct.unpack("=d", struct.pack("=Q", bits))[0])


def test_span_records_name_attributes_parent_and_status(area: RecordingArea) -> None:
    process = _run(
        area,
        "with span('outer', shard=3, path='a'):\n"
        "    with span('inner'): pass\n"
        "try:\n"
        "    with span('fails', what=print): raise KeyError\n"
        "except KeyError: pass\n",
    )
    inner, outer, fails = _spans(process)
    assert [each.name for each in (inner, outer, fails)] == ["inner", "outer", "fails"]
    assert json.loads(outer.detail) == {"shard": 3, "path": "a"}
    assert json.loads(fails.detail) == {"what": "<built-in function print>"}
    assert (inner.trace, outer.trace) == (outer.reference, 0)
    assert [each.status for each in (inner, outer, fails)] == [Status.OK, Status.OK, Status.ERROR]
    assert outer.end_ns - outer.duration_ns <= inner.end_ns - inner.duration_ns <= inner.end_ns <= outer.end_ns


def test_open_span_is_an_activity_until_its_end(area: RecordingArea) -> None:
    process = _run(area, "import os\nwith span('done'): pass\nspan('open', n=1).__enter__()\nos._exit(0)")
    done, left = process.activities
    assert (left.kind, left.state, left.name, left.detail) == (Kind.SPAN, State.RUNNING, "open", '{"n":1}')
    assert (done.name, done.state, done.count) == ("done", State.IDLE, 1)
    assert left.value == _spans(process)[0].value  # the same thread


def test_spans_of_concurrent_tasks_have_the_right_parents(area: RecordingArea) -> None:
    process = _run(
        area,
        "import asyncio\n"
        "@traced(name='task')\n"
        "async def task(n):\n"
        "    with span('part', n=n):\n"
        "        await asyncio.sleep(0)\n"
        "async def main():\n"
        "    tasks = [asyncio.create_task(task(n)) for n in range(3)]\n"
        "    await asyncio.gather(*tasks)\n"
        "    late = asyncio.create_task(task(9)); await asyncio.sleep(0); late.cancel()\n"
        "    await asyncio.gather(late, return_exceptions=True)\n"
        "asyncio.run(main())\n",
    )
    tasks = [each.reference for each in _spans(process) if each.name == "task"]
    parts = [each for each in _spans(process) if each.name == "part"]
    assert sorted(each.trace for each in parts) == sorted(tasks) and len(set(tasks)) == 4
    assert [(json.loads(each.detail)["n"], each.status) for each in parts] == [
        (0, Status.OK), (1, Status.OK), (2, Status.OK), (9, Status.CANCELLED),
    ]  # fmt: skip


def test_more_open_spans_than_cells_are_all_recorded(area: RecordingArea) -> None:
    count = spans.MAX_CELLS + 10
    process = _run(
        area,
        "import contextlib\nfor _ in range(2):\n    with contextlib.ExitStack() as stack:\n"
        f"        for n in range({count}): stack.enter_context(span(f'span {{n}}'))\n"
        "with span('another'): pass\n",
    )
    names = [each.name for each in _spans(process)]
    assert names == [f"span {n}" for n in reversed(range(count))] * 2 + ["another"]
    assert len([each for each in process.activities if each.kind == Kind.SPAN]) == spans.MAX_CELLS


def test_names_and_attributes_beyond_their_room_are_the_last_ones(area: RecordingArea) -> None:
    process = _run(
        area,
        "for n in range(5000):\n    with span(f'{n:040}', value=n): pass\n"
        "with span('x' * 5000 + '\\ud800', **{'y': 'z' * 5000, 'n': [1]}): pass\n"
        "with span('later', n=1, y='z' * 200): pass\n"
        "get_meter().create_gauge('m' * 1000).set(1, {'y': 'z' * 5000})\n"
        "assert _native.intern_name('actor') != 0\n"
        "import os; span('open', value='last').__enter__(); os._exit(0)\n",
    )
    *numbered, long, later = _spans(process)
    texts_in_ring = _native.recording_layout["text_count"]
    kept = [number for number, each in enumerate(numbered) if each.detail]
    for number in kept:
        assert numbered[number].detail == f'{{"value":{number}}}'
    last = texts_in_ring // 2 - 10  # each span has two texts, its name and its attributes
    assert kept[:100] == list(range(100)) and kept[-last:] == list(range(5000 - last, 5000)) and len(kept) < 4000
    named = [number for number, each in enumerate(numbered) if each.name]
    assert all(numbered[number].name == f"{number:040}" for number in named)
    assert len([number for number in named if number < 1000]) == texts.MAX_NAME_BYTES // 42 + 1 and named[-1] == 4999
    assert (long.name, long.detail) == ("x" * texts.MAX_RING_TEXT, '{"...":true}')
    assert (later.name, later.detail) == ("later", '{"n":1,"...":true}')
    [metric] = [each for each in process.events if each.kind == Kind.METRIC]
    assert (metric.name, metric.detail) == ("m" * texts.MAX_RING_TEXT, '{"...":true}')
    assert not [each for each in process.activities if each.name == "open"]  # its name is not kept, so it has no cell


def test_counters_whose_attributes_have_no_room_have_right_sums(area: RecordingArea) -> None:
    process = _run(
        area,
        "counter = get_meter().create_counter('c')\n"
        "for _ in range(2):\n    for n in range(2000): counter.add(1, {'number': n})\n",
    )
    totals = [_double(each.trace) for each in process.events if each.kind == Kind.METRIC]
    assert totals == [1] * 2000 + [2] * 2000


def test_metrics_record_values_sums_and_attributes(area: RecordingArea) -> None:
    process = _run(
        area,
        "meter = get_meter('m')\n"
        "steps, queue = meter.create_counter('steps'), meter.create_up_down_counter('queue', unit='1')\n"
        "steps.add(2); steps.add(3, {'k': 'v'}); steps.add(0.5, {'k': 'v'}); queue.add(-1)\n"
        "meter.create_histogram('time').record(0.25, {'k': [1]}); meter.create_gauge('loss').set(7)\n"
        "try: steps.add(-1)\n"
        "except ValueError: pass\n"
        "else: raise AssertionError\n",
    )
    seen = [
        (e.name, InstrumentKind(kind_of(e.reference)).name, _double(e.value), _double(e.trace), e.detail)
        for e in process.events
        if e.kind == Kind.METRIC
    ]
    assert seen == [
        ("steps", "COUNTER", 2, 2, ""),
        ("steps", "COUNTER", 3, 3, '{"k":"v"}'),
        ("steps", "COUNTER", 0.5, 3.5, '{"k":"v"}'),
        ("queue", "UP_DOWN_COUNTER", -1, -1, ""),
        ("time", "HISTOGRAM", 0.25, 0, '{"k":[1]}'),
        ("loss", "GAUGE", 7, 0, ""),
    ]
    known = instruments(process.names)
    units = {e.name: known[number_of(e.reference)] for e in process.events if e.kind == Kind.METRIC}
    assert units == {"steps": ("m", ""), "queue": ("m", "1"), "time": ("m", ""), "loss": ("m", "")}


def test_forked_process_records_its_instruments_anew() -> None:
    code = (
        "import os\n"
        "from monarch_backend.actor import this_proc\n"
        "from monarch_backend.telemetry import get_meter, query\n"
        "counter = get_meter('m').create_counter('steps', unit='1')\n"
        "def ask():\n"
        "    this_proc()\n"
        "    counter.add(1)\n"
        "    print(query('select scope_name, unit from metric_sums', os.getpid()).rows, flush=True)\n"
        "ask()\n"
        "if os.fork() == 0:\n"
        "    ask()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[('m', '1')]\n" * 2, done.stderr


def test_attributes_that_are_equal_but_of_other_types_differ(area: RecordingArea) -> None:
    process = _run(area, "for each in (1, True, 1.0, 1):\n    with span('s', a=each): pass\n")
    assert [each.detail for each in _spans(process)] == ['{"a":1}', '{"a":true}', '{"a":1.0}', '{"a":1}']


def test_spans_and_metrics_of_a_fork_stay_out_of_the_parents_recording(area: RecordingArea) -> None:
    process = _run(
        area,
        "import os\n"
        "counter = get_meter().create_counter('steps')\n"
        "counter.add(1)\n"
        "with span('parent'): pass\n"
        "with span('around'):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        with span('parent'): counter.add(1)\n"
        "if child == 0: os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n",
    )
    assert [each.name for each in _spans(process)] == ["parent", "around"]
    assert sum(each.kind == Kind.METRIC for each in process.events) == 1
    assert [each.state for each in process.activities] == [State.IDLE, State.IDLE]


def test_nothing_breaks_while_nothing_is_recorded(tmp_path: Path) -> None:
    code = (
        "from monarch_backend.telemetry import get_meter, span, traced\n"
        "with span('s', a=object()): get_meter().create_counter('c').add(1, {'a': object()})\n"
        "assert traced(lambda: 3)() == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "MONARCH_TELEMETRY": "0"})


def test_traced_keeps_the_function_and_refuses_others() -> None:
    @telemetry.traced
    def plain(n: int, *, scale: int = 2) -> int:
        """Scale."""
        return n * scale

    @telemetry.traced(name="other", kind="x")
    async def later() -> int:
        return 1

    assert plain(3, scale=4) == 12 and plain.__doc__ == "Scale."
    assert str(inspect.signature(plain)) == "(n: 'int', *, scale: 'int' = 2) -> 'int'"
    assert inspect.iscoroutinefunction(later)
    with pytest.raises(TypeError, match="generator function"):
        telemetry.traced(lambda: (yield))
    with pytest.raises(TypeError, match="needs a function, not 3"):
        telemetry.traced(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="below @endpoint"):
        telemetry.traced(actor.endpoint(lambda self: None))


TRACED_ENDPOINTS = """
from monarch_backend.actor import Actor, endpoint, this_proc, traced

class Traced(Actor):
    @endpoint
    @traced
    def below(self, value):
        return value

class Concurrent(Actor):
    @endpoint
    @traced(name="below")
    async def below(self, value):
        return value

for kind in (Traced, Concurrent):
    assert this_proc().spawn("traced", kind).below.call_one(3).get() == 3
"""


def test_traced_endpoints_answer_as_before() -> None:
    subprocess.run([sys.executable, "-c", TRACED_ENDPOINTS], check=True, timeout=60)


def test_meters_and_instruments_can_be_sent() -> None:
    meter = telemetry.get_meter("sent")
    for each in (
        meter, meter.create_counter("a"), meter.create_up_down_counter("b"), meter.create_histogram("c", unit="s"),
        meter.create_gauge("d"),
    ):  # fmt: skip
        assert pickle.loads(pickle.dumps(each)) is each


def test_monarchs_names_are_in_the_actor_module() -> None:
    assert actor.span is telemetry.span and actor.traced is telemetry.traced
    assert actor.get_meter is telemetry.get_meter


def test_recording_layout_has_room_for_texts_and_other_names() -> None:
    bounded = texts.MAX_NAME_BYTES + texts.MAX_ATTRIBUTE_BYTES + recorder.MAX_GROUP_BYTES
    assert _native.recording_layout["names_bytes"] * 3 // 4 > bounded


def test_room_for_ranks_of_groups_is_bounded(area: RecordingArea) -> None:
    process = _run(
        area,
        "from monarch_backend._telemetry import recorder\n"
        "for n in range(1000): recorder.process_group(f'group {n}', [0, 1, 2, 8])\n"
        "recorder.process_group('large', range(0, 1000, 2))\n"
        "recorder.process_group('group 0', [0, 1, 2, 8])\n"
        "with span('later'): pass\n",
    )
    recorded = [name for name in process.names if recorder.GROUP_RANKS in name]
    assert recorded[0] == "group 0 has the ranks 0-2,8" and len(set(recorded)) == len(recorded)
    assert 200 < len(recorded) < 1000 and sum(len(name) + 2 for name in recorded) <= recorder.MAX_GROUP_BYTES
    assert [each.name for each in _spans(process)] == ["later"]


EARLY = """
from monarch_backend.actor import this_host
from monarch_backend.telemetry import get_meter, query, span, step

counter = get_meter("x").create_counter("tokens")
counter.add(100)
with span("before"):
    step()
    step()
procs = this_host().spawn_procs({"gpus": 1})
procs.stop().get()
counter.add(1)
with span("after"):
    pass
print(query("select max(total) from metric_sums").rows, query("select name from spans order by timestamp_us").rows,
      query("select count(*) from steps").rows)
"""


def test_what_precedes_the_first_processes_is_recorded() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[(101.0,)] [('before',), ('after',)] [(2,)]"


def test_rank_of_torchrun_is_recorded_before_its_group() -> None:
    code = """
from monarch_backend.telemetry import query, span
with span("load"):
    pass
print(query("select label from processes").rows, query("select process, name from spans").rows)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RANK": "3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[('rank 3',)] [('rank 3', 'load')]"


def test_rank_without_a_variable_is_recorded_as_a_rank(tmp_path: Path) -> None:
    code = """
import sys
import torch.distributed as dist
from monarch_backend.telemetry import query, span
with span("load"):
    pass
dist.init_process_group("monarch", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
print(query("select label from processes").rows)
"""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[('rank 0',)]"


def test_forked_worker_does_not_begin_a_recording_of_its_own() -> None:
    code = """
import os
from monarch_backend._telemetry import recorder
from monarch_backend.telemetry import span
with span("load"):
    pass
pid = os.fork()
if pid == 0:
    with span("in a worker"):
        pass
    os._exit(recorder.is_recording())
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n"
