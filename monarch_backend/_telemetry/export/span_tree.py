"""Spans and handled messages of running programs as traces: each with its parent, also over processes.

Processes record no trace identities. A message is found in its sender by the sender's identity and the number of the
call, and there the span or message around it. Identities are hashes of what is at the root, so they are the same at
each look and for each reader.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from monarch_backend._telemetry import trace_context
from monarch_backend._telemetry.kinds import Kind, Status
from monarch_backend._telemetry.program_recording import (
    CONSTRUCTOR,
    ProcessRecording,
    Recording,
    attributes_of,
    is_alive,
)
from monarch_backend._telemetry.reader import Activity, RecordedEvent
from monarch_backend._telemetry.trace_context import REMOTE_PARENT

MAX_KNOWN = 100_000
"""Spans that are remembered as parents after their events have been overwritten."""


@dataclass(eq=False)
class Node:
    """A span or a handled message. ``number`` is that of its event, None while it is open or if it was lost.

    ``own`` is its hash, ``above`` that of a span above it that is not in the recording.
    ``trace`` has 128 bits, ``identity`` and ``parent`` 64, 0 for no parent. ``end`` is None while it is open.
    ``is_link`` is true for one that stands for a span of another program: its identity is that one's. ``waits`` is true
    while something above it cannot be seen yet, so that its trace may change.
    """

    process: ProcessRecording
    kind: Kind
    name: str
    actor: str | None
    start: int
    end: int | None
    status: str
    attributes: dict[str, Any]
    number: int | None
    thread: int | None
    reference: int
    other: int
    own: int = 0
    above: int = 0
    identity: int = 0
    trace: int = 0
    parent: int = 0
    is_link: bool = False
    waits: bool = False


class SpanTree:
    """Reader of traces. It remembers identities from look to look."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict()  # trace and identity by hash
        self._links: dict[tuple[int, int, int], tuple[int, int]] = {}  # of the present recording

    def nodes(self, recording: Recording) -> list[Node]:
        """Return all spans and handled messages of the recording, with their identities."""
        nodes = [node for process in recording.processes for node in _nodes(process)]
        by_thread: dict[tuple[int, int], list[Node]] = defaultdict(list)
        for node in sorted(nodes, key=lambda each: each.start):
            node.own = node.identity = _identity(node)
            if node.thread is not None:
                by_thread[id(node.process), node.thread].append(node)
        around = _Around(by_thread)
        spans = {(id(node.process), node.reference): node for node in nodes if node.kind == Kind.SPAN}
        senders = recording.senders()
        parents = {id(node): _parent(node, spans, senders, around) for node in nodes}
        self._links = _links(recording)
        for node in nodes:
            self._place(node, parents)
        return nodes

    def _place(self, node: Node, parents: dict[int, Node | None]) -> None:
        """Give a node its trace and parent, and all that are above it."""
        path: list[Node] = []
        each: Node | None = node
        while each is not None and not each.trace and each not in path:
            path.append(each)
            each = parents[id(each)]
        for below in reversed(path):
            above = parents[id(below)]
            if above is not None and above.trace:
                below.trace, below.parent, below.waits = above.trace, above.identity, above.waits
            else:
                self._place_root(below)
            self._known[below.own] = below.trace, below.identity
            self._known.move_to_end(below.own)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _place_root(self, node: Node) -> None:
        """Give a node without a recorded parent its trace. All ranks that handle one call are in the same."""
        of_message = id(node.process), node.other, node.reference
        foreign = self._links.get(of_message) if node.kind == Kind.MESSAGE else _foreign(node)
        if foreign is not None:
            node.trace, node.parent = foreign
            node.is_link = node.name == REMOTE_PARENT
            if node.is_link:
                node.identity, node.parent = node.parent, 0
            return
        if node.above in self._known:  # its event has been overwritten
            node.trace, node.parent = self._known[node.above]
            node.waits = False
            return
        node.parent = node.above
        known = self._known.get(node.own)
        if known is not None:
            node.trace = known[0]
        elif node.kind == Kind.MESSAGE and node.reference and not node.above:
            node.trace = _hash128("call", node.other, node.reference)
        else:
            node.trace = _hash128(node.above or node.own)


class _Around:
    """Search for the innermost span or message of a thread at a time: of those around it, the one that has begun last.

    Each node has the one that was around its start. What is around a later time is it, or further up from there.
    """

    def __init__(self, by_thread: dict[tuple[int, int], list[Node]]) -> None:
        self._threads: dict[tuple[int, int], tuple[list[int], list[Node]]] = {}
        self._up: dict[int, Node | None] = {}
        for thread, nodes in by_thread.items():
            opened: list[Node] = []
            for node in nodes:
                while opened and _has_ended(opened[-1], node.start):
                    opened.pop()
                self._up[id(node)] = opened[-1] if opened else None
                opened.append(node)
            self._threads[thread] = [node.start for node in nodes], nodes

    def __call__(self, process: ProcessRecording, thread: int | None, at: int, below: Node | None) -> Node | None:
        """Return the node around a time, other than ``below``."""
        if thread is None or (id(process), thread) not in self._threads:
            return None
        starts, nodes = self._threads[id(process), thread]
        last = bisect.bisect_right(starts, at) - 1
        node = nodes[last] if last >= 0 else None
        while node is not None and (node is below or _has_ended(node, at)):
            node = self._up[id(node)]
        return node


