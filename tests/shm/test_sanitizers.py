"""The shared-memory core under AddressSanitizer with UBSan and under ThreadSanitizer: `make test-sanitizers`.

Two ways in: the driver in csrc/shm/stress/ plays random operations without Python, and tests of the process group run
again with the extension compiled for a sanitizer. Both are built in build/sanitizers/ from the sources as they are;
the package's own extension is left alone. Where the compiler has no such runtime the tests skip and say so.

A failure prints its seed; `build/sanitizers/thread/stress threads SEED 1 TURNS` plays that round again.
ThreadSanitizer does not know atomic_thread_fence. The core's two (Bell::ring, Group::ring) order a store before a load
and publish no data, so it need not: the counters' release and acquire are what it checks. What a missing fence would
cost, a bell that nobody hears, is a hang here, and the model checker's part.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitizers"
SHM = ROOT / "csrc" / "shm"
COMPILER = os.environ.get("CXX", "g++")

# As setup.py has them, but for -O1 and what the sanitizers ask for. vptr wants type information that the visibility
# hides.
FLAGS = ["-std=c++20", "-O1", "-g", "-fPIC", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fvisibility=hidden"]
KINDS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread", "-Wno-tsan"],  # tsan: "atomic_thread_fence is not supported", see above
}
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}

# libtorch is not instrumented: ThreadSanitizer does not see the reference counts by which Gloo's threads and ours agree
# who frees a work last, and takes the free for a race. Nothing of csrc/ is ever called from these functions.
SUPPRESSIONS = "race:c10d::ProcessGroupGloo\n"

PROBE = """
#include <thread>
int main() { int x = 0; std::thread t([&x] { x = 1; }); t.join(); return x - 1; }
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the shared-memory core is Linux's"),
]


# Building -------------------------------------------------------------------------------------------------------------


def _call(command: Sequence[object], timeout: float, **env: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=os.environ | env, check=False
    )


def _checked(command: Sequence[object], timeout: float, **env: str) -> str:
    done = _call(command, timeout, **env)
    text = (done.stdout + done.stderr)[-20_000:]
    assert done.returncode == 0, f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{text}"
    return text


def _prefix(kind: str) -> list[str]:
    """What to put before a command line for it to run under this sanitizer; skips where nothing helps."""
    if not shutil.which(COMPILER):
        pytest.skip(f"no compiler {COMPILER}")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text(PROBE)
        built = _call([COMPILER, *FLAGS, *KINDS[kind], source, "-o", program], 60)
        if built.returncode:
            pytest.skip(f"{COMPILER} has no {kind} sanitizer: {built.stderr.strip().splitlines()[-1]}")
        # Some kernels scatter memory more widely than older runtimes can follow ("unexpected memory mapping").
        ran = _call([program], 60)
        if ran.returncode == 0:
            return []
        fixed = ["setarch", "-R"]
        if shutil.which(fixed[0]) and _call([*fixed, program], 60).returncode == 0:
            return fixed
    pytest.skip(f"the {kind} sanitizer does not start here: {(ran.stderr.strip() or 'no message').splitlines()[0]}")


def _compile(kind: str, sources: Sequence[Path], headers: float) -> list[Path]:
    """The objects of these sources; only what is older than its source or than any header is made again."""
    import pybind11

    include = ["-I", ROOT / "csrc", "-I", pybind11.get_include(), "-I", sysconfig.get_path("include")]
    objects = [BUILD / kind / "objects" / source.relative_to(ROOT / "csrc").with_suffix(".o") for source in sources]

    def make(source: Path, target: Path) -> None:
        if target.exists() and target.stat().st_mtime > max(headers, source.stat().st_mtime):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        _checked([COMPILER, *FLAGS, *KINDS[kind], *include, "-c", source, "-o", target], 300)

    with ThreadPoolExecutor(2) as workers:
        list(workers.map(make, sources, objects))
    return objects


def _build(kind: str) -> tuple[Path, Path]:
    """(the stress driver, the extension)."""
    headers = max(path.stat().st_mtime for suffix in ("h", "inc") for path in (ROOT / "csrc").rglob(f"*.{suffix}"))
    headers = max(headers, Path(__file__).stat().st_mtime)
    core = sorted(SHM.glob("*.cpp"))
    binding = [*sorted((SHM / "python").glob("*.cpp")), *sorted((ROOT / "csrc").glob("*.cpp"))]  # the slowest first
    stress = sorted((SHM / "stress").glob("*.cpp"))
    objects = _compile(kind, [*binding, *core, *stress], headers)
    bound, rest = objects[: len(binding)], objects[len(binding) :]
    driver, extension = BUILD / kind / "stress", BUILD / kind / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    # The wraps let ranks that are threads share one mapping of an arena: csrc/shm/stress/world.h.
    wraps = "-Wl,--wrap=mmap,--wrap=munmap,--wrap=process_vm_readv"
    _checked([COMPILER, *KINDS[kind], *rest, wraps, "-pthread", "-o", driver], 120)
    shared = [*bound, *rest[: len(core)]]
    _checked([COMPILER, *KINDS[kind], "-shared", *shared, "-pthread", "-o", extension], 120)
    return driver, extension


