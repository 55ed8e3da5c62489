"""Smoke test of an installed package: collectives, an actor, a DTensor and the doctor, with an exit status of 0 or 1.

    python smoke_test.py                  # with torch
    python smoke_test.py --without-torch  # the parts of the core that need no torch

The file needs nothing but the package. Each check runs in its own process, and prints one line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIMEOUT_S = float(os.environ.get("SMOKE_TIMEOUT_S", "180"))
"""Of one check. An emulated processor needs more."""

COLLECTIVE = """
import torch, torch.distributed as dist
dist.init_process_group(backend="monarch")
x = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(x)
assert x.eq(3).all() and dist.get_backend() == "monarch", (x, dist.get_backend())
dist.destroy_process_group()
"""

ACTOR = """
import os
from monarch_backend.actor import Actor, endpoint, this_host

class Adder(Actor):
    @endpoint
    def add(self, a, b):
        return a + b, os.getpid()

procs = this_host().spawn_procs({"ranks": 2})
sums = [value for _, value in procs.spawn("adder", Adder).add.call(40, 2).get().items()]
assert [total for total, _ in sums] == [42, 42], sums
assert len({os.getpid(), *(pid for _, pid in sums)}) == 3, sums
procs.stop().get()
"""

DTENSOR = """
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from monarch_backend.actor import this_host

procs = this_host().spawn_procs({"dp": 2})
try:
    mesh = procs.device_mesh("cpu")
except ImportError as error:
    # A controller of DTensors needs torch 2.11 or newer; with an older one it must say so.
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert release < (2, 11) and "needs torch 2.11" in str(error), error
    print("refused with torch", torch.__version__)
else:
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    loss = (x @ x.t()).square().mean().item()
    assert loss == 1215.0, loss
procs.stop().get()
"""

CORE = """
import sys
from monarch_backend import _native

assert _native.__file__.startswith(sys.prefix), _native.__file__
assert isinstance(_native.cpu_features(), list)
words = bytearray(624 * 8)
assert _native.skip_mt19937(words, 1, 624) >= 1
features = _native.kernel_features()
assert features["futex"], features
assert _native.boot_id()
one, other = _native.Host(1 << 20), _native.Host(1 << 20)
assert one.connect(other.token)
del one, other
if sys.platform == "linux":
    assert features["memfd_create"], features
    from monarch_backend._hosts.daemon import Daemon
    daemon = Daemon(bytes(32))
    daemon.start("127.0.0.1", 0)
    daemon.close()
assert "torch" not in sys.modules
"""


def _python(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", *arguments]


def checks(folder: Path, with_torch: bool) -> dict[str, list[str]]:
    """The command of each check, by its name. Scripts are written to the folder."""
    command = "monarch_backend.cli"
    found = {"core": _python("-c", CORE), "version": _python("-m", command, "--version")}
    if not with_torch:
        return found
    script = folder / "collective.py"
    script.write_text(COLLECTIVE)
    torchrun = _python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    return {
        **found,
        "doctor": _python("-m", command, "doctor"),
        "all_reduce on 2 ranks": torchrun,
        "actor call": _python("-c", ACTOR),
        "DTensor of a controller": _python("-c", DTENSOR),
    }


def main() -> int:
    """Run every check; the exit status is 1 if one failed."""
    failed = 0
    env = dict(os.environ, OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        for name, command in checks(Path(folder), "--without-torch" not in sys.argv[1:]).items():
            began = time.monotonic()
            try:
                done = subprocess.run(
                    command, cwd=folder, env=env, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
                )
                code, text = done.returncode, done.stdout + done.stderr
            except subprocess.TimeoutExpired as error:
                code, text = -1, f"no end after {error.timeout:.0f} s"
            note = text.strip() if text.startswith("refused") else ""
            print(f"{'ok' if code == 0 else 'FAILED'}  {name}  {time.monotonic() - began:.1f} s  {note}", flush=True)
            if code:
                failed += 1
                print(text[-4000:], flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
