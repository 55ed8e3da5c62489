"""W3C trace context: spans of other programs as parents of spans and messages, and ours as a header."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from monarch_backend import telemetry
from monarch_backend._core import platform
from monarch_backend._telemetry import program_recording, trace_context
from monarch_backend._telemetry.export.span_tree import Node, SpanTree
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


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