@pytest.fixture(scope="module")
def built() -> Any:
    """``built(kind)``: (prefix of the command line, the stress driver, the extension)."""
    made: dict[str, tuple[list[str], Path, Path]] = {}

    def get(kind: str) -> tuple[list[str], Path, Path]:
        if kind not in made:
            made[kind] = (_prefix(kind), *_build(kind))
        return made[kind]

    return get


# The driver -----------------------------------------------------------------------------------------------------------

# Every round ends in one of four or five ways by its seed: that many rounds have each of them twice or more.
RUNS = [("address", "processes", 15, 200), ("address", "threads", 8, 200), ("thread", "threads", 8, 150)]


@pytest.mark.parametrize(("kind", "ranks", "rounds", "turns"), RUNS)
def test_random_operations(built: Any, kind: str, ranks: str, rounds: int, turns: int) -> None:
    prefix, driver, _ = built(kind)
    seed = os.environ.get("MONARCH_STRESS_SEED", "1")
    options = {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    print(_checked([*prefix, driver, ranks, seed, rounds, turns], 400, **options))


# From Python ----------------------------------------------------------------------------------------------------------


def _preload(kind: str) -> str:
    # The C++ library beside it: the sanitizer looks for its __cxa_throw before torch has loaded it.
    names = [RUNTIMES[kind], "libstdc++.so.6"]
    paths = [_call([COMPILER, f"-print-file-name={name}"], 60).stdout.strip() for name in names]
    if not all(os.path.isabs(path) for path in paths):
        pytest.skip(f"{COMPILER} has no {' and '.join(names)} to load into Python")
    return " ".join(paths)


def test_python_with_address_sanitizer(built: Any) -> None:
    prefix, _, extension = built("address")
    chosen = (
        "mixed or disagree or a_late_rank or name_the_dead or forked_children or (matrix and 2 and (reduce or to_all))"
    )
    command = [sys.executable, "-m", __name__, extension, "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/process_group/test_shm.py", "-k", chosen]
    # Python keeps what it has till its end: leaks are the driver's to find.
    env = {"LD_PRELOAD": _preload("address"), "ASAN_OPTIONS": "detect_leaks=0"}
    assert " passed" in _checked([*prefix, *command], 400, **env)


def test_python_with_thread_sanitizer(built: Any, tmp_path: Path) -> None:
    """Ranks started one by one: ThreadSanitizer gives up in a fork of a process that had threads, as torch has."""
    prefix, _, extension = built("thread")
    suppressions = tmp_path / "suppressions"
    suppressions.write_text(SUPPRESSIONS)
    env = {"LD_PRELOAD": _preload("thread"), "TSAN_OPTIONS": f"suppressions={suppressions}", "MONARCH_SHM": "1"}
    command = [*prefix, sys.executable, "-m", __name__, extension, "rank"]
    with ThreadPoolExecutor(3) as ranks:
        running = [
            ranks.submit(_checked, [*command, rank, 3, f"file://{tmp_path}/store"], 300, **env) for rank in range(3)
        ]
    for rank, done in enumerate(running):
        text = done.result()
        assert f"rank {rank} is through" in text, text
        assert "WARNING: ThreadSanitizer" not in text, text


def _import_from(extension: str) -> None:
    """From now on monarch_backend._native is this file."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> Any:
            return (
                importlib.util.spec_from_file_location(name, extension) if name == "monarch_backend._native" else None
            )

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    from monarch_backend import _native

    assert _native.__file__ == extension


def _play_rank(rank: int, size: int, address: str) -> None:
    import torch.distributed as dist

    from tests.process_group import test_shm
    from tests.support.ranks import init

    init(rank, size, address)
    for seed in range(2):
        test_shm._mixed(rank, seed)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} is through", flush=True)


if __name__ == "__main__":
    _import_from(sys.argv[1])
    if sys.argv[2] == "pytest":
        sys.exit(pytest.main(sys.argv[3:]))
    _play_rank(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
