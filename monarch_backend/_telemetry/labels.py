"""Labels of processes, such as "gpus 3 of trainers": whether a name stands for one, and several in short."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

LAUNCHER = "launcher"
"""Label of the process of `monarch-backend run`. Those of its ranks are as "rank 1: train.py"."""

_INDICES = r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*"


def is_named(label: str, name: str, pid: int | None = None) -> bool:
    """Return whether ``name`` stands for the process with this label: all of it, or without its mesh or program.

    With ``pid``, also that of the process stands for it.

    >>> [is_named("gpus 3 of trainers", name) for name in ("gpus 3 of trainers", "gpus 3", "gpus")]
    [True, True, False]
    >>> is_named("gpus 3 of trainers", "17", 17), is_named("rank 1: ddp.py", "rank 1")
    (True, True)
    """
    return name in (label, _place(label)) or (pid is not None and name == str(pid))


def _place(label: str) -> str:
    """Return a label without the name of its mesh or program: "gpus 3", "rank 1"."""
    of_launcher = re.match(r"(rank \d+): ", label)
    return of_launcher[1] if of_launcher else label.partition(" of ")[0]


def in_words(ranks: Sequence[str]) -> str:
    """Return the words of a user that chose processes, for an error.

    >>> in_words(["gpus 7", "9"])
    "'gpus 7' or '9'"
    """
    return " or ".join(map(repr, ranks))


def mesh_of(label: str) -> str:
    """Return the name of the mesh in a label, "" for a process of none.

    >>> mesh_of("gpus 3 of trainers"), mesh_of("rank 2: train.py")
    ('trainers', '')
    """
    return label.partition(" of ")[2]


def is_among(label: str, pid: int, which: str) -> bool:
    """Return whether a process is one of ``which``: pids or labels, also folded ones, or indices of dimensions.

    Numbers alone are pids, or ranks of the launcher. Raises ValueError for a range that is none.

    >>> of_mesh = ("gpus=0,2-3", "gpus 2-3", "gpus 3", "17,18", "gpus 3 of trainers", "gpus=3 of trainers")
    >>> all(is_among("gpus 3 of trainers", 17, which) for which in of_mesh)
    True
    >>> any(is_among("gpus 3 of trainers", 17, which) for which in ("gpus=4", "gpus", "3", "gpus 2-3 of readers"))
    False
    >>> [is_among("rank 1: ddp.py", 17, which) for which in ("1", "0-1", "rank 0-1", "rank=1", "2")]
    [True, True, True, True, False]
    """
    if any(is_named(label, word, pid) for word in (which, *map(str.strip, which.split(",")))):
        return True
    place, mesh = _place(label), mesh_of(label)
    wanted, _, of_mesh = which.partition(" of ")
    if of_mesh and of_mesh != mesh:
        return False
    if "=" in wanted:
        ranges = {name: numbers_of(numbers) for name, numbers in re.findall(r"([^\s=]+)=(\S*)", wanted)}
        at = {name: int(index) for name, index in re.findall(r"(\S+) (\d+)", place)}
        return all(at.get(name) in numbers for name, numbers in ranges.items())
    folded = re.fullmatch(rf"(?:(.+) )?({_INDICES})", wanted)
    own = re.fullmatch(r"(.+) (\d+)", place)
    is_of_kind = folded is not None and own is not None and (folded[1] or "rank") == own[1]
    return is_of_kind and int(own[2]) in numbers_of(folded[2])  # type: ignore[index]


def is_wanted(label: str, pid: int, ranks: Sequence[str] | None) -> bool:
    """Return whether a process is among one of ``ranks``, None for all. Raises as `is_among` does."""
    return ranks is None or any(is_among(label, pid, each) for each in ranks)


def pids_in_words(pids: Sequence[int]) -> str:
    """Return the first eight pids in words.

    >>> pids_in_words([17]), pids_in_words(range(1, 10))
    ('pid 17', 'pids 1, 2, 3, 4, 5, 6, 7, 8, ...')
    """
    first = [str(each) for each in pids[:8]] + ["..."] * (len(pids) > 8)
    return f"pid{'s' * (len(pids) > 1)} {', '.join(first)}"


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
    >>> fold_labels(["pt_data_worker of gpus 0 of trainers", "pt_data_worker of gpus 1 of trainers"])
    'pt_data_worker of gpus 0-1 of trainers'
    >>> fold_labels(["rank 0: train.py", "rank 1: train.py"])
    'rank 0-1: train.py'
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    children: dict[str, list[str]] = {}  # name -> labels of their starters
    for label in labels:
        rank = _place(label)
        prefix, _, last = rank.rpartition(" ")
        if last.isdecimal() and prefix:
            numbers.setdefault((f"{prefix} ", label[len(rank) :]), []).append(int(last))
        elif rank != label:
            children.setdefault(rank, []).append(mesh_of(label))
        else:
            numbers.setdefault((label, ""), [])
    parts = [f"{prefix}{fold_numbers(sorted(set(found)))}{suffix}" for (prefix, suffix), found in numbers.items()]
    parts += [f"{name} of {each}" for name, found in children.items() for each in fold_labels(found).split("; ")]
    return "; ".join(parts)


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
