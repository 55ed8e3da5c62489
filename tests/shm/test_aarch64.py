"""The shared-memory core on aarch64: cross-compiled, and run by qemu's user emulation on other machines.

The stress driver runs random operations there. The reduction kernels must give the same bits as on x86-64. qemu does
not emulate process_vm_readv, so the core works without it, as on systems that forbid it.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SHM = CSRC / "shm"
CORE = sorted(source for part in ("shm", "platform", "telemetry") for source in (CSRC / part).glob("*.cpp"))
STRESS = sorted([*(SHM / "stress").glob("*.cpp"), *(CSRC / "stress").glob("*.cpp")])
SUMS = SHM / "kernels" / "sums.cpp"

# The flags of setup.py, plus -Werror.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
WRAPS = "-Wl,--wrap=mmap,--wrap=munmap,--wrap=process_vm_readv"  # csrc/stress/ranks.h, csrc/shm/stress/fixture.h
COMPILERS = {"aarch64": "aarch64-linux-gnu-g++", "x86_64": "g++"}
QEMU = "qemu-aarch64-static"

here = platform.machine()
wanted = [COMPILERS["aarch64"], QEMU] if here != "aarch64" else ["g++"]
absent = [tool for tool in wanted if not shutil.which(tool)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(
        bool(absent), reason=f"no {' and no '.join(absent)}: apt-get install g++-aarch64-linux-gnu qemu-user-static"
    ),
]


def _call(command: Sequence[object], timeout: float) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    text = (done.stdout + done.stderr)[-20_000:]
    assert done.returncode == 0, f"{' '.join(words)}\nended with {done.returncode}:\n{text}"
    return done.stdout


@functools.cache
def _build(machine: str) -> Path:
    """Build both programs for this machine from the current sources, and return their folder."""
    folder = ROOT / "build" / "programs" / machine
    compiler = "g++" if machine == here else COMPILERS[machine]
    newest = max(path.stat().st_mtime for suffix in ("h", "inc") for path in CSRC.rglob(f"*.{suffix}"))
    newest = max(newest, Path(__file__).stat().st_mtime)

    def make(source: Path) -> Path:
        target = folder / source.relative_to(CSRC).with_suffix(".o")
        if not target.exists() or target.stat().st_mtime <= max(newest, source.stat().st_mtime):
            target.parent.mkdir(parents=True, exist_ok=True)
            _call([compiler, *FLAGS, "-I", ROOT / "csrc", "-c", source, "-o", target], 300)
        return target

    with ThreadPoolExecutor(2) as workers:
        objects = dict(zip([*CORE, *STRESS, SUMS], workers.map(make, [*CORE, *STRESS, SUMS]), strict=True))
    core = [objects[source] for source in CORE]
    stress = [objects[source] for source in STRESS]
    _call([compiler, "-static", "-pthread", *core, *stress, WRAPS, "-o", folder / "stress_driver"], 120)
    _call([compiler, "-static", *core, objects[SUMS], "-o", folder / "sums"], 120)
    return folder


def _run(machine: str, program: str, *arguments: object, timeout: float = 400) -> str:
    emulator = [] if machine == here else [QEMU]
    return _call([*emulator, _build(machine) / program, *arguments], timeout)


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_random_operations(ranks: str) -> None:
    print(_run("aarch64", "stress_driver", ranks, 1, 8, 100))  # enough rounds to cover every algorithm


@pytest.mark.skipif(here not in COMPILERS or not shutil.which("g++"), reason="nothing to compare with")
def test_kernels_compute_the_same_on_every_processor() -> None:
    base = _run(here, "sums", "base")
    assert len(base.splitlines()) > 200
    assert len({line.rpartition(" ")[2] for line in base.splitlines()}) > 100  # the sums differ
    if here == "x86_64":
        assert _run("aarch64", "sums", "base").splitlines() == base.splitlines()
        flags = Path("/proc/cpuinfo").read_text().split()
        if "avx2" in flags:
            assert _run(here, "sums", "avx2").splitlines() == base.splitlines()
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags):
            halves = [line for line in base.splitlines() if line.startswith(("bfloat16", "float16"))]
            assert _run(here, "sums", "avx512").splitlines() == halves
