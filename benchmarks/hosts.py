"""Two hosts, as network namespaces of one machine: ours with and without TLS, torch.distributed.rpc, iperf3, a socket.

    python benchmarks/hosts.py [--rounds N] [--out FILE]        needs root, iproute2 and iperf3

Each case goes round all of them, round after round; figures are medians over all rounds, in brackets the median of the
rounds' ratios to the floor: a bare socket for round trips, iperf3 for bandwidth. Detection is from the fault until the
error is raised in the controller, with the default bounds (a heartbeat each second, lost after three).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.hosts import Hosts, hosts, refusal

STATIONS = Path(__file__).parent / "host_stations"
MIB = 64
CALLS = 300


class Station:
    """A process in a host that times calls when it is told to."""

    def __init__(self, where: Hosts, host: int, *command: Any, **env: str) -> None:
        self.process = subprocess.Popen(
            ["nsenter", f"--net=/proc/{where.pids[host]}/ns/net", *map(str, command)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **env}, start_new_session=True,
        )  # fmt: skip

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} has ended")
        return line

    def ask(self, *case: Any) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        times: list[float] = json.loads(self.hear())
        return times

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def stations(where: Hosts, secret: str) -> Iterator[Callable[..., Station]]:
    made: list[Station] = []

    def make(host: int, *command: Any, **env: str) -> Station:
        made.append(Station(where, host, *command, MONARCH_SECRET_FILE=secret, MONARCH_HOST_NAME=f"host{host}", **env))
        return made[-1]

    try:
        yield make
    finally:
        for station in reversed(made):
            station.close()


def daemon(make: Callable[..., Station], address: str, tls: str) -> Station:
    made = make(1, sys.executable, "-m", "monarch_backend", "up", "--address", address, MONARCH_TLS=tls)
    made.hear()
    return made


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


def measure(where: Hosts, make: Callable[..., Station], rounds: int) -> dict[str, dict[str, list[float]]]:
    there, python = where.address(1), sys.executable
    make(1, "iperf3", "-s")
    callers: dict[str, Station] = {}
    for name, tls, port in (("ours, TLS", "1", 26601), ("ours, plain", "0", 26602)):
        daemon(make, f"{there}:{port}", tls)
        callers[name] = make(0, python, STATIONS / "ours.py", f"{there}:{port}", MONARCH_TLS=tls)
    make(1, python, STATIONS / "rpc.py", 1, where.address(0), 29400, TP_SOCKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="eth0")
    callers["torch rpc"] = make(
        0, python, STATIONS / "rpc.py", 0, where.address(0), 29400, TP_SOCKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="eth0"
    )
    make(1, python, STATIONS / "floor.py", "listen", there, 29401).hear()
    callers["bare socket"] = make(0, python, STATIONS / "floor.py", "call", there, 29401)
    for caller in callers.values():
        caller.hear()
    found: dict[str, dict[str, list[float]]] = {"round trip, us": {}, f"{MIB} MiB, GB/s": {}}
    for number in range(-1, rounds):  # the first one warms up
        for name, caller in callers.items():
            times = caller.ask("call", CALLS, 0)
            sizes = caller.ask("call", 3, MIB << 20) if name != "bare socket" else []
            if number >= 0:
                found["round trip, us"].setdefault(name, []).append(statistics.median(times) * 1e6)
                if sizes:
                    rate = (MIB << 20) / statistics.median(sizes) / 1e9
                    found[f"{MIB} MiB, GB/s"].setdefault(name, []).append(rate)
        rate = iperf(where) / 1e9
        if number >= 0:
            found[f"{MIB} MiB, GB/s"].setdefault("iperf3", []).append(rate)
    return found


def detect(
    where: Hosts, make: Callable[..., Station], port: int, fault: Callable[[Station, int], None]
) -> tuple[float, str]:
    """Seconds from a fault until the controller's call raises."""
    up = daemon(make, f"{where.address(1)}:{port}", "1")
    caller = make(0, sys.executable, STATIONS / "ours.py", f"{where.address(1)}:{port}", MONARCH_TLS="1")
    pid = int(caller.hear())
    assert caller.process.stdin is not None
    caller.process.stdin.write(json.dumps(["death", 0, 0]) + "\n")
    caller.process.stdin.flush()
    caller.hear()
    time.sleep(1.5)  # between two heartbeats, as ever
    begun = time.time()
    fault(up, pid)
    end, text = json.loads(caller.hear())
    return end - begun, str(text)


def faults(where: Hosts) -> dict[str, Callable[[Station, int], None]]:
    def kill(_: Station, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_host(up: Station, _: int) -> None:
        os.kill(up.process.pid, signal.SIGKILL)

    def cut(_: Station, __: int) -> None:
        subprocess.run(
            ["nsenter", f"--net=/proc/{where.pids[1]}/ns/net", "ip", "link", "set", "eth0", "down"], check=True
        )

    return {"worker killed": kill, "host's processes killed": kill_host, "network cut": cut}


def table(found: dict[str, dict[str, list[float]]], detected: dict[str, tuple[list[float], str]]) -> str:
    lines = [f"{platform.machine()}, {os.cpu_count()} processors, Linux {platform.release()}", ""]
    for case, by_name in found.items():
        floor = by_name.get("iperf3") or by_name["bare socket"]
        lines += [f"| {case} | median | to the floor |", "| --- | ---: | ---: |"]
        for name, values in by_name.items():
            ratio = statistics.median(value / base for value, base in zip(values, floor, strict=True))
            lines.append(f"| {name} | {statistics.median(values):.2f} | {ratio:.2f} |")
        lines.append("")
    lines += ["| fault | seconds until the error | what it says |", "| --- | --- | --- |"]
    for name, (times, text) in detected.items():
        lines.append(f"| {name} | {', '.join(f'{t:.3f}' for t in times)} | {text} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if why := refusal():
        raise SystemExit(why)
    detected: dict[str, tuple[list[float], str]] = {}
    with tempfile.NamedTemporaryFile("w") as secret:  # mode 600
        secret.write(os.urandom(32).hex())
        secret.flush()
        with hosts(2) as where, stations(where, secret.name) as make:
            found = measure(where, make, args.rounds)
        for name in ("worker killed", "host's processes killed", "network cut"):
            for _ in range(3):
                with hosts(2) as where, stations(where, secret.name) as make:
                    seconds, text = detect(where, make, 26603, faults(where)[name])
                    detected.setdefault(name, ([], text))[0].append(seconds)
    text = table(found, detected)
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
