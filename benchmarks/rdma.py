"""Benchmark of reads and writes of another process's memory: RDMABuffer on every route, peers, and floors.

    python tools/peer_env.py torchmonarch nixl        # once: the peers' own environments
    python benchmarks/rdma.py [--rounds N] [--sizes 8 64K 64M] [--only host hosts own verbs] [--out DIR]
    tools/rxe_guest.sh python benchmarks/rdma.py --only verbs      # if this machine has fewer than two RDMA devices

host    two processes of this host: memory of rdma.empty (mapped), ordinary memory (process_vm_readv), and a copy by the
        owner's thread (MONARCH_CMA=0). "again" submits the same RDMAAction repeatedly, as NIXL does with its handles.
        Floors are memcpy in one process and a bare process_vm_readv. Peers are NIXL over UCX and torchmonarch, whose
        RDMABuffer uses TCP without a NIC
hosts   two network namespaces, over TCP with and without TLS, compared with sockets and with one stream of iperf3.
        It needs root, iproute2 and iperf3
own     8 bytes by verbs over a simulated NIC: the time of our Python code, compared with a bare work request of that
        NIC. "again" is as above, with one tensor and without timeout=. In "two tensors" successive transfers alternate
        between two tensors. In all other cases with verbs they use the same tensor
verbs   two RDMA devices of this machine, compared with perftest: rates with equal numbers in flight, and latencies

Each round measures all contenders for each size, and each round starts with another contender. Cells have the median of
all calls, the rate, and in brackets the speed relative to the contender's floor: the median of the rounds' ratios. The
bytes that are read are checked once for each size. Python's own part of a read is the time of the whole call minus the
time of the compiled call below it.

With verbs, Python has two parts. The adapter's part (the binding of libibverbs) is a bare loop of posting and polling
minus perftest's latency. Our own part is the time of a transfer minus the time of that loop, both without posting and
polling. The target: a transfer of 8 bytes takes at most perftest's latency, both parts, and 3 us. So it may spend 3 us
more than the bare loop in posting and polling. It must not sleep; the report counts sleeps. A write is compared with
ib_write_bw with one message in flight.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import _rdma_perftest as perftest
from _actor_runners import adopt_orphans, end_all
from _host_runners import RUNNERS as HOST_RUNNERS
from _host_runners import Ended, Runner, RunnerTimeout, daemon, runners
from _machine_report import Others, machine
from _rdma_report import Route, Target, plot
from _report import Series
from hosts import iperf

from tests.support.hosts import Hosts, hosts, refusal

ROOT = Path(__file__).resolve().parent.parent
RUNNERS = Path(__file__).with_name("rdma_runners")
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
VERBS_SIZES = (8, 64 << 10, 1 << 20, 16 << 20)
SMALL = 8  # bytes of the transfers for which Python's parts are reported
ONCE = {"read": "read", "write": "write"}
PEERS = {"read": "ib_read_lat", "write": "ib_write_bw -t 1"}
"""Not ib_write_lat: its two processes write to each other in turns, which takes 11 ms if they share a processor."""
AGAIN = {"read, again": "read_again", "write, again": "write_again"}
TURNS = {"read, two tensors": "read_turns", "write, two tensors": "write_turns"}
BARE = {"bare read": "bare", "bare write": "write_bare"}
HOW = {"1 in flight": "", "again": "_again", "two tensors": "_turns"}  # name of a variant -> suffix of its case
LARGE = 1 << 20  # least size for which iperf3 is measured
IN_FLIGHT = 16  # equal to IN_FLIGHT of rdma_runners/ours.py
BATCH = 128 << 20  # most bytes of a batch of calls
FEWEST, MOST = 2, 100  # number of calls in a batch
COMMON = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
Make = Callable[..., Runner]


class Refused(Exception):
    """A runner answered with an error."""


def ask(runner: Runner, case: str, size: int) -> list[float]:
    """Run a batch of calls in a runner and return their times."""
    runner.send(case, max(FEWEST, min(MOST, BATCH // size)), size)
    return read_times(runner)


def read_times(runner: Runner) -> list[float]:
    """Return the runner's answer: times. Raises Refused."""
    answer = json.loads(runner.read_line())
    if isinstance(answer, dict):
        raise Refused(answer["error"])
    found: list[float] = answer
    return found