def _has_ended(node: Node, at: int) -> bool:
    return node.end is not None and node.end < at


def _parent(
    node: Node,
    spans: dict[tuple[int, int], Node],
    senders: dict[tuple[int, int], tuple[ProcessRecording, RecordedEvent]],
    around: _Around,
) -> Node | None:
    if node.kind == Kind.MESSAGE:
        sent = senders.get((node.other, node.reference)) if node.reference else None
        if sent is None:
            return None
        process, event = sent
        if event.trace:
            return _span_above(node, process, event.trace, spans)
        return around(process, event.thread, min(event.end_ns, node.start), node)
    if _foreign(node) is not None:
        return None
    if node.other:
        return _span_above(node, node.process, node.other, spans)
    return around(node.process, node.thread, node.start, node) if node.actor is not None else None


def _span_above(node: Node, process: ProcessRecording, number: int, spans: dict[tuple[int, int], Node]) -> Node | None:
    """Return the span of this number. If it is overwritten, or open without a cell, note what it is."""
    found = spans.get((id(process), number))
    if found is None:
        node.above, node.waits = span_identity(*process.recorded.key, number), is_alive(process)
    return found


def _links(recording: Recording) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return the trace and the span in which traced messages were sent, also by senders that are not recorded.

    The key is the process, the sender, and the number of the call.
    """
    found = {}
    for process in recording.processes:
        for event in process.events(Kind.LINK):
            parent = trace_context.parse(event.detail)
            if parent is not None and event.reference:
                found[id(process), event.trace, event.reference] = parent
    return found


def _foreign(node: Node) -> tuple[int, int] | None:
    """Return the trace and the span of another program that is above this span."""
    if node.kind != Kind.SPAN or (node.other and node.name != REMOTE_PARENT):
        return None
    return trace_context.parse(node.attributes.get(trace_context.HEADER))


def _nodes(process: ProcessRecording) -> Iterator[Node]:
    """Yield the nodes of a process. What was open when the process ended is lost."""
    end = None if is_alive(process) else process.recorded.last_ns
    for kind in (Kind.MESSAGE, Kind.SPAN):
        for event in process.events(kind):
            if event.detail != CONSTRUCTOR or kind == Kind.SPAN:
                status = Status(event.status).title
                start = event.end_ns - event.duration_ns
                yield _node(process, kind, event, start, event.end_ns, status, event.number, event.thread)
        for each in process.going_on(kind):
            if each.detail != CONSTRUCTOR or kind == Kind.SPAN:
                thread = each.value - 1 if kind == Kind.SPAN else process.thread_of(each.name)
                status = "open" if end is None else "lost"
                stop = None if end is None else max(end, each.since_ns)
                yield _node(process, kind, each, each.since_ns, stop, status, None, thread)


def _node(
    process: ProcessRecording, kind: Kind, what: RecordedEvent | Activity, start: int, end: int | None, status: str,
    number: int | None, thread: int | None,
) -> Node:  # fmt: skip
    if kind == Kind.SPAN:
        actor = None if thread is None else process.actor_on(thread)
        name, attributes = what.name or "(name not recorded)", attributes_of(what.detail)
    else:
        actor = what.name
        name, attributes = f"{what.name}.{what.detail}", {"bytes": what.value}
    return Node(process, kind, name, actor, start, end, status, attributes, number, thread, what.reference, what.trace)


def span_identity(pid: int, started_ns: int, number: int) -> int:
    """Return the identity of a span by its number in a process, which has a pid and has started at a time."""
    return _hash(pid, started_ns, Kind.SPAN, number)


def _identity(node: Node) -> int:
    pid, started = node.process.recorded.key
    if node.kind == Kind.SPAN:
        return span_identity(pid, started, node.reference)
    start = node.start + node.process.recorded.ahead_ns
    return message_identity(pid, started, node.name, start, node.other, node.reference)


def message_identity(pid: int, started_ns: int, name: str, start_ns: int, sender: int, call: int) -> int:
    """Return the identity of a message. ``name``: of its actor and endpoint. ``start_ns``: on its host's clock."""
    return _hash(pid, started_ns, Kind.MESSAGE, name, start_ns, sender, call)


def _hash(*parts: Any) -> int:
    return _number(8, parts)


def _hash128(*parts: Any) -> int:
    return _number(16, parts)


def _number(size: int, parts: tuple[Any, ...]) -> int:
    text = "\0".join(map(str, parts)).encode(errors="replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "big") or 1
