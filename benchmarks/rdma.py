"""Benchmark of reads of another process's memory: RDMABuffer on every route, peers, and the floor.

    python tools/peer_env.py torchmonarch nixl        # once: the peers' own environments
    python benchmarks/rdma.py [--rounds N] [--sizes 8 64K 64M] [--only host hosts own verbs] [--out DIR]
    tools/rxe_guest.sh python benchmarks/rdma.py --only verbs      # where this machine has no two RDMA devices

host    two processes of this host: memory of rdma.empty (mapped), ordinary memory (process_vm_readv), and through the
        owner's thread (MONARCH_CMA=0); "again" is an RDMAAction that is submitted again and again, as NIXL's handles
        are; floors are memcpy in one process and a bare process_vm_readv; peers are NIXL
        over UCX and torchmonarch, whose RDMABuffer takes TCP where no NIC is
hosts   two network namespaces, over TCP, with and without TLS, beside sockets and iperf3 with one stream; needs root,
        iproute2 and iperf3
own     8 bytes by verbs over a NIC that there is not: what our Python takes, beside a bare work request of that NIC
        ("again" as above: over verbs that is of one tensor, and without timeout=; in all other cases of verbs, too,
        the tensor is that of the last time, but for those of "two tensors", in turns)
verbs   two RDMA devices of this machine, beside perftest: its rates with as many in flight, and its latencies

Each size goes round all contenders, round after round and each round from another one on. Cells have the median of all
calls, the rate, and in brackets how fast that is beside the contender's floor: the median of the rounds' ratios. All
that is read is compared with what it must be, once for each size. Python's own part of a read is the time of the call
less that of the compiled call that it ends in.

With verbs there are two parts of Python's: that of the adapter to libibverbs, a bare loop of posting and polling less
perftest's latency, and our own, what a transfer takes longer than that loop outside of posting and polling. The bar is
that a transfer of 8 bytes takes no more than perftest's latency, both parts and 3 us: so it may spend 3 us more below
Python, in posting and polling, than the bare loop does, and may not sleep, of which there is a count.
A write's peer is ib_write_bw with one in flight.
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
from _host_runners import RUNNERS as HOST_STATIONS
from _host_runners import Ended, Runner, Silent, daemon, runners
from _machine_report import Others, machine
from _rdma_report import Must, Route, plot
from _report import Series
from hosts import iperf

from tests.support.hosts import Hosts, hosts, refusal

ROOT = Path(__file__).resolve().parent.parent
RUNNERS = Path(__file__).with_name("rdma_runners")
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
VERBS_SIZES = (8, 64 << 10, 1 << 20, 16 << 20)
SMALL = 8  # bytes of whose transfer Python's parts are told
ONCE = {"read": "read", "write": "write"}
PEERS = {"read": "ib_read_lat", "write": "ib_write_bw -t 1"}
"""For ib_write_lat two processes write to each other in turns, which takes 11 ms where both share a processor."""
AGAIN = {"read, again": "read_again", "write, again": "write_again"}
TURNS = {"read, two tensors": "read_turns", "write, two tensors": "write_turns"}
BARE = {"bare read": "bare", "bare write": "write_bare"}
HOW = {"1 in flight": "", "again": "_again", "two tensors": "_turns"}  # and how the case of that is called
LARGE = 1 << 20  # from here on iperf3 is a floor
IN_FLIGHT = 16  # as rdma_runners/ours.py
BATCH = 128 << 20  # bytes of a batch of calls, at most
FEWEST, MOST = 2, 100  # calls in it
COMMON = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
Make = Callable[..., Runner]


class Refused(Exception):
    """A runner's own word that it can't."""


def ask(runner: Runner, case: str, size: int) -> list[float]:
    """Times of a batch."""
    runner.tell(case, max(FEWEST, min(MOST, BATCH // size)), size)
    return heard(runner)


def heard(runner: Runner) -> list[float]:
    """The answer. Raises Refused."""
    answer = json.loads(runner.hear())
    if isinstance(answer, dict):
        raise Refused(answer["error"])
    found: list[float] = answer
    return found


@dataclass
class Contender:
    """One column: how a batch of a size is had."""

    name: str
    times: Callable[[int], list[float]]
    least: int = 0  # bytes
    most: int = 1 << 62
    bare: Callable[[], list[float]] | None = None  # what is below Python, of 8 bytes
    failed: bool = field(default=False)

    def turn(self, route: Route, size: int) -> None:
        """Its part of a round."""
        if self.failed or not self.least <= size <= self.most:
            return
        try:
            times = self.times(size)
            route.add(size, self.name, times)
            if self.bare is not None and size == min(route.rows):
                own = statistics.median(times) - statistics.median(self.bare())
                route.own.setdefault(self.name, Series()).rounds.append([own * 1e6])
        except (Refused, Silent, Ended, OSError, RuntimeError) as error:
            self.failed = True
            route.fail(self.name, str(error).strip().splitlines()[-1][:300])


def rounds(route: Route, contenders: Sequence[Contender], sizes: Sequence[int], count: int) -> None:
    """All of it."""
    for turn in range(count):
        print(f"{route.title}: round {turn + 1} of {count}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        first = turn % len(contenders)
        for size in sizes:
            for one in [*contenders[first:], *contenders[:first]]:
                one.turn(route, size)
    order = [one.name for one in contenders]
    for size, row in route.rows.items():
        route.rows[size] = {name: row[name] for name in order if name in row}


def heard_of(runner: Runner) -> Any:
    """What it says that it is."""
    return json.loads(runner.hear())


def runner_of(name: str, runner: Runner, route: Route, *, case: str = "read", bare: bool = False) -> Contender:
    """Of a runner, which says what it is."""
    about = heard_of(runner)
    if isinstance(about, str):
        route.notes.append(f"{name}: {about}")
    below = (lambda: ask(runner, "bare", 8)) if bare else None
    return Contender(name, lambda size: ask(runner, case, size), bare=below)


# ---- one host


class Alone:
    """This very host, in the place of Hosts."""

    pids = ()

    @staticmethod
    def command(_: int, *words: str) -> list[str]:
        """No namespaces."""
        return list(words)


def asleep(contender: Contender, runner: Runner) -> Contender:
    """The same, stopped between its turns: its threads never sleep."""
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
        runner = make(0, python, RUNNERS / script, most, PYTHONPATH=str(RUNNERS))  # workers import it
        try:
            made = runner_of(name, runner, route)
        except (Silent, Ended) as error:
            route.notes.append(f"{name}: {error}")
            continue
        yield asleep(made, runner) if key == "nixl" else made


def one_host(sizes: Sequence[int], count: int) -> Route:
    """Two processes of this host."""
    large = [size for size in sizes if size >= 64 << 10]
    floors = {"mapped": "memcpy", "mapped, again": "memcpy"}
    floors |= dict.fromkeys(("ordinary", "ordinary, again"), "process_vm_readv")
    floors |= dict.fromkeys(("owner's thread", "NIXL", "torchmonarch"), "process_vm_readv")
    musts = (
        Must("mapped", "memcpy", 0.8, [64 << 20]),
        Must("ordinary", "process_vm_readv", 0.95, [64 << 20], rate=5.0),
        Must("ordinary, again", "NIXL", 1.0, large),
        Must("mapped, again", "NIXL", 1.0, large),
        Must("ordinary", "torchmonarch", 10.0, sizes),
        Must("mapped", "torchmonarch", 10.0, sizes),
    )
    route = Route("One host", floors, musts)
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
        make(1, python, HOST_STATIONS / "floor.py", "listen", there, port, *tls).hear()
        runner = make(0, python, HOST_STATIONS / "floor.py", "call", there, port, *tls)
        yield runner_of(name, runner, route)
    make(1, "iperf3", "-s")
    yield Contender("iperf3", lambda size: [size / iperf(where)], least=LARGE)


def two_hosts(sizes: Sequence[int], count: int) -> Route:
    """Two network namespaces."""
    floors = {"ours": "socket", "ours, TLS": "TLS socket"}
    large = [size for size in sizes if size >= 64 << 20]
    musts = (Must("ours", "iperf3", 0.7, large), Must("ours, TLS", "TLS socket", 0.7, large))
    route = Route("Two hosts, TCP", floors, musts)
    if why := refusal():
        route.notes.append(why)
        return route
    with tempfile.NamedTemporaryFile("w") as secret:  # mode 600
        secret.write(os.urandom(32).hex())
        secret.flush()
        with hosts(2) as where, runners(where, MONARCH_SECRET_FILE=secret.name, **COMMON) as make:
            rounds(route, list(_far(make, where, max(sizes), route)), sizes, count)
    return route


# ---- RDMA devices


def verbs(sizes: Sequence[int], count: int) -> Route:
    """From one device to the other."""
    floors = {f"{kind}, {n} in flight": f"ib_{kind}_bw -t {n}" for kind in ("read", "write") for n in (1, IN_FLIGHT)}
    large = [size for size in sizes if size >= 1 << 20]
    route = Route("Verbs", floors, tuple(Must(mine, floor, 0.9, large) for mine, floor in floors.items()))
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


def own_part(count: int) -> Route:
    """Over a NIC that there is not."""
    names = {**ONCE, **AGAIN, **TURNS, **BARE}
    floors = {name: f"bare {name.split(',')[0]}" for name in {**ONCE, **AGAIN, **TURNS}}
    route = Route("Verbs' own Python", floors)
    with runners(Alone(), **COMMON) as make:  # type: ignore[arg-type]
        runner = make(0, sys.executable, RUNNERS / "simulated_nic.py", SMALL)
        heard_of(runner)
        rounds(route, [_small(name, runner, case) for name, case in names.items()], [SMALL], count)
    for name, bare in ((name, bare) for name, bare in floors.items() if {name, bare} <= route.rows[SMALL].keys()):
        route.notes.append(f"{name}: our own part is {_over(route, name, bare):.1f} us")
    return route


def _over(route: Route, name: str, floor: str) -> float:
    """Microseconds that a transfer of 8 bytes takes longer: the median of the rounds."""
    row = route.rows[SMALL]
    each = zip(row[name].rounds, row[floor].rounds, strict=False)
    return statistics.median(statistics.median(mine) - statistics.median(its) for mine, its in each)


def _latency(route: Route, kind: str, name: str, case: str) -> list[str]:
    """Of 8 bytes: both parts of Python's, and whether anything else is in it. See the head of this file."""
    floor, bare, row = PEERS[kind], f"bare {kind}", route.rows.get(SMALL, {})
    if not {name, floor, bare, _below(case), _below(BARE[bare])} <= row.keys():
        return []
    rest = _over(route, _below(case), _below(BARE[bare]))  # both with the same looks at the clock
    ours, adapters = _over(route, name, bare) - rest, _over(route, bare, floor)
    return [
        f"{name}, 8 B: {ours:.1f} us are our own Python's, {adapters:.1f} us the adapter's",
        f"{name}, 8 B <= {floor} + 3 us + both of Python's parts: {'yes' if rest <= 3 else 'NO'} ({rest:+.1f} us)",
    ]


def _many(runner: Runner, kind: str, depth: int) -> Contender:
    case = kind if depth == 1 else f"{kind}_many"

    def times(size: int) -> list[float]:
        runner.tell(case, max(FEWEST, min(MOST, BATCH // (size * depth))), size)
        return [seconds / depth for seconds in heard(runner)]

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
    """The routes that are asked for."""
    found: dict[str, Callable[[], Route]] = {
        "host": lambda: one_host(args.sizes, args.rounds),
        "hosts": lambda: two_hosts(args.sizes, args.rounds),
        "own": lambda: own_part(args.rounds),
        "verbs": lambda: verbs([size for size in args.sizes if size in VERBS_SIZES], args.rounds),
    }
    return [found[name]() for name in args.only]


def main() -> None:
    """Measure, print, write."""
    args, others = _arguments(), Others()
    signal.signal(signal.SIGTERM, _stop)
    args.out.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    before = os.getloadavg()[0]
    try:
        routes = measure(args)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave processes behind
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
