"""Ranks of one peer in collectives.py: start them, send requests, collect answers, stop them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from _collective_peers import COMMON, Peer

START_SECONDS = 300.0  # DeepSpeed compiles its operator at the first start
ANSWER_SECONDS = 120.0


class PeerFailed(Exception):
    """A peer failed. The run continues without it."""


class RankSet:
    """All ranks of a peer. As a context manager, it ends all of their processes."""

    def __init__(self, peer: Peer, ranks: int, run: Path) -> None:
        self.peer, self.pids = peer, list[int]()
        self._expected = 1 if peer.name == "floors" else ranks
        self._lines: list[Any] = []
        self._links: list[socket.socket] = []
        self._folder = run / peer.name.lower().replace(" ", "-")
        self._folder.mkdir()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._folder / "orders"))
        self._listener.listen(ranks)
        self._log = (self._folder / "log").open("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            peer.command(ranks, self._folder),
            env={**os.environ, **COMMON, **peer.environment(ranks, self._folder)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C must reach only the driver, which then ends all ranks
        )

    def __enter__(self) -> RankSet:
        return self

    @property
    def folder(self) -> Path:
        """Folder of this peer's files."""
        return self._folder

    def wait_connected(self) -> None:
        """Wait until all ranks have connected."""
        deadline, came = time.monotonic() + START_SECONDS, {}
        self._listener.settimeout(0.2)
        while len(came) < self._expected:
            if self._process.poll() is not None:
                raise PeerFailed(f"ended at start:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise PeerFailed(f"not started after {START_SECONDS:g} s:\n{self._tail()}")
            with contextlib.suppress(TimeoutError):
                link = self._listener.accept()[0]
                link.settimeout(ANSWER_SECONDS)
                self._links.append(link)
                lines = link.makefile("r", encoding="utf-8")
                hello = json.loads(lines.readline() or "{}")
                if hello:
                    came[hello["rank"]] = (link, lines)
                    self.pids.append(hello["pid"])
        self._links = [came[rank][0] for rank in sorted(came)]
        self._lines = [came[rank][1] for rank in sorted(came)]

    def ask(self, *order: Any) -> list[Any]:
        """Send a request to all ranks. Return their answers in the order of ranks."""
        line = json.dumps(order).encode() + b"\n"
        try:
            for link in self._links:
                link.sendall(line)
            answers = [json.loads(lines.readline() or '{"error": "the rank ended"}') for lines in self._lines]
        except OSError as error:
            raise PeerFailed(f"{order}: {error}\n{self._tail()}") from None
        wrong = [f"rank {rank}: {answer['error'][:300]}" for rank, answer in enumerate(answers) if "error" in answer]
        if wrong:
            raise PeerFailed(f"{order}: {'; '.join(wrong)}\n{self._tail()}")
        return [answer["value"] for answer in answers]

    def cpu_seconds(self) -> float:
        """Return the CPU time of all ranks so far."""
        total = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def _tail(self) -> str:
        self._log.seek(0)
        return "".join(f"    {line}\n" for line in self._log.read().splitlines()[-12:])

    def __exit__(self, *error: object) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):
                if error[0] is None:
                    link.sendall(b'["end"]\n')
                link.shutdown(socket.SHUT_WR)
        # Launchers forward SIGTERM to their ranks. Ranks that still run get SIGKILL, before their launcher does.
        for wait, deadly in ((10.0 if error[0] is None else 1.0, signal.SIGTERM), (3.0, signal.SIGKILL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait)
            if self._process.poll() is not None and not any(map(_alive, self.pids)):
                break
            for pid in self.pids:
                if _alive(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, deadly)
            if self._process.poll() is None:
                self._process.send_signal(deadly)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        for file in (*self._links, *self._lines, self._listener, self._log):
            file.close()


def _alive(pid: int) -> bool:
    """Return whether the pid still belongs to a rank and has not been reused."""
    try:
        return b"_rank_main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
