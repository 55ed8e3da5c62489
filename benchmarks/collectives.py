"""Benchmark of collectives on one host: monarch, Gloo, OpenMPI, Intel MPI, DeepSpeed, and floors.

    python benchmarks/collectives.py [--quick] [--ranks 2 4] [--sizes 8 64K 1M] [--collectives all_reduce] [--out DIR]

The ranks of all peers are started once and block in a socket's recv. The driver tells one peer after the other to run a
batch of calls. Each round starts with another peer, so that noise of the machine affects all alike. If a peer is not
installed or fails, the report says so, and the run continues with the others.

Timing: after a barrier and warm-up calls, each rank times the calls of a batch with perf_counter_ns, without pauses
between them. The time of the i-th call is that of the slowest rank. Otherwise a rank that runs ahead, such as the root
of a broadcast, would favour libraries that buffer. The time of a ping-pong is half of rank 0's round trip. Tables have
the median and 99th percentile over all rounds, and the median of the rounds' ratios to monarch.

A size is the number of bytes of the larger buffer (the output of all_gather, the input of reduce_scatter), and at least
one element per rank. Elements are float32. all_reduce_bf16 has bfloat16 and the sizes of tensor-parallel inference, for
which vLLM, SGLang and DeepSpeed have operators of their own. Results are checked once for every peer, collective and
size. All libraries use the same kind of buffers. _floors.py describes the floors, and _collective_peers.py has the
peers' settings. The report prints the settings.

Peers: `pip install 'monarch_backend[bench]'` installs all but DeepSpeed. Its setup needs the installed torch, which
pip's isolated build does not see. `make bench` installs it with

    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation 'deepspeed>=0.19'
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from _collective_peers import COLLECTIVES, COMMON, FLOORS, OTHER_FLOORS, PEERS, SIZED_FLOORS, deepspeed_segments
from _peer_runner import Effort, Others, Runner, idle, started
from _report import Table, markdown, plot

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
QUICK_SIZES = (8, 64 << 10, 1 << 20)
INFERENCE_SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""Of all_reduce_bf16: what tensor-parallel inference reduces in each layer."""


def _measure(ranks: int, args: argparse.Namespace, effort: Effort, notes: list[str]) -> tuple[Table, Table]:
    """Measure all cases with this number of ranks. Return two tables: cases with sizes, and cases without."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None  # OpenMPI puts its segments into this folder
    wanted = [peer for peer in PEERS if peer.name in args.peers]
    table: Table = {}
    once: Table = {}
    with tempfile.TemporaryDirectory(prefix="monarch-bench-", dir=base, ignore_cleanup_errors=True) as folder:
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [path.unlink(missing_ok=True) for path in deepspeed_segments(Path(folder))])
            rank_sets = started([*wanted, FLOORS], ranks, Path(folder), stack, notes)
            notes.append(f"cores used by sleeping ranks: {idle(rank_sets)}")
            others = Others(list(rank_sets))
            runner = Runner(rank_sets, effort, notes)
            for what in args.collectives:
                for size in INFERENCE_SIZES if what == "all_reduce_bf16" else args.sizes:
                    print(f"{ranks} ranks, {what}, {size} B", file=sys.stderr)
                    floors = runner.floors(SIZED_FLOORS, size) if what == args.collectives[0] else []
                    table[what, size] = runner.measure(runner.collective(what, size) + floors)
            has_spin = (Path(folder) / "floors" / "spin").exists()
            names = [name for name in OTHER_FLOORS if name != "spin" or has_spin]
            once["floors", 0] = runner.measure(runner.floors(names, 8))
            notes.append(f"the same at the end: {idle(rank_sets)}")
            notes.append(others.note())
    return table, once


def _versions() -> str:
    found = []
    for name in ("torch", "monarch_backend", "openmpi", "impi-rt", "mpi4py", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return f"{', '.join(found)}; Python {platform.python_version()}; {len(os.sched_getaffinity(0))} cores"


def _text(ranks: int, table: Table, once: Table, peers: Sequence[str], notes: Sequence[str]) -> str:
    sized: Table = {}
    for (_, size), entries in table.items():
        sized.setdefault(("", size), {}).update({name: entries[name] for name in SIZED_FLOORS if name in entries})
    lines = [f"## {ranks} ranks", "", "Microseconds: median / 99th percentile (times monarch's)", ""]
    lines += [markdown(table, peers), "", "Floors:", ""]
    lines += [markdown(sized, SIZED_FLOORS), ""]
    lines += [markdown(once, OTHER_FLOORS), ""]
    lines += [f"- {peer.name}: {peer.settings(ranks)}" for peer in PEERS if peer.name in peers]
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1].upper()] if text[-1].upper() in units else int(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=_bytes, nargs="+", help="bytes, or with K or M")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--peers", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: about a minute")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="where the table and plots go")
    args = parser.parse_args()
    args.sizes = args.sizes or list(QUICK_SIZES if args.quick else SIZES)
    return args


def _stop(*_: object) -> None:
    sys.exit(143)


def main() -> None:
    """Run the benchmark; print and write the report."""
    args = _arguments()
    signal.signal(signal.SIGTERM, _stop)
    effort = Effort(args.rounds or 4, 0.008) if args.quick else Effort(args.rounds or 8, 0.02)
    args.out.mkdir(parents=True, exist_ok=True)
    common = " ".join(f"{name}={value}" for name, value in COMMON.items())
    text = f"# Collectives on one host\n\n{_versions()}. All ranks: {common}\n\n"
    print(text)
    for ranks in args.ranks:
        notes: list[str] = []
        table, once = _measure(ranks, args, effort, notes)
        measured = {name for entries in table.values() for name in entries}
        peers = [peer.name for peer in PEERS if peer.name in measured]
        reason = plot(
            table, peers, SIZED_FLOORS, f"{ranks} ranks, float32", args.out / f"collectives-{ranks}-ranks.png"
        )
        part = _text(ranks, table, once, peers, notes + ([reason] if reason else []))
        print(part, flush=True)
        text += part + "\n"
    (args.out / "collectives.md").write_text(text, encoding="utf-8")
    print(f"written to {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
