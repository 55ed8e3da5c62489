"""Packages for another Python or processor, installed in a folder by the pip and the compiler of this machine."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement

from tools.torch_env import Environment, call
from tools.wheels.build import WORK
from tools.wheels.targets import Target
from tools.wheels.toolchain import zig


def foreign_pip(target: Target, packages: Path) -> list[str]:
    """Return the command of this machine's pip that installs for another Python in a folder."""
    digits = target.python.replace(".", "")
    machine = target.platform.machine
    platforms = [f"--platform=manylinux_2_{glibc}_{machine}" for glibc in range(28, 16, -1)]
    platforms.append(f"--platform=manylinux2014_{machine}")
    abis = [f"--abi={abi}" for abi in (f"cp{digits}", "abi3", "none")]
    options = ["--implementation=cp", f"--python-version={target.version}", *platforms, *abis]
    # The wheel's tag says which Python it is for; pip would compare its own with Requires-Python.
    options.append("--ignore-requires-python")
    return [sys.executable, "-m", "pip", "install", f"--target={packages}", *options]


class ForeignTorch(Environment):
    """A release of torch in the environment `folder` of another Linux, without network or compiler there."""

    def __init__(self, target: Target, folder: Path, version: str) -> None:
        super().__init__(folder, version, with_project=False)
        self.target = target

    def pip(self, *arguments: str) -> None:
        """Install packages for the target."""
        call([*foreign_pip(self.target, self.packages()), "-q", "--only-binary=:all:", *arguments], "pip install")

    def required_by_torch(self) -> list[str]:
        """Return the requirements of the installed torch on the target, without their markers."""
        values = {"python_version": self.target.version, "platform_machine": self.target.platform.machine, "extra": ""}
        (torch,) = distributions(name="torch", path=[str(self.packages())])
        found = map(Requirement, torch.requires or [])
        return [str(r).partition(";")[0].strip() for r in found if r.marker is None or r.marker.evaluate(values)]

    def stand_ins(self) -> None:
        """Compile the stand-ins for the target."""
        cache = WORK / "zig"
        caches = [f"ZIG_GLOBAL_CACHE_DIR={cache}", f"ZIG_LOCAL_CACHE_DIR={cache}"]
        self.c_compiler = ["env", *caches, str(zig()), "cc", "-target", self.target.platform.zig]
        super().stand_ins()
