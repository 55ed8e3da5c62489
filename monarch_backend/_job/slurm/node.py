"""Program on each node of a SlurmJob: runs a host, and writes its address to the job's folder.

A small parent process waits for the daemon. If the daemon is killed, the parent writes the reason to the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from monarch_backend._core.addresses import address_towards, is_loopback, numeric_address
from monarch_backend._core.launcher_environment import OF_A_RANK
from monarch_backend._transport.network.auth import read_secret, write_private

NOTICE_SIGNAL = signal.SIGURG
"""Signal before the end of the time limit. Slurm sends it to all processes of a node, and most ignore this one."""

_FIRST_SIGTERM = signal.SIGUSR2

ENDED_POLL_INTERVAL_S = 1.0
"""Seconds between two looks of a node for the end of its host by `SlurmJob.resize`."""


class Report(msgspec.Struct):
    """What a node tells: where its host listens, in which start of the job, and how it has ended. ``ended``: "" before.

    ``start`` is "JOB.RESTARTS". It tells reports of a job that was requeued since then.
    """

    start: str
    node: str
    address: str = ""
    log: str = ""
    ended: str = ""


def report_path(folder: Path, mesh: str, index: int) -> Path:
    return folder / f"{mesh}.{index}.json"


def read_reports(folder: Path) -> dict[tuple[str, int], Report]:
    """Return the reports in a folder by mesh and index. Listing the folder makes NFS look for new files."""
    found: dict[tuple[str, int], Report] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        if match := re.fullmatch(r"(\w+)\.(\d+)\.json", name):
            try:
                found[match[1], int(match[2])] = msgspec.json.decode((folder / name).read_bytes(), type=Report)
            except (OSError, msgspec.DecodeError):
                continue  # it is being replaced or removed
    return found


def ended_path(folder: Path, number: str | int) -> Path:
    """Return the file with the hosts that a Slurm job keeps after a resize: by mesh, the first index that has ended.

    Its name has the number, because another job may use the folder later.
    """
    return folder / f"ended-{number}.json"


def _is_ended(path: Path, mesh: str, index: int) -> bool:
    try:
        return index >= msgspec.json.decode(path.read_bytes(), type=dict[str, int])[mesh]
    except (OSError, msgspec.DecodeError, KeyError):
        return False


def start_of(variables: Mapping[str, str]) -> str:
    """Return the name of this start of the job. All components of a heterogeneous job have that of the first one."""
    number = variables.get("SLURM_HET_JOB_ID") or variables["SLURM_JOB_ID"]
    return f"{number}.{variables.get('SLURM_RESTART_COUNT', 0)}"


def place(meshes: str, position: int) -> tuple[str, int]:
    """Return mesh and index of the host at a position. ``meshes`` has a range of indices for each mesh.

    >>> place("trainers=2:4,loaders=0:1", 1)
    ('trainers', 3)
    """
    for part in meshes.split(","):
        mesh, start, stop = re.split("[=:]", part)
        if position < int(stop) - int(start):
            return mesh, int(start) + position
        position -= int(stop) - int(start)
    raise ValueError(f"{meshes} has no host {position}")


def address_of(template: str, node: str, launcher: str) -> str:
    """Return the address to listen on, HOST:PORT. ``template``: such as "{node}-ib:0".

    A node's name that resolves to a loopback address is replaced by the address on the way to ``launcher``, the address
    of the node that has started this one.
    """
    host, _, port = template.rpartition(":")
    if host == "{node}" and (is_loopback(numeric_address(node)) or numeric_address(node) == node):
        host = address_towards(launcher) or launcher or node
    else:
        host = host.replace("{node}", node)
        host = numeric_address(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the host of this task until it ends, and return its exit code."""
    parser = argparse.ArgumentParser(prog="monarch_backend._job.slurm.node")
    for name in ("--folder", "--secret-file"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--meshes", "--listen"):
        parser.add_argument(name, required=True)
    parser.add_argument("--tether", type=float)
    parser.add_argument("--notice", type=float, default=0.0)
    args = parser.parse_args(argv)
    mesh, index = place(args.meshes, int(os.environ["SLURM_PROCID"]))
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    report = Report(start_of(os.environ), node, log=str(args.folder / f"{mesh}.{index}.log"))
    path = report_path(args.folder, mesh, index)
    ended = ended_path(args.folder, report.start.partition(".")[0])
    if _is_ended(ended, mesh, index):  # the job was requeued, and has all of its nodes again
        print(f"{mesh}[{index}] was ended by a resize, and does not start again", flush=True)
        return 0
    launcher = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    for name in [name for name in os.environ if OF_A_RANK.fullmatch(name)]:
        del os.environ[name]

    def write() -> None:
        write_private(path, msgspec.json.encode(report))

    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _run_host(args, report, address_of(args.listen, node, launcher), write)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    threading.Thread(target=_end_after_resize, args=(ended, mesh, index, child), daemon=True).start()
    code = _wait(child, has_notice=args.notice > 0)
    report.ended = f"its daemon has ended with {code}" if code >= 0 else f"its daemon was killed by signal {-code}"
    current = read_reports(args.folder).get((mesh, index))
    # A node that was lost may end its host after another node has started it again.
    if path.parent.is_dir() and (current is None or current.start == report.start):
        write()
    return 0


def _end_after_resize(path: Path, mesh: str, index: int, child: int) -> None:
    """End the host when a resize has ended it. Where Slurm takes its node from the job, Slurm does that earlier."""
    while not _is_ended(path, mesh, index):
        time.sleep(ENDED_POLL_INTERVAL_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGINT)  # with a notice, SIGTERM would only begin it


def _run_host(args: argparse.Namespace, report: Report, address: str, write: Callable[[], None]) -> int:
    from monarch_backend._hosts.daemon import serve

    log = os.open(report.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def ready(host: str, port: int) -> None:
        report.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        write()

    try:
        serve(
            f"tcp://{address}", secret=read_secret(args.secret_file), on_ready=ready, tether=args.tether,
            notice=args.notice, notice_signals={NOTICE_SIGNAL: NOTICE_SIGNAL.name, _FIRST_SIGTERM: "SIGTERM"},
            ignores_sigterm=args.notice > 0,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        print(f"the host of node {report.node} can't listen on {address}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _wait(child: int, *, has_notice: bool) -> int:
    """Wait for the daemon's end, pass on signals, and return its exit code; that of a signal is negative.

    Slurm sends SIGTERM to this process only, or to the daemon as well. So a daemon with a notice ignores SIGTERM, and
    gets `_FIRST_SIGTERM` for the first one, which begins the notice, and SIGINT for another one, which ends it.
    """
    terminations = [_FIRST_SIGTERM] if has_notice else []

    def forward(number: int, _: object) -> None:
        if number == signal.SIGTERM and has_notice:
            number = terminations.pop() if terminations else signal.SIGINT
        os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT, NOTICE_SIGNAL):
        signal.signal(number, forward)
    _, status = os.waitpid(child, 0)  # PEP 475: it goes on after a signal
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
