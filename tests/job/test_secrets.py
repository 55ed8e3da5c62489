"""Secrets of jobs: each connection uses one, and the memory of a job's processes has none."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._transport.network.auth import new_secret
from monarch_backend.actor import this_host
from monarch_backend.hosts import attach_to_workers
from monarch_backend.job import ProcessJob
from tests.job.memory_scan import Scanner, found_in, needles
from tests.job.support import MARK, Where, in_program, new_mark


@contextlib.contextmanager
def host(environment: dict[str, str], mark: str) -> Iterator[str]:
    """Run a host during the block. Yield its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "monarch_backend.cli", "up", "--address", "127.0.0.1:0"],
        env={**os.environ, **environment, MARK: mark}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            assert process.wait(30) == 0


def scan(mesh: Any, secrets: list[bytes]) -> tuple[list[str], list[str]]:
    """Return where a worker of the mesh finds a secret, and where it finds a control value that it was given."""
    procs = mesh.spawn_procs({"gpus": 1})
    scanner, control = procs.spawn("scanner", Scanner), os.urandom(32)
    scanner.keep.call_one(control[::-1]).get(60)
    found = scanner.scan.call_one([needle for secret in secrets for needle in needles(secret)]).get(60)
    kept = scanner.scan.call_one(needles(control)).get(60)
    procs.stop().get(30)
    return found, kept


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and glibc's heap")
def test_scanner_that_reads_memory_it_has_freed_does_not_find_its_copies() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )

    def program() -> list[str]:
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: everything is on the heap
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: which keeps its size
        blocks = [libc.malloc(1 << 20) for _ in range(65)]
        for block in blocks:
            ctypes.memset(block, 1, 1 << 20)
        for block in blocks[:-1]:
            libc.free(block)
        patterns = needles(os.urandom(32))
        message = bytes(1000) + b"".join(patterns)  # large enough for the heap
        return found_in(patterns) if message else []

    assert in_program(program) == []


@pytest.mark.slow
@pytest.mark.parametrize("given", [pytest.param("variable", marks=pytest.mark.slow), "file"])
def test_worker_of_a_job_has_no_secret_in_variables_or_memory(given: str, tmp_path: Path) -> None:
    own, other = new_secret(), new_secret()
    variables = {"MONARCH_SECRET": own.hex()}
    if given == "file":
        path = tmp_path / "secrets"
        path.touch(0o600)
        path.write_text(f"{own.hex()}\n{other.hex()}\n")
        variables = {"MONARCH_SECRET_FILE": str(path)}

    def program(address: str) -> list[tuple[list[str], list[str]]]:
        os.environ.update(variables)
        found = []
        # attach with the other job's secret first: later processes inherit what its agent leaves in the fork server
        if given == "file":
            attach_to_workers([address], secret=other)
        found.append(scan(attach_to_workers([address], secret=own), [own, other]))
        found.append(scan(this_host(), [own, other]))
        return found

    with new_mark() as mark, host(variables, mark) as address:
        for found, control in in_program(program, address):
            assert found == []
            assert control != []


def refusals(address: str, state: str) -> list[str]:
    """Return the errors of a program without a secret and with another one."""
    os.environ["XDG_STATE_HOME"] = state
    texts = []
    for secret in (None, new_secret()):
        with pytest.raises(ConnectionError) as caught:
            attach_to_workers([address], secret=secret)
        texts.append(str(caught.value))
        assert secret is None or secret.hex() not in texts[-1]
    return texts


def test_missing_and_wrong_secret_have_different_errors(tmp_path: Path) -> None:
    with new_mark() as mark, host({"MONARCH_SECRET": new_secret().hex()}, mark) as address:
        missing, wrong = in_program(refusals, address, str(tmp_path))
    assert "it does not know this secret" in missing and "it does not know this secret" in wrong
    assert "no secret of the job is given: set MONARCH_SECRET_FILE, MONARCH_SECRET or secret=" in missing
    assert wrong.endswith("(the secret is that of secret=)")


def two_jobs(folder: Path, mark: str) -> None:
    """Run two jobs with different secrets at the same time. One is killed and started again."""
    one, other = (ProcessJob({"t": 1}, path=folder / f"{name}.json", env={MARK: mark}) for name in ("one", "other"))
    with contextlib.ExitStack() as ends:
        meshes = []
        for job in (one, other):
            job.apply()
            ends.callback(job.kill)
            meshes.append(job.state(timeout=60).t.spawn_procs({"gpus": 1}).spawn("where", Where))
        assert one.path.with_suffix(".secret").read_text() != other.path.with_suffix(".secret").read_text()
        here = os.uname().nodename
        # Calls between the jobs, in both directions. Neither host has the other's secret.
        assert meshes[0].next_name.call_one(meshes[1]).get(30) == here
        assert meshes[1].next_name.call_one(meshes[0]).get(30) == here
        meshes[0].stop().get(30)
        one.kill()
        one.apply()
        again = one.state(timeout=60).t.spawn_procs({"gpus": 1}).spawn("where", Where)
        assert again.next_name.call_one(meshes[1]).get(30) == here
        for mesh in (again, meshes[1]):
            mesh.stop().get(30)


@pytest.mark.slow
def test_two_jobs_in_one_program_reach_each_other_and_one_is_restarted(tmp_path: Path) -> None:
    with new_mark() as mark:
        in_program(two_jobs, tmp_path, mark, timeout=120)