@dataclass
class Contender:
    """One column of the table. ``times(size)`` runs a batch and returns its times."""

    name: str
    times: Callable[[int], list[float]]
    least: int = 0  # least size in bytes
    most: int = 1 << 62
    bare: Callable[[], list[float]] | None = None  # times of the compiled call alone, for 8 bytes
    failed: bool = field(default=False)

    def turn(self, route: Route, size: int) -> None:
        """Measure this contender for one size in one round."""
        if self.failed or not self.least <= size <= self.most:
            return
        try:
            times = self.times(size)
            route.add(size, self.name, times)
            if self.bare is not None and size == min(route.rows):
                own = statistics.median(times) - statistics.median(self.bare())
                route.own.setdefault(self.name, Series()).rounds.append([own * 1e6])
        except (Refused, RunnerTimeout, Ended, OSError, RuntimeError) as error:
            self.failed = True
            route.fail(self.name, str(error).strip().splitlines()[-1][:300])


def rounds(route: Route, contenders: Sequence[Contender], sizes: Sequence[int], count: int) -> None:
    """Measure all contenders in all rounds."""
    for turn in range(count):
        print(f"{route.title}: round {turn + 1} of {count}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        first = turn % len(contenders)
        for size in sizes:
            for one in [*contenders[first:], *contenders[:first]]:
                one.turn(route, size)
    order = [one.name for one in contenders]
    for size, row in route.rows.items():
        route.rows[size] = {name: row[name] for name in order if name in row}


def read_description(runner: Runner) -> Any:
    """Return a runner's description of itself, its first line."""
    return json.loads(runner.read_line())


def runner_of(name: str, runner: Runner, route: Route, *, case: str = "read", bare: bool = False) -> Contender:
    """Return the contender of a runner, and note the runner's description in the report."""
    about = read_description(runner)
    if isinstance(about, str):
        route.notes.append(f"{name}: {about}")
    below = (lambda: ask(runner, "bare", 8)) if bare else None
    return Contender(name, lambda size: ask(runner, case, size), bare=below)


# ---- one host


class Alone:
    """This host, as a substitute for Hosts."""

    pids = ()

    @staticmethod
    def command(_: int, *words: str) -> list[str]:
        """Return the command unchanged, since there are no namespaces."""
        return list(words)


def stopped_between_batches(contender: Contender, runner: Runner) -> Contender:
    """Stop a contender's processes between its batches, because its threads never sleep. Return the contender."""
    inner = contender.times

    def times(size: int) -> list[float]:
        os.killpg(runner.process.pid, signal.SIGCONT)
        try:
            return inner(size)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(runner.process.pid, signal.SIGSTOP)

    os.killpg(runner.process.pid, signal.SIGSTOP)
    contender.times = times
    return contender


def _peers(make: Make, most: int, route: Route) -> Iterator[Contender]:
    for key, name, script in (
        ("nixl", "NIXL", "nixl_peer.py"),
        ("torchmonarch", "torchmonarch", "torchmonarch_peer.py"),
    ):
        python = ROOT / ".envs" / f"peer-{key}" / "bin" / "python"
        if not python.exists():
            route.notes.append(f"{name}: not installed; run: python tools/peer_env.py {key}")
            continue
        runner = make(0, python, RUNNERS / script, most, PYTHONPATH=str(RUNNERS))  # workers import from it
        try:
            made = runner_of(name, runner, route)
        except (RunnerTimeout, Ended) as error:
            route.notes.append(f"{name}: {error}")
            continue
        yield stopped_between_batches(made, runner) if key == "nixl" else made


def one_host(sizes: Sequence[int], count: int) -> Route:
    """Measure two processes of this host."""
    large = [size for size in sizes if size >= 64 << 10]
    floors = {"mapped": "memcpy", "mapped, again": "memcpy"}
    floors |= dict.fromkeys(("ordinary", "ordinary, again"), "process_vm_readv")
    floors |= dict.fromkeys(("owner's thread", "NIXL", "torchmonarch"), "process_vm_readv")
    targets = (
        Target("mapped", "memcpy", 0.8, [64 << 20]),
        Target("ordinary", "process_vm_readv", 0.95, [64 << 20], rate=5.0),
        Target("ordinary, again", "NIXL", 1.0, large),
        Target("mapped, again", "NIXL", 1.0, large),
        Target("ordinary", "torchmonarch", 10.0, sizes),
        Target("mapped", "torchmonarch", 10.0, sizes),
    )
    route = Route("One host", floors, targets)
    most, alone, ours = max(sizes), Alone(), RUNNERS / "ours.py"
    with runners(alone, **COMMON) as make:  # type: ignore[arg-type]
        mapped = make(0, sys.executable, ours, "mapped", most)
        ordinary = make(0, sys.executable, ours, "ordinary", most)
        thread = make(0, sys.executable, ours, "ordinary", most, MONARCH_CMA="0")
        floor = make(0, sys.executable, RUNNERS / "floor.py", most)
        made = [
            runner_of("mapped", mapped, route, bare=True),
            Contender("mapped, again", lambda size: ask(mapped, "read_again", size)),
            runner_of("ordinary", ordinary, route, bare=True),
            Contender("ordinary, again", lambda size: ask(ordinary, "read_again", size)),
            runner_of("owner's thread", thread, route),
            runner_of("memcpy", floor, route, case="copy"),
            Contender("memcpy of shared pages", lambda size: ask(floor, "copy_shared", size)),
            Contender("process_vm_readv", lambda size: ask(floor, "readv", size)),
            *_peers(make, most, route),
        ]
        rounds(route, made, sizes, count)
    return route


# ---- two hosts


def _far(make: Make, where: Hosts, most: int, route: Route) -> Iterator[Contender]:
    there, python = where.address(1), sys.executable
    for name, tls, port in (("ours", "0", 26611), ("ours, TLS", "1", 26612)):
        daemon(make, f"{there}:{port}", tls)
        runner = make(0, python, RUNNERS / "ours.py", "ordinary", most, f"{there}:{port}", MONARCH_TLS=tls)
        yield runner_of(name, runner, route, bare=True)
    for name, port, *tls in ("socket", 29411), ("TLS socket", 29412, "tls"):
        make(1, python, HOST_RUNNERS / "floor.py", "listen", there, port, *tls).read_line()
        runner = make(0, python, HOST_RUNNERS / "floor.py", "call", there, port, *tls)
        yield runner_of(name, runner, route)
    make(1, "iperf3", "-s")
    yield Contender("iperf3", lambda size: [size / iperf(where)], least=LARGE)


def two_hosts(sizes: Sequence[int], count: int) -> Route:
    """Measure two network namespaces."""
    floors = {"ours": "socket", "ours, TLS": "TLS socket"}
    large = [size for size in sizes if size >= 64 << 20]
    targets = (Target("ours", "iperf3", 0.7, large), Target("ours, TLS", "TLS socket", 0.7, large))
    route = Route("Two hosts, TCP", floors, targets)
    if why := refusal():
        route.notes.append(why)
        return route
    with tempfile.NamedTemporaryFile("w") as secret:  # with permissions 600
        secret.write(os.urandom(32).hex())
        secret.flush()
        with hosts(2) as where, runners(where, MONARCH_SECRET_FILE=secret.name, **COMMON) as make:
            rounds(route, list(_far(make, where, max(sizes), route)), sizes, count)
    return route


# ---- RDMA devices


def verbs(sizes: Sequence[int], count: int) -> Route:
    """Measure transfers between two RDMA devices."""
    floors = {f"{kind}, {n} in flight": f"ib_{kind}_bw -t {n}" for kind in ("read", "write") for n in (1, IN_FLIGHT)}
    large = [size for size in sizes if size >= 1 << 20]
    route = Route("Verbs", floors, tuple(Target(mine, floor, 0.9, large) for mine, floor in floors.items()))
    found = perftest.devices()
    if len(found) < 2:
        route.notes.append("this machine has no two RDMA devices; tools/rxe_guest.sh makes a guest that has")
        return route
    env = {
        "MONARCH_RDMA_TRANSPORT": "verbs",
        "MONARCH_TLS": "0",
        "MONARCH_RDMA_DEVICES": found[0],
        "OWNER_DEVICES": found[1],
    }
    ports = iter(range(18600, 65000))
    with runners(Alone(), **COMMON) as make:  # type: ignore[arg-type]
        ours = make(0, sys.executable, RUNNERS / "ours.py", "ordinary", max(VERBS_SIZES), **env)
        made = [runner_of("read, 1 in flight", ours, route)]
        made += [_many(ours, kind, n) for kind, n in (("read", IN_FLIGHT), ("write", 1), ("write", IN_FLIGHT))]
        made += [_small(name, ours, case) for name, case in {**AGAIN, **TURNS, **BARE}.items()]
        cases = {**ONCE, **AGAIN, **TURNS, **BARE}
        made += [_small(_below(case), ours, f"below {case}") for case in cases.values()]
        if why := perftest.missing():
            route.notes.append(f"perftest: {why}")
        else:
            made += [_perftest(name, ports) for name in (*floors.values(), "ib_read_lat")]
        rounds(route, made, sizes, count)
        for kind in ("read", "write"):
            for name, case in ((f"{kind}, {how}", f"{kind}{of}") for how, of in HOW.items()):
                route.notes += _latency(route, kind, name, case)
                route.notes.append(f"{name}, 8 B: {ask(ours, f'sleeps {case}', SMALL)[0]:.2g} sleeps of its thread")
    return route


def _below(case: str) -> str:
    return f"below Python: {case}"


def _small(name: str, runner: Runner, case: str) -> Contender:
    return Contender(name, lambda size: ask(runner, case, size), most=SMALL)


def simulated_nic(count: int) -> Route:
    """Measure our Python code with a simulated NIC."""
    names = {**ONCE, **AGAIN, **TURNS, **BARE}
    floors = {name: f"bare {name.split(',')[0]}" for name in {**ONCE, **AGAIN, **TURNS}}
    route = Route("Verbs' own Python", floors)
    with runners(Alone(), **COMMON) as make:  # type: ignore[arg-type]
        runner = make(0, sys.executable, RUNNERS / "simulated_nic.py", SMALL)
        read_description(runner)
        rounds(route, [_small(name, runner, case) for name, case in names.items()], [SMALL], count)
    for name, bare in ((name, bare) for name, bare in floors.items() if {name, bare} <= route.rows[SMALL].keys()):
        route.notes.append(f"{name}: our own part is {_over(route, name, bare):.1f} us")
    return route


def _over(route: Route, name: str, floor: str) -> float:
    """Return how many microseconds longer a transfer of 8 bytes takes than its floor: the median of the rounds."""
    row = route.rows[SMALL]
    each = zip(row[name].rounds, row[floor].rounds, strict=False)
    return statistics.median(statistics.median(mine) - statistics.median(its) for mine, its in each)


def _latency(route: Route, kind: str, name: str, case: str) -> list[str]:
    """Return lines with both parts of Python for 8 bytes, and the verdict on the target. See the module's docstring."""
    floor, bare, row = PEERS[kind], f"bare {kind}", route.rows.get(SMALL, {})
    if not {name, floor, bare, _below(case), _below(BARE[bare])} <= row.keys():
        return []
    rest = _over(route, _below(case), _below(BARE[bare]))  # both include the same reads of the clock
    ours, adapters = _over(route, name, bare) - rest, _over(route, bare, floor)
    return [
        f"{name}, 8 B: {ours:.1f} us are our own Python's, {adapters:.1f} us the adapter's",
        f"{name}, 8 B <= {floor} + 3 us + both of Python's parts: {'yes' if rest <= 3 else 'NO'} ({rest:+.1f} us)",
    ]


def _many(runner: Runner, kind: str, depth: int) -> Contender:
    case = kind if depth == 1 else f"{kind}_many"

    def times(size: int) -> list[float]:
        runner.send(case, max(FEWEST, min(MOST, BATCH // (size * depth))), size)
        return [seconds / depth for seconds in read_times(runner)]

    return Contender(f"{kind}, {depth} in flight", times)


def _perftest(name: str, ports: Iterator[int]) -> Contender:
    tool, *depth = name.split(" -t ")
    in_flight = int(depth[0]) if depth else None
    return Contender(name, lambda size: [perftest.seconds(tool, size, in_flight, next(ports))])


# ---- all


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1].upper()] if text[-1].upper() in units else int(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=_bytes, nargs="+", default=list(SIZES), help="bytes, or with K or M")
    default = ["host", "hosts", "own", *(["verbs"] if len(perftest.devices()) > 1 else [])]
    parser.add_argument("--only", nargs="+", choices=("host", "hosts", "own", "verbs"), default=default)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="where the table and the plot go")
    return parser.parse_args()


def _stop(*_: object) -> None:
    sys.exit(143)


def measure(args: argparse.Namespace) -> list[Route]:
    """Measure the selected routes."""
    found: dict[str, Callable[[], Route]] = {
        "host": lambda: one_host(args.sizes, args.rounds),
        "hosts": lambda: two_hosts(args.sizes, args.rounds),
        "own": lambda: simulated_nic(args.rounds),
        "verbs": lambda: verbs([size for size in args.sizes if size in VERBS_SIZES], args.rounds),
    }
    return [found[name]() for name in args.only]


def main() -> None:
    """Run the benchmark; print and write the report."""
    args, others = _arguments(), Others()
    signal.signal(signal.SIGTERM, _stop)
    args.out.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    before = os.getloadavg()[0]
    try:
        routes = measure(args)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore a second Ctrl-C, which would leave processes behind
        end_all()
    load = f"load {before:.1f} before, {os.getloadavg()[0]:.1f} at the end; {others.note()}"
    reasons = [
        plot(one, args.out / f"rdma-{name}.png") for name, one in zip(args.only, routes, strict=True) if one.rows
    ]
    drawn = next(filter(None, reasons), None)
    name = "rdma" if len(args.only) > 1 else f"rdma-{args.only[0]}"
    tables = "\n".join(route.markdown() for route in routes)
    text = f"# Memory of other processes\n\n{machine()}; {args.rounds} rounds; {load}\n\n{tables}"
    text += f"\n- {drawn}\n" if drawn else ""
    print(text)
    (args.out / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
