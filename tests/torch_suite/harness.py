"""Harness of torch's suite in pytest: the list of tests, and a server process that runs them.

It reads the names from torch's file without importing it, starts and stops server.py, and turns its replies into
outcomes. test_distributed.py and skips.py decide which outcomes are accepted.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ranks import KEPT_FDS, KEPT_PIDS
from tests.torch_suite.server import suite_path

ROOT = Path(__file__).parents[2]
# Timeout in seconds for the ranks of one test. The longest test takes 2 s on two cores; torch's own limit is 300 s.
HANG = 60.0
# The server ends a hung test by itself. If no reply arrives for this much longer, the server hangs, too.
SILENCE = 60.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test: "passed", "skipped" or "failed", with the reason and the output."""

    status: str
    why: str
    output: str = ""


def test_names() -> list[str]:
    """Return the names of the suite's tests as unittest sees them, in the file's order."""
    tree = ast.parse(suite_path().read_text())
    suite = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "DistributedTest")
    base = next(n for n in suite.body if isinstance(n, ast.ClassDef) and n.name == "_DistTestBase")
    methods = [n for n in base.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    # If the file defines a name twice, the class has one method of that name.
    return list(dict.fromkeys(method.name + suffix for method in methods for suffix in _suffixes(method)))


def _suffixes(method: ast.FunctionDef) -> list[str]:
    """Return the suffixes that torch's @parametrize appends, such as "_size_2_flag_True".

    The lowest decorator comes first.
    """
    axes = []
    calls = [d for d in method.decorator_list if isinstance(d, ast.Call)]
    for call in reversed(calls):
        if ast.unparse(call.func) == "parametrize":
            argument, values = (ast.literal_eval(a) for a in call.args)
            axes.append([f"_{argument}_{value}" for value in values])
    return ["".join(combination) for combination in itertools.product(*axes)]


class Suite:
    """The suite for one backend, loaded in a process of its own. Each test runs once, and its outcome is cached."""

    def __init__(self, backend: str, world_size: int = 2, hang: float = HANG) -> None:
        self.backend = backend
        self.outcomes: dict[str, Outcome] = {}
        self._silence = hang + SILENCE
        self._folder = tempfile.TemporaryDirectory(prefix="monarch-suite-")
        for name in ("tmp", "barrier", "test_dir", "init_dir"):
            os.mkdir(f"{self._folder.name}/{name}")
        self._log = Path(self._folder.name, "log")
        self._connection, theirs = multiprocessing.Pipe()
        arguments = [str(theirs.fileno()), backend, str(world_size), str(hang)]
        with theirs, self._log.open("ab") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.torch_suite.server", *arguments],
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        KEPT_PIDS.add(self._server.pid)
        KEPT_FDS.add(self._connection.fileno())
        self.names: list[str] = self._receive()

    def _environment(self) -> dict[str, str]:
        # One thread per rank: two ranks on a small machine would otherwise compete for the cores.
        # No GPU: torch skips the whole suite on a machine with a GPU, and these tests are about the CPU route.
        # Warnings stay warnings in the ranks, as in torch's own runs. The filter "error" is for our tests in pytest.
        chosen = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "default"}
        # The suite reads these variables. Values from a launcher or another test are not meant for it.
        dropped = ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "MONARCH_DEBUG")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        # The suite leaves files behind, so it gets a folder that is deleted.
        return {**kept, **chosen, "TMPDIR": f"{self._folder.name}/tmp", "TEMP_DIR": self._folder.name}

    def _receive(self) -> Any:
        with contextlib.suppress(EOFError, ConnectionError):
            if self._connection.poll(self._silence):
                return self._connection.recv()
            self._server.send_signal(signal.SIGUSR1)  # makes the server print its stacks
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)
        output = self.output()
        self.close()
        raise AssertionError(f"the server of torch's suite for {self.backend} hung or died; its output:\n{output}")

    def run(self, name: str) -> Outcome:
        """Return the outcome of one test. Run the test unless it ran before."""
        if name not in self.outcomes:
            found = self._run(name)
            # torch's profiler ends the process on a machine that delays its start ("insufficient time for warmup").
            # This has nothing to do with a backend, so the test runs again.
            died_in_the_profiler = found.status == "failed" and "libkineto::" in found.output
            self.outcomes[name] = self._run(name) if died_in_the_profiler else found
        return self.outcomes[name]

    def _run(self, name: str) -> Outcome:
        self._connection.send(name)
        status, why = self._receive()
        return Outcome(status, why, self.output() if status == "failed" else "")

    def output(self) -> str:
        """Return the end of the running test's output."""
        return self._log.read_text(errors="replace")[-20_000:]

    def close(self) -> None:
        """End the server and its remaining ranks. They have no state to save."""
        if self._connection.closed:
            return
        KEPT_FDS.discard(self._connection.fileno())
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        KEPT_PIDS.discard(self._server.pid)
        self._folder.cleanup()
