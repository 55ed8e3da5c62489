"""Stacks of several processes as text: equal ones are folded to one block."""

from __future__ import annotations

import linecache
import os
from collections import Counter

from monarch_backend._core.package_folder import PACKAGE_FOLDER
from monarch_backend._telemetry.labels import fold_labels, pids_in_words
from monarch_backend._telemetry.programs import Process
from monarch_backend._telemetry.stacks import Frame, Stacks, Task, Thread


def fold(read: list[tuple[Process, Stacks]], *, all_threads: bool = False) -> dict[str, list[Process]]:
    """Return processes by the text of their stacks. The innermost call is the last."""
    blocks: dict[str, list[Process]] = {}
    for process, stacks in read:
        blocks.setdefault(_block(stacks, all_threads), []).append(process)
    return blocks


def heading(processes: list[Process]) -> str:
    """Return the labels of processes in short, with the pids of the first ones."""
    return f"{fold_labels([each.label for each in processes])} ({pids_in_words([each.pid for each in processes])}):"


def _block(stacks: Stacks, all_threads: bool) -> str:
    if stacks.problem:
        return f"    no stack: {stacks.problem}"
    main = stacks.threads[-1] if stacks.threads else None
    shown = [
        each
        for each in reversed(stacks.threads)
        if all_threads or not (each.is_runtime or (each.is_of_multiprocessing and each is not main))
    ]
    unread = [f"    {stacks.unread_tasks}"] if stacks.unread_tasks else []
    if not shown:
        return unread[0] if unread else "    runs no code of the program: it waits for messages"
    texts = []
    for number, thread in enumerate(shown):
        if isinstance(thread, Task):
            continue
        name = thread.name or ("main thread" if thread is stacks.threads[-1] else "another thread")
        title = [f"    {name}:"] if len(shown) > 1 or number else []
        texts.append("\n".join([*title, *_calls(thread, all_threads)]))
    tasks = Counter((each.name, "\n".join(_awaits(each, all_threads))) for each in shown if isinstance(each, Task))
    for (name, calls), count in tasks.items():
        texts.append(f"    {name}{f', {count} times' if count > 1 else ''}:\n{calls}")
    return "\n".join([*texts, *unread])


def _awaits(task: Task, whole: bool) -> list[str]:
    calls = _calls(task, whole) if whole or any(each.is_user for each in task.frames) else []
    return [*calls, f"      waits for {task.awaits}"] if task.awaits else calls


def _calls(thread: Thread, whole: bool) -> list[str]:
    lines: list[str] = []
    hidden = False
    frames = list(thread.frames)
    if not whole:
        while frames and not frames[0].is_user:  # how the runtime or threading has started it
            frames.pop(0)
    for frame in frames:
        if not whole and frame.is_runtime:
            if not hidden:
                lines.append(f"      {_shortened(frame.file)}:{frame.line} in {frame.function} ...")
            hidden = True
            continue
        hidden = False
        lines.append(f"      {frame}")
        if source := source_of(frame):
            lines.append(f"        {source}")
    lines = lines or [f"      {frame}" for frame in thread.frames]
    return [*lines, f"      waits for {thread.lock}"] if thread.lock else lines


def _shortened(file: str) -> str:
    return "monarch_backend/" + file[len(PACKAGE_FOLDER) :] if file.startswith(PACKAGE_FOLDER) else file


def source_of(frame: Frame) -> str:
    """Return the line of source code of a call, "" if it cannot be read."""
    return linecache.getline(frame.file, frame.line).strip() if os.path.isabs(frame.file) else ""
