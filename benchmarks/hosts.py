"""Benchmark of two hosts, as network namespaces of one machine: calls between them, and detection of faults.

    python tools/peer_env.py torchmonarch       # once: the peer's own environment
    python benchmarks/hosts.py [--rounds N] [--faults N] [--limit SECONDS] [--out FILE]

Needs root, iproute2 and iperf3.

Calls: ours with and without TLS, torch.distributed.rpc, iperf3, a bare socket. Each round measures all of them. Figures
are medians over all rounds, with the median of the rounds' ratios to the floor. The floor is a bare socket for round
trips, and iperf3 for bandwidth.

Faults: they happen on host 1. The time ends when host 0 detects the fault. All systems have their default timeouts.
Ours are: a heartbeat each second, and a host counts as failed after three seconds without one.

the call raises          the controller waits for an endpoint's call, with ours and with torchmonarch
the rank raises          two ranks run an all_reduce every 50 ms, under `monarch-backend run` with backend="monarch" and
                         under torchrun with gloo; until the surviving rank raises
the launcher has ended   the same, until the launcher on host 0 has reported the failure and ended, without restarts
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _host_faults import absent, detect
from _host_runners import RUNNERS, Runner, daemon, runners

from tests.support.hosts import Hosts, hosts, refusal

MIB = 64
CALLS = 300


def iperf(where: Hosts, seconds: float = 1.0) -> float:
    command = [
        "nsenter",
        f"--net=/proc/{where.pids[0]}/ns/net",
        "iperf3",
        "-c",
        where.address(1),
        "-J",
        "-t",
        str(seconds),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8


def measure(where: Hosts, make: Callable[..., Runner], rounds: int) -> dict[str, dict[str, list[float]]]:
    there, python = where.address(1), sys.executable
    make(1, "iperf3", "-s")
    callers: dict[str, Runner] = {}
    for name, tls, port in (("ours, TLS", "1", 26601), ("ours, plain", "0", 26602)):
        daemon(make, f"{there}:{port}", tls)
        callers[name] = make(0, python, RUNNERS / "ours.py", f"{there}:{port}", MONARCH_TLS=tls)
    make(1, python, RUNNERS / "rpc.py", 1, where.address(0), 29400, TP_SOCKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="eth0")
    callers["torch rpc"] = make(
        0, python, RUNNERS / "rpc.py", 0, where.address(0), 29400, TP_SOCKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="eth0"
    )
    for name, port, *tls in ("bare socket", 29401), ("bare TLS socket", 29402, "tls"):
        make(1, python, RUNNERS / "floor.py", "listen", there, port, *tls).read_line()
        callers[name] = make(0, python, RUNNERS / "floor.py", "call", there, port, *tls)
    for caller in callers.values():
        caller.read_line()
    found: dict[str, dict[str, list[float]]] = {"round trip, us": {}, f"{MIB} MiB, GB/s": {}}
    for number in range(-1, rounds):  # round -1 is warm-up
        for name, caller in callers.items():
            times = caller.ask("call", CALLS, 0)
            sizes = caller.ask("call", 3, MIB << 20)
            if number >= 0:
                found["round trip, us"].setdefault(name, []).append(statistics.median(times) * 1e6)
                rate = (MIB << 20) / statistics.median(sizes) / 1e9
                found[f"{MIB} MiB, GB/s"].setdefault(name, []).append(rate)
        rate = iperf(where) / 1e9
        if number >= 0:
            found[f"{MIB} MiB, GB/s"].setdefault("iperf3", []).append(rate)
    return found


def rates(found: dict[str, dict[str, list[float]]]) -> list[str]:
    lines: list[str] = []
    for case, by_name in found.items():
        floor = by_name.get("iperf3") or by_name["bare socket"]
        lines += [f"| {case} | median | to the floor |", "| --- | ---: | ---: |"]
        for name, values in by_name.items():
            ratio = statistics.median(value / base for value, base in zip(values, floor, strict=True))
            lines.append(f"| {name} | {statistics.median(values):.2f} | {ratio:.2f} |")
        lines.append("")
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of calls; 0: none")
    parser.add_argument("--faults", type=int, default=3, help="rounds of each fault in each system; 0: none")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds within which a fault must be reported")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _stop(*_: object) -> None:
    sys.exit(143)


def main() -> None:
    args = _arguments()
    if why := refusal():
        raise SystemExit(why)
    signal.signal(signal.SIGTERM, _stop)
    lines = [f"{platform.machine()}, {os.cpu_count()} processors, Linux {platform.release()}", ""]
    with tempfile.NamedTemporaryFile("w") as secret:  # with permissions 600
        secret.write(os.urandom(32).hex())
        secret.flush()
        if args.rounds:
            with hosts(2) as where, runners(where, MONARCH_SECRET_FILE=secret.name) as make:
                lines += rates(measure(where, make, args.rounds))
        if args.faults:
            lines += detect(args.faults, args.limit, secret.name).tables()
            lines += ["", *(f"- {name}: {why}" for name, why in absent().items())]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
