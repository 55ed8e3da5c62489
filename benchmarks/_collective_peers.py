"""Peers of collectives.py: requirements, start commands and settings.

The floors count as one more peer, with one rank. _floors.py defines them. _peer_collectives.py has the calls of each
peer's library, and _rank_main.py the code of the ranks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

COLLECTIVES = ("all_reduce", "all_reduce_bf16", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
OF_MPI = tuple(what for what in COLLECTIVES if what != "all_reduce_bf16")  # which has no sum of bfloat16
PREFIX = Path(sys.prefix)

# Environment of all ranks of all peers. Libraries that allocate scratch memory in a call (MPI's in-place reductions,
# Gloo) would otherwise have page faults in each call, which take up to 4x the time at 64 MiB. With these settings the
# allocator keeps freed memory. Buffers are NumPy's. They get the same pages as torch's tensors: no madvise for huge
# pages. Ranks are not pinned: torchrun does not pin, and pinning does not make MPI faster here. With another busy
# process on the machine, pinned MPI loses most.
COMMON = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "NUMPY_MADVISE_HUGEPAGE": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Peer:
    """One library. The report prints ``settings``; ``environment`` and ``launcher`` start its ranks."""

    name: str
    modules: Sequence[str]  # must be importable
    install: str
    settings: Callable[[int], str]
    environment: Callable[[int, Path], dict[str, str]]
    launcher: Callable[[int], list[str]] | None = None  # None: one process forks the ranks
    files: Sequence[Path] = ()
    collectives: Sequence[str] = field(default=COLLECTIVES)

    def missing(self) -> str | None:
        """Return what is missing and how to install it, or None."""
        lacks = [name for name in self.modules if find_spec(name) is None]
        lacks += [path.name for path in self.files if not path.exists()]
        return f"{', '.join(lacks)} not found; {self.install}" if lacks else None

    def command(self, ranks: int, folder: Path) -> list[str]:
        """Return the command line that starts all ranks."""
        worker = [sys.executable, str(Path(__file__).with_name("_rank_main.py")), self.name, str(ranks), str(folder)]
        return (self.launcher(ranks) if self.launcher else []) + worker


def _oversubscribed(ranks: int) -> bool:
    return ranks > len(os.sched_getaffinity(0))


def _openmpi_environment(_: int, folder: Path) -> dict[str, str]:
    return {
        "MPI4PY_MPIABI": "openmpi",
        "OPAL_PREFIX": str(PREFIX),  # the wheel's libraries have another prefix compiled in
        "PRTE_PREFIX": str(PREFIX),
        "PMIX_PREFIX": str(PREFIX),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_MCA_btl_sm_backing_directory": str(folder),
        "TMPDIR": str(folder),
    }


def _openmpi_launcher(ranks: int) -> list[str]:
    # Do not use mpiexec: the wheels of both MPIs install a file of that name. prterun puts its own lib folder before
    # LD_LIBRARY_PATH, and Intel's libfabric may be there under the same name. So env sets LD_LIBRARY_PATH again.
    lib = PREFIX / "lib"
    return [
        *(str(PREFIX / "bin/prterun"), "--personality", "ompi", "-n", str(ranks)),
        *("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        *("env", f"LD_LIBRARY_PATH={lib / 'openmpi'}:{lib}"),
    ]


def _openmpi_settings(_: int) -> str:
    # With 4 ranks on 2 cores, mpi_yield_when_idle=1 was a fifth slower here than Open MPI's default.
    return "pml ob1, btl self,sm (faster here than its default at 64 MiB), :OVERSUBSCRIBE, not bound"


def _intel_environment(ranks: int, folder: Path) -> dict[str, str]:
    settings = {
        "MPI4PY_MPIABI": "impi",
        "I_MPI_ROOT": str(PREFIX),
        "LD_LIBRARY_PATH": str(PREFIX / "lib"),
        "I_MPI_FABRICS": "shm",
        "I_MPI_PIN": "0",
        "I_MPI_ADJUST_ALLREDUCE": f"8:{1 << 21}-{(1 << 31) - 1}",
        "TMPDIR": str(folder),
    }
    if _oversubscribed(ranks):
        settings["I_MPI_WAIT_MODE"] = "1"
    return settings


def _intel_settings(ranks: int) -> str:
    waits = ", I_MPI_WAIT_MODE=1" if _oversubscribed(ranks) else ""
    return f"I_MPI_FABRICS=shm, all-reduce algorithm 8 from 2 MiB (the default is slower here), not pinned{waits}"


def _deepspeed_environment(ranks: int, folder: Path) -> dict[str, str]:
    cache = Path(__file__).parents[1] / "build" / "torch_extensions"
    return {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "benchmark",  # these two only determine the name of its shared memory
        "MASTER_PORT": folder.parent.name,
        "TORCH_EXTENSIONS_DIR": str(cache),
        "PATH": f"{PREFIX / 'bin'}:{os.environ.get('PATH', '')}",  # DeepSpeed calls ninja
    }


def deepspeed_segments(run: Path) -> list[Path]:
    """Return DeepSpeed's shared-memory files of this run. DeepSpeed does not unlink them."""
    return list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{run.name}_*"))


_MPI_HINT = "pip install 'monarch_backend[bench]'"
PEERS = (
    Peer(
        "monarch",
        ("torch", "monarch_backend"),
        "pip install .",
        lambda _: "dist.*, MONARCH_SHM=1",
        lambda *_: {"MONARCH_SHM": "1"},
    ),
    Peer("gloo", ("torch",), "pip install torch", lambda _: "dist.*, torch's defaults, loopback", lambda *_: {}),
    Peer(
        "OpenMPI",
        ("mpi4py",),
        _MPI_HINT,
        _openmpi_settings,
        _openmpi_environment,
        _openmpi_launcher,
        files=(PREFIX / "bin/prterun", PREFIX / "lib/libmpi.so.40"),
        collectives=OF_MPI,
    ),
    Peer(
        "Intel MPI",
        ("mpi4py",),
        _MPI_HINT,
        _intel_settings,
        _intel_environment,
        lambda ranks: [str(PREFIX / "bin/mpiexec.hydra"), "-n", str(ranks)],
        files=(PREFIX / "bin/mpiexec.hydra", PREFIX / "lib/libmpi.so.12"),
        collectives=OF_MPI,
    ),
    Peer(
        "DeepSpeed",
        ("deepspeed", "psutil", "hjson", "cpuinfo", "pydantic", "msgpack", "einops", "ninja"),
        "see the top of benchmarks/collectives.py",
        lambda _: "its shared-memory operator called directly, OMP_NUM_THREADS=1; it spins without yielding",
        _deepspeed_environment,
        collectives=("all_reduce", "all_reduce_bf16"),
    ),
)
FAKE = Peer("no communication", ("torch",), "pip install torch", lambda _: "torch's fake backend", lambda *_: {})
FLOORS = Peer("floors", ("torch",), "pip install torch", lambda _: "", lambda *_: {}, collectives=())
SIZED_FLOORS = ("copy", "add")
OTHER_FLOORS = ("dispatch (C++)", "dispatch (Python)", "spin")


def build_spin(folder: Path) -> str | None:
    """Compile _spin.c into the folder. Return None, or the reason why it failed."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "spin: no C compiler"
    source = Path(__file__).with_name("_spin.c")
    done = subprocess.run([compiler, "-O2", "-o", str(folder / "spin"), str(source)], capture_output=True, text=True)
    return f"spin: {done.stderr.strip()[-200:]}" if done.returncode else None
