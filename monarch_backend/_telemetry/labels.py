"""Labels of processes, such as "gpus 3 of trainers": whether a name stands for one, and several in short."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def is_named(label: str, name: str, pid: int | None = None) -> bool:
    """Return whether ``name`` stands for the process with this label: all of it, or without the name of its mesh.

    With ``pid``, also that of the process stands for it.

    >>> [is_named("gpus 3 of trainers", name) for name in ("gpus 3 of trainers", "gpus 3", "gpus")]
    [True, True, False]
    >>> is_named("gpus 3 of trainers", "17", 17)
    True
    """
    return name in (label, label.partition(" of ")[0]) or (pid is not None and name == str(pid))


def mesh_of(label: str) -> str:
    """Return the name of the mesh in a label, "" for a process of none.

    >>> mesh_of("gpus 3 of trainers"), mesh_of("rank 2: train.py")
    ('trainers', '')
    """
    return label.partition(" of ")[2]


def is_among(label: str, pid: int, which: str) -> bool:
    """Return whether a process is one of ``which``: pids or labels, or dimensions as in "hosts=0 gpus=0,2-3".

    Raises ValueError for a range that is none.

    >>> [is_among("gpus 3 of trainers", 17, which) for which in ("gpus=0,2-3", "gpus 3", "17,18", "gpus=4", "gpus")]
    [True, True, True, False, False]
    """
    if "=" in which:
        wanted = {name: numbers_of(numbers) for name, numbers in re.findall(r"([^\s=]+)=(\S*)", which)}
        at = {name: int(index) for name, index in re.findall(r"(\S+) (\d+)", label)}
        return all(at.get(name) in numbers for name, numbers in wanted.items())
    return any(is_named(label, word, pid) for word in (which, *map(str.strip, which.split(","))))


def numbers_of(text: str) -> set[int]:
    """Return the numbers in a text such as "0,2-3". Raises ValueError.

    >>> numbers_of("0,2-3")
    {0, 2, 3}
    """
    numbers = set[int]()
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise ValueError(f"{text!r} is not a list of indices, such as 0,2-3")
        numbers |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    return numbers


def fold_labels(labels: Iterable[str]) -> str:
    """Return labels with ranges of their ranks.

    >>> fold_labels(["gpus 0 of trainers", "gpus 1 of trainers", "gpus 3 of trainers", "program train.py"])
    'gpus 0-1,3 of trainers; program train.py'
    >>> fold_labels(["gpus 0", "gpus 1", "gpus 2", "gpus 5"]), fold_labels(["hosts 0 gpus 1", "rank 2: train.py"])
    ('gpus 0-2,5', 'hosts 0 gpus 1; rank 2: train.py')
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    for label in labels:
        rank, of, mesh = label.partition(" of ")
        prefix, _, last = rank.rpartition(" ")
        if last.isdecimal() and prefix:
            numbers.setdefault((f"{prefix} ", f"{of}{mesh}"), []).append(int(last))
        else:
            numbers.setdefault((label, ""), [])
    return "; ".join(
        f"{prefix}{fold_numbers(sorted(set(found)))}{suffix}" for (prefix, suffix), found in numbers.items()
    )


def fold_numbers(numbers: Sequence[int]) -> str:
    """Return sorted numbers with ranges. `numbers_of` is the reverse.

    >>> fold_numbers([0, 1, 2, 3, 8])
    '0-3,8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
