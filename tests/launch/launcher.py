"""Run a launcher, torchrun or `monarch-backend run`, as a user does, and keep its output."""

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
    """Output and exit status of an ended launcher, and the working directory of the launcher and its ranks."""

    returncode: int
    stdout: str
    stderr: str
    directory: Path

    def reports(self) -> list[Any]:
        """Return the contents of the files report-RANK.json that the ranks have written."""
        return [json.loads(path.read_text()) for path in sorted(self.directory.glob("report-*.json"))]

    def table(self) -> str:
        """Return the launcher's list of failures, without times, pids, hosts, directories and minus signs."""
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
    """Run a launcher during the block, then kill it and its ranks.

    The launcher inherits ``ignored`` signals as ignored.
    """
    directory.mkdir(exist_ok=True)

    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    with subprocess.Popen(
        [*COMMANDS[kind], *words],
        cwd=directory,
        # both launchers leave a directory in TMPDIR
        env=_environment({**environment, "TMPDIR": str(directory.parent)}),
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
    """Wait for the launcher's end."""
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return Launched(process.returncode, stdout, stderr, directory)


def launch(kind: str, *words: str, directory: Path, stdin: int | IO[str] = subprocess.DEVNULL, **env: str) -> Launched:
    """Run a launcher to its end."""
    with launching(kind, *words, directory=directory, stdin=stdin, **env) as process:
        return finish(process, directory)


def launch_both(*words: str, directory: Path, **options: Any) -> tuple[Launched, Launched]:
    """Run the same script under `monarch-backend run` and torchrun, at the same time, in two directories."""
    ours, theirs = directory / "monarch", directory / "torchrun"
    with (
        launching("monarch", *words, directory=ours, **options) as one,
        launching("torchrun", *words, directory=theirs, **options) as other,
    ):
        return finish(one, ours), finish(other, theirs)


def until(happened: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    give_up = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)


def open_files(pid: int | str, folder: Path) -> list[str]:
    """Return the files below a folder that a process has open, as sorted relative paths. It needs /proc."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            path = Path(os.readlink(each))
            if path.is_relative_to(folder):
                found.append(str(path.relative_to(folder)))
    return sorted(found)


def gone(pid: int) -> bool:
    """Return whether the process has ended. A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
