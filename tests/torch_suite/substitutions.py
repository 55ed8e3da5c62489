"""Changes of torch's distributed_test.py before it runs, with their reasons: "monarch" is treated like "gloo".

The file decides by a backend's name what the backend can do, and silently skips tests for unknown names. This module
lists the changes of its text, and the lines that mention Gloo and stay. No test, tolerance, timeout or expectation may
change. `unmatched` and `unreviewed` return nothing as long as torch's file is one of those that were reviewed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Substitution:
    """Replacement of ``old`` by ``new`` everywhere. ``counts`` has the numbers of ``old`` in torch 2.9 to 2.15.

    No line is added or removed, so tracebacks have torch's own line numbers.
    """

    old: str
    new: str
    counts: tuple[int, ...]
    reason: str


# The features that torch's common_distributed.py lists by backend name, as sets. "monarch" is added to them. "plugin"
# is torch's set for backends that are not built in: for these `require_backend_is_available` checks only the name.
FEATURES = ("gpu", "cuda", "ddp", "subgroup", "plugin")

# Names that the changed file uses. server.py adds them to the module.
NAMES = {"TITLES": {"monarch": "shm"}}

SUBSTITUTIONS = (
    Substitution(
        'BACKEND != "gloo"',
        'BACKEND not in ("gloo", "monarch")',
        (18, 19),
        "timeouts, CPU batch_isend_irecv, sparse all_reduce, get_future and DDP join work on the CPU route as on Gloo",
    ),
    Substitution(
        'BACKEND == "mpi" or BACKEND == "gloo"',
        'BACKEND in ("mpi", "gloo", "monarch")',
        (1,),
        "the model of the gradient accumulation tests is made for the CPU; without it they fail on a missing name",
    ),
    Substitution(
        'BACKEND != "mpi", "Only MPI supports CPU all_to_all_single"',
        'BACKEND not in ("mpi", "monarch"), "Only MPI supports CPU all_to_all_single"',
        (8,),
        "more than the suite asks of Gloo: our CPU route has all_to_all_single (of lists, with even shapes only)",
    ),
    Substitution(
        '@require_backend_is_available({"gloo"})',
        '@require_backend_is_available({"gloo", "monarch"})',
        (19,),
        "coalesced collectives, monitored_barrier and two DDP tests are written for CPU groups, which we have",
    ),
    Substitution(
        "\n    dist.Backend.GLOO,\n",
        '\n    dist.Backend.GLOO, "monarch",\n',
        (3,),
        "profiling works; outside these lists the expected events are not looked at",
    ),
    Substitution(
        'f"{backend}:',
        'f"{TITLES.get(backend, backend)}:',
        (10,),
        "a profiled event has the title of the route that did it (shm:send), as gloo:send has",
    ),
    Substitution(
        'f"{dist.get_backend()}:',
        'f"{TITLES.get(dist.get_backend(), dist.get_backend())}:',
        (2,),
        "the same for the titles that DDP's profiling tests look for",
    ),
    Substitution(
        "dist.get_backend() + profiling_title_postfix",
        "TITLES.get(dist.get_backend(), dist.get_backend()) + profiling_title_postfix",
        (1,),
        "the same for the titles of the collectives",
    ),
    Substitution(
        "self.assertTrue(event.is_async)",
        'self.assertEqual(event.is_async, BACKEND != "monarch")',
        (6,),
        "an operation over shared memory runs on its caller's thread, and so its range begins and ends there",
    ),
    Substitution(
        "self.assertTrue(e.is_async)",
        'self.assertEqual(e.is_async, BACKEND != "monarch")',
        (1,),
        "the same for the collectives",
    ),
)

# Lines that mention Gloo and stay: (pattern of the whole line, reason).
KEPT = (
    (r"#.*", "comments"),
    (r'dist\.Backend\(\["gloo"\]\)', "a call that must raise whatever the backend"),
    (r'group_gloo = dist\.new_group\(ranks=\[0, 1\], backend="gloo"\)', "a group of Gloo's own beside ours"),
    (r"(timeout=timedelta\(seconds=60\), )?backend=dist\.Backend\.GLOO,?", "a group of Gloo's own beside ours"),
    (r"if backend == dist\.Backend\.GLOO:", 'is Gloo built in; the feature set "plugin" answers for us'),
    (
        r'if ddp_logging_data\.get\("backend_name"\) == "gloo":',
        "torch's logger.cpp writes the GLOO_* variables only for a backend called gloo; ours is logged as monarch",
    ),
)


def apply(source: str) -> str:
    """Return torch's file with all substitutions."""
    for substitution in SUBSTITUTIONS:
        source = source.replace(substitution.old, substitution.new)
    return source


def unmatched(source: str) -> list[str]:
    """Return the substitutions whose number in torch's file differs from that of the reviewed releases."""
    found = ((s, source.count(s.old)) for s in SUBSTITUTIONS)
    return [f"{s.old!r}: {n} times, expected {s.counts} ({s.reason})" for s, n in found if n not in s.counts]


def unreviewed(source: str) -> list[str]:
    """Return the lines of torch's file that mention Gloo and are neither substituted nor listed in KEPT."""
    left = []
    for number, line in enumerate(apply(source).splitlines(), 1):
        if not re.search(r"\"gloo\"|Backend\.GLOO", line) or "monarch" in line:
            continue
        if not any(re.fullmatch(pattern, line.strip()) for pattern, _ in KEPT):
            left.append(f"{number}: {line.strip()}")
    return left
