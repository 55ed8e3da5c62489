"""W3C trace context: spans of other programs as parents of spans and messages, and ours as a header."""

from __future__ import annotations

import contextvars
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from monarch_backend import telemetry
from monarch_backend._core import platform
from monarch_backend._telemetry import program_recording, trace_context
from monarch_backend._telemetry.export.span_tree import Node, SpanTree
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.reader import RecordedEvent
from tests.support.waiting import wait_until
from tests.telemetry.recordings import recording_of

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = "00-0000000000000000000000000000002a-0000000000000007-01"


@pytest.mark.parametrize("header", [HEADER, f" {HEADER} ", HEADER[:-2] + "00", "cc" + HEADER[2:] + "-what-is-new"])
def test_header_is_parsed(header: str) -> None:
    assert trace_context.parse(header) == (TRACE, SPAN)
    assert trace_context.parse(trace_context.as_header(TRACE, SPAN)) == (TRACE, SPAN)


@pytest.mark.parametrize(
    "header",
    [None, "", 3, b"00", HEADER.upper(), "ff" + HEADER[2:], HEADER[:-1], HEADER + "0", HEADER.replace("-", "_"),
     f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01"],
)  # fmt: skip
def test_wrong_header_has_no_effect(header: Any) -> None:
    assert trace_context.parse(header) is None
    with telemetry.remote_parent(header):
        pass


PROGRAM = f"""
import asyncio, sys
from monarch_backend.actor import Actor, concurrent_endpoint, endpoint, span, this_host
from monarch_backend.telemetry import remote_parent, traceparent


class Front(Actor):
    @endpoint
    def ask(self, back):
        with span("ask"):
            return back.answer.call_one().get(), traceparent()


class Back(Actor):
    @endpoint
    def answer(self):
        return traceparent()


async def request(number, front, back):
    with remote_parent(f"00-{{number:032x}}-{{number:016x}}-01"):
        with span("request", number=number):
            await asyncio.sleep(0)
            return await front.ask.call_one(back)


async def many(front, back):
    return await asyncio.gather(*(request(number, front, back) for number in range(1, 41)))


def main():
    assert traceparent() is None
    procs = this_host().spawn_procs({{"gpus": 2}})
    assert traceparent() is None
    front, back = procs.spawn("front", Front).slice(gpus=0), procs.spawn("back", Back).slice(gpus=1)
    with remote_parent("{HEADER}"):
        assert traceparent() == "{HEADER}"
        with span("request"):
            print(traceparent())
        print(traceparent(), *front.ask.call_one(back).get())
    with span("ours"):
        print(traceparent(), *front.ask.call_one(back).get())
    asyncio.run(many(front, back))
    print("ready", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
"""


def _complete_nodes(pid: int) -> list[Node] | None:
    """Return the nodes of the program once all of its 42 calls have ended."""
    nodes = SpanTree().nodes(program_recording.read(str(pid)))
    names = [node.name for node in nodes if not node.is_link]
    return nodes if all(names.count(name) == 42 for name in ("ask", "back.answer", "front.ask")) else None


def _chain(node: Node, by_identity: dict[int, Node]) -> list[str]:
    names = [node.name]
    while node.parent in by_identity:
        node = by_identity[node.parent]
        names.append(node.name)
    return names


def test_trace_of_another_program_goes_through_actors(tmp_path: Any) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            request, foreign, ours, ready = (child.stdout.readline().split() for _ in range(4))
            assert ready == ["ready"]
            nodes = wait_until(lambda: _complete_nodes(child.pid))  # an endpoint ends after its reply
        finally:
            child.kill()
    by_identity = {node.identity: node for node in nodes if not node.is_link}

    def named(*headers: str) -> list[Node]:
        return [by_identity[trace_context.parse(header)[1]] for header in headers]  # type: ignore[index]

    assert [(node.name, node.trace, node.parent) for node in named(*request)] == [("request", TRACE, SPAN)]
    assert {trace_context.parse(header)[0] for header in foreign} == {TRACE}  # type: ignore[index]
    assert [node.name for node in named(*foreign[1:])] == ["back.answer", "ask"]
    assert _chain(named(foreign[1])[0], by_identity) == ["back.answer", "ask", "front.ask"]
    [outermost] = [node for node in nodes if node.name == "front.ask" and node.trace == TRACE]
    assert outermost.parent == SPAN

    assert [node.name for node in named(*ours)] == ["ours", "back.answer", "ask"]
    assert len({node.trace for node in named(*ours)}) == 1 and named(ours[0])[0].trace != TRACE
    assert _chain(named(ours[1])[0], by_identity) == ["back.answer", "ask", "front.ask", "ours"]

    for number in range(1, 41):  # requests that are under way at the same time are not mixed up
        names = sorted(node.name for node in nodes if node.trace == number and not node.is_link)
        assert names == ["ask", "back.answer", "front.ask", "request"]
        [request] = [node for node in nodes if node.trace == number and node.name == "request"]
        assert request.parent == number and request.attributes["number"] == number


PROPAGATED = f"""
import asyncio, sys
from monarch_backend.actor import Actor, concurrent_endpoint, endpoint, span, this_host
from monarch_backend.job import ProcessJob
from monarch_backend.telemetry import remote_parent, traceparent


class Plain(Actor):
    def __init__(self):
        self.told = None

    @endpoint
    def context(self, spans=0):
        for _ in range(spans):
            with span("many"):
                pass
        return traceparent()

    @endpoint
    def asks(self, other):
        return other.context.call_one().get()

    @endpoint
    def yields(self):
        yield traceparent()

    @endpoint
    def tell(self):
        self.told = traceparent()

    @endpoint
    def get_told(self):
        return self.told

    @endpoint
    def continues_another(self):
        with remote_parent("{OTHER}"):
            return traceparent()


class Concurrent(Actor):
    @concurrent_endpoint
    async def context(self):
        await asyncio.sleep(0)
        return traceparent()

    @endpoint
    async def asks(self, other):
        return await other.context.call_one()


def show(first, second, concurrent):
    with remote_parent("{HEADER}"), span("request"):
        results = {{
            "call_one": first.context.call_one().get(),
            "after more events than a ring has": first.context.call_one(9000).get(),
            "call": [*first.context.call().get().values()][0],
            "nested": first.asks.call_one(second).get(),
            "concurrent": concurrent.context.call_one().get(),
            "from concurrent": concurrent.asks.call_one(second).get(),
            "stream": next(iter(first.yields.stream())).get(),
        }}
        first.tell.broadcast()
        inner = first.continues_another.call_one().get()
    results["broadcast"] = first.get_told.call_one().get()
    assert inner == "{OTHER}", inner
    for what, header in results.items():
        assert header and header[3:35] == "{HEADER[3:35]}", (what, header)
    for outside in first.context.call_one().get(), concurrent.context.call_one().get():
        assert "{HEADER[3:35]}" not in (outside or ""), outside
"""

ON_ONE_MACHINE = """
if __name__ == "__main__":
    procs = this_host().spawn_procs({"gpus": 2})
    plain = procs.spawn("plain", Plain)
    show(plain.slice(gpus=0), plain.slice(gpus=1), procs.slice(gpus=1).spawn("concurrent", Concurrent))
"""

ON_HOSTS = """
if __name__ == "__main__":
    job = ProcessJob({"workers": 2}, path=sys.argv[1])
    job.apply()
    try:
        procs = job.state().workers.spawn_procs({"gpus": 1})
        plain = procs.spawn("plain", Plain)
        show(plain.slice(hosts=0), plain.slice(hosts=1), procs.slice(hosts=1).spawn("concurrent", Concurrent))
    finally:
        job.kill()
"""


@pytest.mark.parametrize("hosts", [ON_ONE_MACHINE, ON_HOSTS], ids=["one machine", "hosts"])
def test_trace_of_another_program_crosses_each_kind_of_message(hosts: str, tmp_path: Any) -> None:
    path = tmp_path / "propagated.py"
    path.write_text(PROPAGATED + hosts)
    done = subprocess.run(
        [sys.executable, str(path), str(tmp_path / "job.json")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_traced_message_of_an_unrecorded_sender_has_its_parent() -> None:
    made = recording_of({"": [1]}, [])
    sender, call = 77, 5
    message = RecordedEvent(2, 2000, 500, Kind.MESSAGE, 0, 1, "model", "answer", call, 10, sender)
    link = RecordedEvent(1, 1400, 0, Kind.LINK, 0, 1, "", HEADER, call, 0, sender)
    other = RecordedEvent(3, 3000, 500, Kind.MESSAGE, 0, 1, "model", "answer", call + 1, 10, sender)
    made.processes[0].recorded.events = [link, message, other]
    made.processes[0] = replace(made.processes[0])  # it keeps its events by kind
    first, second = SpanTree().nodes(made)
    assert (first.trace, first.parent) == (TRACE, SPAN)
    assert second.trace != TRACE and second.parent == 0


def test_header_in_a_message_that_is_not_valid_has_no_effect() -> None:
    def run() -> None:
        trace_context.enter_message(HEADER, 5, 77)
        assert telemetry.traceparent() == HEADER
        trace_context.enter_message("not a header", 6, 77)
        assert trace_context.remote.get() == ("", 0)

    contextvars.copy_context().run(run)


OPENTELEMETRY = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from monarch_backend.actor import span, this_host
from monarch_backend.telemetry import traceparent

procs = this_host().spawn_procs({"gpus": 1})
with span("alone"):
    print(traceparent()[3:35])
with TracerProvider().get_tracer("web").start_as_current_span("request") as request:
    with span("outer"), span("inner"):
        context = request.get_span_context()
        print(f"{context.trace_id:032x}", traceparent()[3:35])
"""


def test_current_span_of_opentelemetry_is_the_parent() -> None:
    pytest.importorskip("opentelemetry.sdk")
    done = subprocess.run([sys.executable, "-c", OPENTELEMETRY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    alone, [theirs, ours] = (line.split() for line in done.stdout.splitlines())
    assert theirs == ours and alone != [theirs]


UNRECORDED = f"""
import sys
from monarch_backend.telemetry import remote_parent, span, traceparent
with remote_parent("{HEADER}"), span("x"):
    assert traceparent() == "{HEADER}"
    with remote_parent(None):
        assert traceparent() == "{HEADER}"
assert traceparent() is None
sys.modules["opentelemetry.trace"] = None
with span("y"):
    pass
"""


def test_header_is_passed_on_where_nothing_is_recorded() -> None:
    subprocess.run([sys.executable, "-c", UNRECORDED],
                   check=True, env={"MONARCH_TELEMETRY": "0", "PATH": ""}, timeout=60)  # fmt: skip


BROKEN = """
import sys, types
from monarch_backend.actor import span, this_host
procs = this_host().spawn_procs({"gpus": 1})
for broken in (None, types.ModuleType("opentelemetry.trace")):
    sys.modules["opentelemetry.trace"] = broken
    with span("x"):
        pass
"""


def test_package_that_only_looks_like_opentelemetry_is_harmless() -> None:
    subprocess.run([sys.executable, "-c", BROKEN], check=True, timeout=60)


@pytest.mark.parametrize("flags", ["00", "01"])
def test_decision_to_sample_is_kept(flags: str) -> None:
    header = f"00-{42:032x}-{7:016x}-{flags}"
    with telemetry.remote_parent(header):
        assert telemetry.traceparent() == header
        with telemetry.span("inside"):
            inside = telemetry.traceparent()
            assert inside is not None and inside.startswith(f"00-{42:032x}-") and inside.endswith(f"-{flags}")


def test_first_version_has_no_further_parts() -> None:
    assert trace_context.parse(f"00-{42:032x}-{7:016x}-01-more") is None
    assert trace_context.parse(f"01-{42:032x}-{7:016x}-01-more") == (42, 7)
