"""Virtual environments with frameworks that use torch.distributed, for `make test-clients`.

    python tools/clients_env.py accelerate ignite         # installs what is not there yet
    python tools/clients_env.py accelerate ignite --test  # and runs their tests

They have the packages of the environment that runs this, torch and this checkout among them. So pip fetches only the
frameworks and their own requirements. Versions are in tests/clients/constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from portable_env import ROOT, make_environment

PINS = ROOT / "tests" / "clients" / "constraints.txt"
CLIENTS = {
    "accelerate": ["accelerate"],
    "deepspeed": ["deepspeed"],
    "ignite": ["pytorch-ignite"],
    "intel_mpi": ["impi-rt"],
    "lightning": ["lightning"],
    "models": ["transformers", "peft"],
    "mpich": ["mpich"],
    "open_mpi": ["openmpi"],
    "ray": ["ray[train]"],
    "ray_client": ["ray[client]"],
    "ray_job": ["ray"],
    "ray_resize": ["ray"],
    "skypilot": ["skypilot"],
    "torchmetrics": ["torchmetrics"],
    "torchtitan": ["torchtitan", "triton"],  # its models import triton
    "torchx": ["torchx"],
    "transformers": ["transformers", "accelerate"],
}
"""What pip installs for each client."""

JOB_CLIENTS = ("skypilot", "torchx")
"""Clients with an environment of their own: they need older releases of click and urllib3 than Ray does."""

MPI_CLIENTS = ("intel_mpi", "mpich", "open_mpi")
"""Clients with an environment each, because their programs have the same names. They have the same tests."""

BUILD_ENV = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
"""DeepSpeed is built from source: for the CPU, and without its C++ operators, which it compiles at their first use."""


def install(folder: Path, clients: list[str]) -> None:
    """Install the clients that are not in the environment yet."""
    stamp = folder / "clients.json"
    recipe = {"pins": PINS.read_text(), "python": sys.version, "prefix": sys.prefix}
    state = json.loads(stamp.read_text()) if stamp.exists() else {}
    if state.get("recipe") != recipe:
        make_environment(folder)
        state = {"recipe": recipe, "installed": []}
    missing = sorted({client for client in clients if CLIENTS[client]} - set(state["installed"]))
    if not missing:
        return
    requirements = sorted({requirement for client in missing for requirement in CLIENTS[client]})
    print(f"clients_env: {' '.join(requirements)} in {folder}", file=sys.stderr, flush=True)
    # Isolated builds would each install another torch.
    command = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--no-build-isolation"]
    command += ["-c", ROOT / "constraints.txt", "-c", PINS, *requirements]
    subprocess.run(command, check=True, env={**os.environ, **BUILD_ENV})
    state["installed"] += missing
    stamp.write_text(json.dumps(state))


def environments(clients: list[str]) -> dict[Path, list[str]]:
    """Return the folder of each environment, with the clients that it needs."""
    groups: dict[Path, list[str]] = {}
    for client in clients:
        own = f"clients-{client}" if client in MPI_CLIENTS else "clients-jobs" if client in JOB_CLIENTS else "clients"
        groups.setdefault(ROOT / ".envs" / own, []).append(client)
    return groups


def test(folder: Path, clients: list[str]) -> int:
    """Run the tests of the clients in their environment and return pytest's exit status."""
    names = ["mpi" if client in MPI_CLIENTS else client for client in clients]
    files = [str(ROOT / "tests" / "clients" / f"test_{name}.py") for name in names]
    return subprocess.run([folder / "bin" / "python", "-m", "pytest", "--durations=0", *files], cwd=ROOT).returncode


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("clients", nargs="+", choices=list(CLIENTS), metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--test", action="store_true", help="run the tests of these clients")
    args = parser.parse_args()
    groups = environments(args.clients)
    for folder, clients in groups.items():
        install(folder, clients)
    return max(abs(test(folder, clients)) for folder, clients in groups.items()) if args.test else 0


if __name__ == "__main__":
    sys.exit(main())
