"""Locks for which threads of a process wait, and the threads that have taken them.

The source code tells which lock a line takes, and in which ``with`` blocks a line is. The process tells which of these
are the same lock (lock_answers.py). An RLock knows its owner; for a Lock, only a ``with`` block shows it.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from monarch_backend._telemetry.stacks import Frame, Stacks, Task, Thread

MAX_ASKED = 200
"""Expressions in one request."""

MAX_SOURCE_BYTES = 1 << 20
"""Size of a file that is parsed."""

UNNAMED_FUNCTIONS = ("<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
"""Functions in expressions. They may run later than the lines around them, and in another thread."""


class Expression(NamedTuple):
    """An expression such as "self.lock" in a frame. ``taken_at`` is the line of its ``with``, 0 for a wait."""

    thread: Thread
    frame: Frame
    text: str
    taken_at: int


class Lock(NamedTuple):
    """What the process tells of a lock."""

    identity: int
    kind: str
    is_locked: bool
    owner: int


def expressions(threads: Sequence[Thread]) -> list[Expression]:
    """Return the locks that threads may wait for, and those that they may have. Empty if none waits for a lock."""
    own = [each for each in threads if not isinstance(each, Task) and not each.is_runtime]
    waits = [found for each in own for found in _waits(each)]
    if not waits:
        return []
    return [*waits, *(found for each in own for found in _has(each))][:MAX_ASKED]


def with_locks(found: Stacks, asked: Sequence[Expression], locks: Sequence[Lock | None], names: dict[int, str]) -> None:
    """Add to the threads what they wait for: "the lock self.b, which MainThread has taken at train.py:16"."""
    main = found.threads[-1].ident
    names = {**names, main: "the main thread"}
    text_of: dict[int, str] = {}
    told = [(each, lock) for each, lock in zip(asked, locks, strict=True) if lock is not None]
    for expression, lock in told:
        thread = expression.thread
        if expression.taken_at or not lock.is_locked or (lock.kind == "RLock" and lock.owner == thread.ident):
            continue
        holders = [
            each
            for each, other in told
            if each.taken_at and other.identity == lock.identity and lock.owner in (0, each.thread.ident)
        ]
        text = f"the lock {expression.text}"
        if holders or lock.owner:
            owner = holders[0].thread.ident if holders else lock.owner
            unknown = "a thread that Python has not started, that has ended, or that its parent had at the fork"
            owner_name = "this thread" if owner == thread.ident else names.get(owner, unknown)
            text += f", which {owner_name} has"
        if holders:
            text += f" taken at {holders[0].frame.file}:{holders[0].taken_at}"
        text_of[thread.ident] = text
    for number, each in enumerate(found.threads):
        if text_of and not isinstance(each, Task) and each.ident != main:  # texts have the names
            found.threads[number] = each = replace(each, name=each.name or names.get(each.ident, ""))
        if not isinstance(each, Task) and each.ident in text_of:
            found.threads[number] = replace(each, lock=text_of[each.ident])


def _waits(thread: Thread) -> Iterator[Expression]:
    frames = [each for each in thread.frames if (each.file, each.function) != (threading.__file__, "__enter__")]
    leaf = frames[-1] if frames else None  # a Condition takes its lock in a call
    if leaf is None or not leaf.is_user:
        return
    line = linecache.getline(leaf.file, leaf.line)
    if "with" not in line and ".acquire" not in line:
        return
    texts = _taken_at(leaf.file, leaf.line)
    if len(texts) == 1:  # of several in one line it is unknown which one is awaited
        yield Expression(thread, leaf, texts[0], 0)


def _has(thread: Thread) -> Iterator[Expression]:
    if _has_released(thread):
        return
    for frame in reversed(thread.frames):
        if frame.is_user and not frame.function.endswith(UNNAMED_FUNCTIONS):
            for text, line in _enclosing(frame.file, frame.line):
                yield Expression(thread, frame, text, line)


def _has_released(thread: Thread) -> bool:
    """Return whether the program has called Condition.wait, which has released a lock. Event.wait calls it, too."""
    calls, frames = list[str](), list(thread.frames)
    while frames and frames[-1].file == threading.__file__:
        calls.insert(0, frames.pop().function)
    return calls in (["wait"], ["wait_for", "wait"]) and bool(frames) and frames[-1].is_user


@functools.lru_cache(maxsize=16)
def _tree(file: str, _changed_ns: int) -> ast.Module | None:
    try:
        with open(file, "rb") as source:
            text = source.read(MAX_SOURCE_BYTES + 1)
        return None if len(text) > MAX_SOURCE_BYTES else ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _nodes(file: str, line: int) -> list[ast.stmt]:
    """Return the statements around a line, the outermost first, from the innermost function on."""
    try:
        tree = _tree(file, os.stat(file).st_mtime_ns)
    except OSError:
        return []
    found: list[ast.stmt] = []
    nodes: list[ast.AST] = [] if tree is None else [tree]
    while nodes:
        node = nodes.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                if child.lineno <= line <= (child.end_lineno or child.lineno):
                    is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                    found = [] if is_scope else [*found, child]
                    nodes.append(child)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                nodes.append(child)
    return found


def _taken_at(file: str, line: int) -> list[str]:
    """Return the expressions of the locks that a line takes: by ``with``, or by a call of ``acquire``."""
    around = _nodes(file, line)
    begun = [node for node in around if node.lineno == line] or around[-1:]
    if len(begun) != 1:  # in a line such as `with lock: work()` the thread may have the lock already
        return []
    taken: list[ast.expr] = []
    for node in around:
        if isinstance(node, ast.With) and line <= max(item.context_expr.end_lineno or 0 for item in node.items):
            taken += [item.context_expr for item in node.items]
    for each in ast.walk(begun[0]):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "acquire":
            taken += [each.func.value] * (each.lineno <= line <= (each.end_lineno or line))
    return [text for each in taken if (text := _dotted(each))]


def _enclosing(file: str, line: int) -> Iterator[tuple[str, int]]:
    """Yield the expressions of the ``with`` blocks in which a line is, and their lines."""
    for node in _nodes(file, line):
        if isinstance(node, ast.With) and line >= node.body[0].lineno > node.lineno:
            for item in node.items:
                if text := _dotted(item.context_expr):
                    yield text, item.context_expr.lineno


def _dotted(node: ast.expr) -> str:
    """Return "self.lock" for names and attributes, "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""
