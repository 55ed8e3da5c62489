"""GPU memory of processes, on a substitute of NVIDIA's management library: no GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry import gpu_memory
from monarch_backend._telemetry.gpu_memory import LIBRARY, of_processes
from monarch_backend._telemetry.programs import Process, Program
from monarch_backend._telemetry.rates import RateMeter

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="builds a library with cc")

# Two GPUs. This process uses 1 GiB of the first one and 2 GiB of the second one, which has 40 processes in all.
# The memory of process 7 is not known there. The structure and the names are those of nvml.h.
SUBSTITUTE = """
#include <stdlib.h>
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } nvmlProcessInfo_t;
static int open_count;
static int handles[2];
int nvmlInit_v2(void) { if (getenv("NO_GPU")) return 9; ++open_count; return 0; }
int nvmlShutdown(void) { --open_count; return 0; }
int substitute_open_count(void) { return open_count; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return open_count ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { *device = &handles[index]; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, nvmlProcessInfo_t* infos) {
  const unsigned there = device == &handles[0] ? 1 : 40, room = *count;
  *count = there;
  if (room < there) return 7;
  const unsigned long long used = device == &handles[0] ? 1ull << 30 : 2ull << 30;
  infos[0] = (nvmlProcessInfo_t){(unsigned)atoi(getenv("USER_OF_GPU")), used, 1, 1};
  for (unsigned i = 1; i < there; ++i) infos[i] = (nvmlProcessInfo_t){i == 1 ? 7 : 1u << 30, i == 1 ? ~0ull : 5, 1, 1};
  return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nvml") / LIBRARY
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", str(path), "-"], input=SUBSTITUTE, text=True, check=True)
    return path


def test_memory_of_a_process_is_the_sum_over_gpus(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_OF_GPU", "4711")
    assert of_processes(str(library)) == {4711: 3 << 30, 1 << 30: 5 * 38}
    loaded = gpu_memory._load(str(library))
    assert loaded is not None and loaded.substitute_open_count() == 0
    monkeypatch.setenv("NO_GPU", "1")
    assert of_processes(str(library)) is None


def test_memory_is_unknown_without_the_library(tmp_path: Path) -> None:
    assert of_processes(str(tmp_path / LIBRARY)) is None


def test_each_look_has_the_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "of_processes", lambda: {7: 1 << 30})
    process = Process(7, "program 7", "running", 0, 1.0, None, 1, 1.0, [])
    [program], _ = RateMeter(lambda: [Program(7, "train.py", [process])]).look()
    assert program.processes[0].gpu_memory == 1 << 30


PROGRAM = """
import os
from monarch_backend import cli
from monarch_backend._telemetry import recorder

recorder.area()
os.environ["USER_OF_GPU"] = str(os.getpid())
cli.main(["ps", str(os.getpid())])
cli.main(["ps", str(os.getpid()), "--json"])
cli.main(["top", str(os.getpid()), "--interval", "0.01", "--once"])
"""


@pytest.mark.skipif(not platform.HAS_MEMFD, reason="programs are found in /proc")
def test_ps_and_top_show_the_gpu_memory_of_a_process(library: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    first, _, rest = done.stdout.partition("\n")
    assert ", 3072 MiB of GPU memory, " in first
    text, _, table = rest[rest.index("[\n") :].rpartition("PROCESS ")
    [program] = json.loads(text)
    assert [each["gpu_memory"] for each in program["processes"]] == [3 << 30]
    assert table.split()[:10].index("GPU") > 0 and "3072 MiB" in table
