"""Builds of csrc/ with a sanitizer: stress drivers and the extension, in build/sanitizers/.

The package's own extension is not touched. If the compiler has no such sanitizer or the kernel does not support it, the
test skips with a reason.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitizers"
CSRC = ROOT / "csrc"
COMPILER = os.environ.get("CXX", "g++")

# The flags of setup.py, with -O1 and the sanitizers' own flags. vptr needs type information that -fvisibility=hidden
# hides.
FLAGS = ["-std=c++20", "-O1", "-g", "-fPIC", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fvisibility=hidden"]
KINDS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"],
    "thread": [
        "-fsanitize=thread",
        "-Wno-tsan",
    ],  # tsan: "atomic_thread_fence is not supported", see test_sanitizers.py
}
# Added for the portable core, as in setup.py.
PORTABLE = ["-DMONARCH_PORTABLE=1", "-include", "platform/linux_names.h"]
NEVER_SEEN = 4  # exit status of a driver that found no error but never reached one of the cases
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1", "UBSAN_OPTIONS": "print_stacktrace=1"}

# pytest for an extension with AddressSanitizer, without pytest's watchdog. The watchdog is a thread that starts with
# each test. GCC 12's allocator does not handle its locks at a fork, so a rank forked while that thread allocates hangs.
PYTEST = ["pytest", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]

# The wraps let ranks that are threads share one mapping of an arena: csrc/stress/ranks.h.
WRAPS = {"shm": "-Wl,--wrap=mmap,--wrap=munmap,--wrap=process_vm_readv", "channel": "-Wl,--wrap=mmap,--wrap=munmap"}

PROBE = """
#include <thread>
int main() { int x = 0; std::thread t([&x] { x = 1; }); t.join(); return x - 1; }
"""


def call(command: Sequence[object], timeout: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's root."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=os.environ | env, check=False
    )


def checked(command: Sequence[object], timeout: float, **env: str) -> str:
    """Run a command and return its output. Fail with the output if the exit status is not 0."""
    done = call(command, timeout, **env)
    text = (done.stdout + done.stderr)[-20_000:]
    assert done.returncode == 0, f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{text}"
    return text


@functools.cache
def prefix(kind: str) -> list[str]:
    """Return the command prefix under which this sanitizer works here. Skip if there is none."""
    if not shutil.which(COMPILER):
        pytest.skip(f"no compiler {COMPILER}")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text(PROBE)
        built = call([COMPILER, *FLAGS, *KINDS[kind], source, "-o", program], 60)
        if built.returncode:
            pytest.skip(f"{COMPILER} has no {kind} sanitizer: {built.stderr.strip().splitlines()[-1]}")
        # Some kernels randomise addresses more than older sanitizers support ("unexpected memory mapping").
        ran = call([program], 60)
        if ran.returncode == 0:
            return []
        fixed = ["setarch", "-R"]
        if shutil.which(fixed[0]) and call([*fixed, program], 60).returncode == 0:
            return fixed
    pytest.skip(f"the {kind} sanitizer does not start here: {(ran.stderr.strip() or 'no message').splitlines()[0]}")


def preload(kind: str) -> str:
    """Return LD_PRELOAD for Python.

    It includes the C++ library, because the sanitizer needs its __cxa_throw before torch loads it.
    """
    names = [RUNTIMES[kind], "libstdc++.so.6"]
    paths = [call([COMPILER, f"-print-file-name={name}"], 60).stdout.strip() for name in names]
    if not all(os.path.isabs(path) for path in paths):
        pytest.skip(f"{COMPILER} has no {' and '.join(names)} to load into Python")
    return " ".join(paths)


def _newest_header() -> float:
    headers = max(path.stat().st_mtime for suffix in ("h", "inc") for path in CSRC.rglob(f"*.{suffix}"))
    return max(headers, Path(__file__).stat().st_mtime)


def _folder(kind: str, portable: bool) -> Path:
    return BUILD / (f"{kind}-portable" if portable else kind)


def _compile(kind: str, sources: Sequence[Path], portable: bool = False) -> list[Path]:
    """Compile these sources and return the objects. An object newer than its source and all headers is kept."""
    import pybind11

    headers = _newest_header()
    include = ["-I", CSRC, "-I", pybind11.get_include(), "-I", sysconfig.get_path("include")]
    flags = [*FLAGS, *KINDS[kind], *(PORTABLE if portable else [])]
    objects = [_folder(kind, portable) / "objects" / source.relative_to(CSRC).with_suffix(".o") for source in sources]

    def make(source: Path, target: Path) -> None:
        if target.exists() and target.stat().st_mtime > max(headers, source.stat().st_mtime):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        checked([COMPILER, *flags, *include, "-c", source, "-o", target], 300)

    with ThreadPoolExecutor(2) as workers:
        list(workers.map(make, sources, objects))
    return objects


def _sources(*folders: str) -> list[Path]:
    return [source for folder in folders for source in sorted((CSRC / folder).glob("*.cpp"))]


@functools.cache
def driver(kind: str, name: str, portable: bool = False) -> Path:
    """Build the stress driver of csrc/``name``/stress. ``name`` is "shm" or "channel"."""
    folders = [
        "stress",
        "platform",
        "telemetry",
        "shm",
        *{"shm": ["shm/stress"], "channel": ["channel", "channel/stress"]}[name],
    ]
    target = _folder(kind, portable) / f"{name}_stress"
    objects = _compile(kind, _sources(*folders), portable)
    checked([COMPILER, *KINDS[kind], *objects, WRAPS[name], "-pthread", "-o", target], 120)
    return target


@functools.cache
def memory_driver(kind: str, portable: bool = False) -> Path:
    """Build the stress driver of csrc/memory/stress."""
    target = _folder(kind, portable) / "memory_stress"
    objects = _compile(kind, _sources("platform", "telemetry", "shm", "memory", "memory/stress"), portable)
    checked([COMPILER, *KINDS[kind], *objects, "-pthread", "-ldl", "-o", target], 120)
    return target


def stress(name: str, kind: str, ranks: str, rounds: int, size: int, runs: int = 1, portable: bool = False) -> str:
    """Run the driver and return its output. MONARCH_STRESS_SEED replaces the first seed, which is 1.

    Some cases depend on the scheduler. A case that one run has missed must occur in another one of the ``runs``.
    """
    first = int(os.environ.get("MONARCH_STRESS_SEED", "1"))
    missing: set[str] | None = None
    for seed in range(first, first + runs * rounds, rounds):
        done = call([*prefix(kind), driver(kind, name, portable), ranks, seed, rounds, size], 400, **OPTIONS)
        text = (done.stdout + done.stderr)[-20_000:]
        assert done.returncode in (0, NEVER_SEEN), f"from seed {seed}, ended with {done.returncode}:\n{text}"
        if done.returncode == 0:
            return text
        found = set(re.findall(r"^never (?:seen|taken): (.*)$", text, re.MULTILINE)[-1].split(", "))
        missing = found if missing is None else missing & found
        if not missing:
            return text
    raise AssertionError(f"{runs} runs have never met {missing}; the last one:\n{text}")


@functools.cache
def extension(kind: str) -> Path:
    """Build monarch_backend._native."""
    folders = [
        "shm/python",
        "channel/python",
        "memory/python",
        "verbs",
        "verbs/python",
        "",
        "records",
        "shm",
        "memory",
        "channel",
        "platform",
    ]  # the slowest first
    sources = _sources(*folders)
    target = BUILD / kind / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    checked([COMPILER, *KINDS[kind], "-shared", *_compile(kind, sources), "-pthread", "-o", target], 120)
    return target
