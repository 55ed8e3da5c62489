"""Run a launcher as a user does, ours or torch's, and keep its output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

COMMANDS = {
    "monarch": [sys.executable, "-m", "monarch_backend", "run"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
PATIENCE = 50


@dataclass(frozen=True)
class Launched:
    """A launcher that has ended, and the directory that was its and its ranks'."""

    returncode: int
    stdout: str
    stderr: str
    directory: Path

    def reports(self) -> list[Any]:
        """What ranks wrote into report-RANK.json."""
        return [json.loads(path.read_text()) for path in sorted(self.directory.glob("report-*.json"))]

    def table(self) -> str:
        """The failures as the launcher lists them, without times, pids, hosts and directories."""
        text = self.stderr[self.stderr.rindex("ChildFailedError") :]
        text = re.sub(r"( time +: | host +: |\(pid: |PID ).*?(\)?)$", r"\1...\2", text, flags=re.MULTILINE)
        return re.sub(r"/\S*?/(attempt_\d+/\S+)", r"\1", text).replace("=", "").replace("-", "")


@contextlib.contextmanager
def launching(
    kind: str,
    *words: str,
    directory: Path,
    stdin: int | IO[str] = subprocess.DEVNULL,
    ignored: Sequence[signal.Signals] = (),
    **environment: str,
) -> Iterator[subprocess.Popen[str]]:
    """Run a launcher during the block, then kill it and its ranks. It inherits that signals are ``ignored``."""
    directory.mkdir(exist_ok=True)

    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    with subprocess.Popen(
        [*COMMANDS[kind], *words],
        cwd=directory,
        env=_environment({**environment, "TMPDIR": str(directory.parent)}),  # both leave a directory in there
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore if ignored else None,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=10)
                process.kill()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    here = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    paths = [more.get("PYTHONPATH"), str(Path(__file__).parents[2]), here.get("PYTHONPATH")]
    return {**here, **more, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def finish(process: subprocess.Popen[str], directory: Path) -> Launched:
    """Wait for its end."""
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return Launched(process.returncode, stdout, stderr, directory)


def launch(kind: str, *words: str, directory: Path, stdin: int | IO[str] = subprocess.DEVNULL, **env: str) -> Launched:
    """Run a launcher to its end."""
    with launching(kind, *words, directory=directory, stdin=stdin, **env) as process:
        return finish(process, directory)


def launch_both(*words: str, directory: Path, **options: Any) -> tuple[Launched, Launched]:
    """The same under ours and under torchrun, at the same time, in directories of their own."""
    ours, theirs = directory / "monarch", directory / "torchrun"
    with (
        launching("monarch", *words, directory=ours, **options) as one,
        launching("torchrun", *words, directory=theirs, **options) as other,
    ):
        return finish(one, ours), finish(other, theirs)


def until(happened: Callable[[], bool]) -> None:
    """Wait for what has no other sign than that it is there."""
    give_up = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """True when the process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
