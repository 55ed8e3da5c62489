"""Peers of collectives.py: requirements, how their ranks are started, and their settings.

The floors are one more peer here, with one rank; _floors.py has what they are.

How a peer's library is called is in _peer_collectives.py; what all ranks do is in _rank_main.py.
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

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
PREFIX = Path(sys.prefix)

# For every rank of every peer alike. Libraries that allocate scratch in a call (MPI's in-place reductions, Gloo) would
# pay the page faults of fresh memory every time: up to 4x at 64 MiB. Keeping freed memory shows them at their best.
# Buffers are NumPy's, and shall lie in pages like torch's own tensors: without madvise for huge pages.
# Nobody is pinned: torchrun pins nobody, MPI gains nothing by it here, and beside a busy neighbour it loses most.
COMMON = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "NUMPY_MADVISE_HUGEPAGE": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Peer:
    """One library. ``settings`` is for the reader, ``environment`` and ``launcher`` for its ranks."""

    name: str
    modules: Sequence[str]  # that must be importable
    install: str
    settings: Callable[[int], str]
    environment: Callable[[int, Path], dict[str, str]]
    launcher: Callable[[int], list[str]] | None = None  # None: one process forks the ranks
    files: Sequence[Path] = ()
    collectives: Sequence[str] = field(default=COLLECTIVES)

    def missing(self) -> str | None:
        """What there is not, or None."""
        lacks = [name for name in self.modules if find_spec(name) is None]
        lacks += [path.name for path in self.files if not path.exists()]
        return f"{', '.join(lacks)} not found; {self.install}" if lacks else None

    def command(self, ranks: int, folder: Path) -> list[str]:
        """The command line that starts all ranks."""
        worker = [sys.executable, str(Path(__file__).with_name("_rank_main.py")), self.name, str(ranks), str(folder)]
        return (self.launcher(ranks) if self.launcher else []) + worker


def _oversubscribed(ranks: int) -> bool:
    return ranks > len(os.sched_getaffinity(0))


def _openmpi_environment(_: int, folder: Path) -> dict[str, str]:
    return {
        "MPI4PY_MPIABI": "openmpi",
        "OPAL_PREFIX": str(PREFIX),  # the wheel's libraries remember another place
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
    # Not mpiexec: both MPIs' wheels write that file. prterun puts its own lib before LD_LIBRARY_PATH, where Intel's
    # libfabric may lie under the same name; hence env.
    lib = PREFIX / "lib"
    return [
        *(str(PREFIX / "bin/prterun"), "--personality", "ompi", "-n", str(ranks)),
        *("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        *("env", f"LD_LIBRARY_PATH={lib / 'openmpi'}:{lib}"),
    ]


def _openmpi_settings(_: int) -> str:
    # mpi_yield_when_idle=1 for 4 ranks on 2 cores was slower here by a fifth than leaving it to Open MPI.
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
        "MASTER_ADDR": "benchmark",  # these two only name its shared memory
        "MASTER_PORT": folder.parent.name,
        "TORCH_EXTENSIONS_DIR": str(cache),
        "PATH": f"{PREFIX / 'bin'}:{os.environ.get('PATH', '')}",  # ninja
    }


def deepspeed_segments(run: Path) -> list[Path]:
    """DeepSpeed's shared memory of this run, which it never unlinks."""
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
    ),
    Peer(
        "Intel MPI",
        ("mpi4py",),
        _MPI_HINT,
        _intel_settings,
        _intel_environment,
        lambda ranks: [str(PREFIX / "bin/mpiexec.hydra"), "-n", str(ranks)],
        files=(PREFIX / "bin/mpiexec.hydra", PREFIX / "lib/libmpi.so.12"),
    ),
    Peer(
        "DeepSpeed",
        ("deepspeed", "psutil", "hjson", "cpuinfo", "pydantic", "msgpack", "einops", "ninja"),
        "see the top of benchmarks/collectives.py",
        lambda _: "its shared-memory operator called directly, OMP_NUM_THREADS=1; it spins without yielding",
        _deepspeed_environment,
        collectives=("all_reduce",),
    ),
)
FLOORS = Peer("floors", ("torch",), "pip install torch", lambda _: "", lambda *_: {}, collectives=())
SIZED_FLOORS = ("copy", "add")
OTHER_FLOORS = ("dispatch (C++)", "dispatch (Python)", "spin")


def build_spin(folder: Path) -> str | None:
    """Compile _spin.c into the folder; a reason where that can't be."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "spin: no C compiler"
    source = Path(__file__).with_name("_spin.c")
    done = subprocess.run([compiler, "-O2", "-o", str(folder / "spin"), str(source)], capture_output=True, text=True)
    return f"spin: {done.stderr.strip()[-200:]}" if done.returncode else None
