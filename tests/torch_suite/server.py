"""Server process that has loaded torch's suite and runs one test of it at a time, on forked ranks.

harness.py starts it as ``python -m tests.torch_suite.server FD BACKEND WORLD_SIZE HANG``. The suite changes its process
(environment, logging, seeds), and these changes must not reach pytest's. This module loads the suite, forks and joins
ranks, and reports outcomes. It does not judge them.

Torch's own harness spawns the ranks, which imports torch once per rank and test (20 s on two cores). Forked ranks share
the import. The server itself never computes, so it has no threads that a fork would lose.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import time
import types
import unittest
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.torch_suite import substitutions

_STACKS = signal.SIGUSR1


def suite_path() -> Path:
    """Return the path of the suite's file in this release of torch."""
    import torch

    return Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"


def load(backend: str, world_size: str) -> types.ModuleType:
    """Load torch's distributed_test.py as a module, for "monarch" with the substitutions, else unchanged."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=world_size)
    os.environ["INIT_METHOD"] = f"file://{os.environ['TEMP_DIR']}/init_dir/shared_init_file"
    source = suite_path().read_text()
    module = types.ModuleType("distributed_test")
    module.__file__ = str(suite_path())
    if backend == "monarch":
        from torch.testing._internal.common_distributed import DistTestCases

        # This registers the backend's name before the ranks are forked, also if our entry points are not installed.
        import monarch_backend.process_group  # noqa: F401

        for feature in substitutions.FEATURES:
            DistTestCases.backend_feature[feature].add(backend)
        source = substitutions.apply(source)
        vars(module).update(substitutions.NAMES)
    # unittest, dataclasses and typing look up the suite's module by its name.
    sys.modules[module.__name__] = module
    # dont_inherit: DDP compares the annotations of hooks with classes. Our __future__ import would make them strings.
    exec(compile(source, module.__file__, "exec", dont_inherit=True), vars(module))
    return module


def case(module: types.ModuleType, hang: float) -> type[unittest.TestCase]:
    """Return the suite as a TestCase whose ranks are forked and get ``hang`` seconds for a test."""

    class Forked(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            faulthandler.register(_STACKS, all_threads=True)
            super()._run(*args, **kwargs)

        def _join_processes(self, fn: Callable[..., Any]) -> None:
            """Join as torch does, without polling. A hung rank prints its stacks even if it holds the GIL."""
            started = time.monotonic()
            try:
                late = _join(self.processes, started + hang, self.TEST_ERROR_EXIT_CODE)
                if late:
                    raise RuntimeError(f"ranks {late} did not end within {hang:g} s; stacks in the output")
                self._check_return_codes(fn, time.monotonic() - started)
                # Torch checks only the first rank's exit code.
                codes = [p.exitcode for p in self.processes]
                if len(set(codes)) > 1 and fn not in self.skip_return_code_checks:
                    raise RuntimeError(f"the ranks ended differently: exit codes {codes}")
            finally:
                for pipe in self.pid_to_pipe.values():
                    pipe.close()

    return Forked


def _join(processes: list[Any], deadline: float, failure: int) -> list[int]:
    """Wait for the ranks and leave none behind. Return the ranks that had to be killed at the deadline.

    If one rank has failed, the others may wait for it without end. They are killed and do not count as late.
    """
    running = {p.sentinel: p for p in processes}
    while running and not any(p.exitcode == failure for p in processes):
        ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for sentinel in ready:
            running.pop(sentinel).join()  # type: ignore[arg-type]
    late = [] if any(p.exitcode == failure for p in processes) else list(running.values())
    for process in late:
        os.kill(process.pid, _STACKS)
        time.sleep(0.5)  # time for one rank after the other to print its stacks; the test has failed already
    for process in processes:
        process.kill()
        process.join()
    return [rank for rank, process in enumerate(processes) if process in late]


def run(test: unittest.TestCase) -> tuple[str, str]:
    """Run a test. Return "passed", "skipped" or "failed", and the reason."""
    result = unittest.TestResult()
    test.run(result)
    problems = [*result.failures, *result.errors]
    if problems:
        return "failed", "\n".join(text for _, text in problems)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return ("passed", "") if result.testsRun == 1 else ("failed", "unittest ran nothing")


def _serve(connection: Connection, backend: str, world_size: str, hang: str) -> None:
    forked = case(load(backend, world_size), float(hang))
    forked.setUpClass()
    connection.send(unittest.TestLoader().getTestCaseNames(forked))
    pytest = os.getppid()
    while True:
        # Other children of pytest hold copies of its end of the pipe, so the pipe may stay open after pytest has ended.
        while not connection.poll(2.0):
            if os.getppid() != pytest:
                return
        name = connection.recv()
        # stderr is a file in append mode. After this it has only the output of the test that runs.
        os.truncate(sys.stderr.fileno(), 0)
        connection.send(run(forked(name)))


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(_STACKS, all_threads=True)
    # Torch's harness logs the events of a rank at this level.
    logging.basicConfig(level=logging.INFO)
    os.set_inheritable(int(sys.argv[1]), False)
    _serve(Connection(int(sys.argv[1])), *sys.argv[2:])
