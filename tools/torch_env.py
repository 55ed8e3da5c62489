#!/usr/bin/env python3
"""Builds a virtual environment with one release of torch, to run the tests on another torch than the main one.

    python tools/torch_env.py 2.14.1                          # makes .envs/torch-2.14.1; a second call changes nothing
    python tools/torch_env.py 2.9.0 --xla                     # with torch_xla, in .envs/torch-2.9.0-xla
    python tools/torch_env.py 2.9.0 --lowest                  # with the lowest versions of the project's dependencies
    python tools/torch_env.py 2.14.1 --run -- pytest tests/process_group

Many releases of torch exist only as CUDA builds, which require gigabytes of NVIDIA libraries. On the CPU torch needs
those only to load. So the wheel is installed without its requirements. The CUDA runtime and CUPTI (a few MB) are real,
because torch calls them at import. The other libraries are stand-ins, made with `cc`, whose functions abort. Such an
environment is for the CPU, also on a machine with a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE = 3  # raise it when environments that were built before must be built again
TOOLS = ["numpy>=1.26", "pytest>=8.3", "expecttest>=0.3", "setuptools>=77", "pybind11>=2.13"]
# What the project and its examples require besides torch: it is installed without its dependencies.
TOOLS += ["cloudpickle>=3.1", "cryptography>=42", "msgspec>=0.19", "tqdm>=4.66"]
# The CUDA libraries' functions; what the real runtime and CUPTI define is taken out of them.
CUDA_NAMES = re.compile(r"(cu|nv|nccl|pnccl)[A-Za-z_]")
CUDA_LIBRARIES = re.compile(r"lib(cu|nv|nccl)\w*\.so")
# Loaded by torch only to compile for a GPU, and needs the driver's own library.
LEFT_ALONE = "libcaffe2_nvrtc.so"

WHAT_TORCH_REQUIRES = """
import importlib.metadata, json
from pip._vendor.packaging.requirements import Requirement
found = [Requirement(r) for r in importlib.metadata.requires("torch")]
print(json.dumps([str(r).split(";")[0].strip() for r in found if not r.marker or r.marker.evaluate({"extra": ""})]))
"""


class BuildError(RuntimeError):
    """A step failed; the text says which and why."""


def call(command: Sequence[str | Path], what: str) -> str:
    """Run a command and return its output; a BuildError with the end of it where it fails."""
    done = subprocess.run(
        [str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    if done.returncode:
        shown = " ".join(str(c) for c in command)[:300]
        raise BuildError(f"{what} failed (exit {done.returncode}): {shown}\n{done.stdout[-2000:]}")
    return done.stdout


def say(text: str) -> None:
    """One line of progress."""
    print(f"torch_env: {text}", file=sys.stderr, flush=True)


class Environment:
    """One virtual environment below `folder`."""

    c_compiler: Sequence[str] = ("cc",)

    def __init__(
        self, folder: Path, version: str, *, xla: bool = False, lowest: bool = False, with_project: bool = True
    ) -> None:
        self.folder, self.version, self.xla, self.with_project = folder, version, xla, with_project
        self.pins = lowest_versions() if lowest else []
        self.python = folder / "bin" / "python"
        self.stamp = folder / "torch_env.json"

    def recipe(self) -> dict[str, object]:
        """What the stamp says once everything is in place."""
        made = {"recipe": RECIPE, "torch": self.version, "xla": self.xla, "python": sys.version.split()[0]}
        return {**made, "pins": self.pins} if self.pins else made

    def is_ready(self) -> bool:
        """True if a call before this one has built the same thing."""
        return self.stamp.exists() and json.loads(self.stamp.read_text()) == self.recipe()

    def build(self) -> None:
        """Make what is not there yet."""
        if self.is_ready():
            return
        if self.stamp.exists():
            say(f"{self.folder} was built from another recipe; starting over")
            shutil.rmtree(self.folder)
        if not self.python.exists():
            say(f"virtual environment {self.folder}")
            venv.create(self.folder, with_pip=True)
        self.install_torch()
        say("tools" + (f" and torch_xla {self.version}" if self.xla else ""))
        self.pip(*TOOLS, *self.pins, *([f"torch_xla=={self.version}"] if self.xla else []))
        if self.with_project:
            self.project()
        imported = call([self.python, "-c", "import torch; print(torch.__version__)"], "import torch")
        say(f"ready: torch {imported.strip().splitlines()[-1]} in {self.folder}")
        self.stamp.write_text(json.dumps(self.recipe()))

    def pip(self, *arguments: str) -> None:
        """`pip install` in the environment."""
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        call(command, f"pip install {' '.join(a for a in arguments if not a.startswith('--'))}")

    def install_torch(self) -> None:
        """Install torch and what it requires: all of it for a CPU build, else the light part and stand-ins."""
        say(f"torch {self.version}")
        self.pip("--no-deps", f"torch=={self.version}")
        required = self.required_by_torch()
        heavy = [r for r in required if re.match(r"nvidia-|cuda-|triton", r)]
        light = [r for r in required if r not in heavy]
        for requirement in heavy:
            name, _, version = requirement.partition("==")
            if name.startswith("cuda-toolkit["):
                light.append(f"cuda-toolkit[cudart,cupti]=={version}")
            elif re.match(r"nvidia-cuda-(runtime|cupti)", name):
                light.append(requirement)
        self.pip(*light)
        if heavy:
            self.stand_ins()

    def required_by_torch(self) -> list[str]:
        """Return the requirements of the installed torch on this Python and system, without their markers."""
        found: list[str] = json.loads(call([self.python, "-c", WHAT_TORCH_REQUIRES], "reading torch's requirements"))
        return found

    def packages(self) -> Path:
        """The environment's site-packages."""
        return next(self.folder.glob("lib/python3*/site-packages"))

    def stand_ins(self) -> None:
        """Compile stand-ins for CUDA libraries that are named and missing, beside torch's own libraries."""
        libraries = self.packages() / "torch" / "lib"
        ours = [f for f in libraries.glob("lib*.so*") if f.name != LEFT_ALONE]
        real = [f for f in self.packages().glob("nvidia/**/lib*.so*") if f.is_file()]
        needed = set().union(*(_needed(f) for f in ours))
        there = {f.name for f in [*libraries.iterdir(), *real]}
        missing = sorted(n for n in needed - there if CUDA_LIBRARIES.match(n))
        if not missing:
            return
        say(f"stand-ins for {len(missing)} CUDA libraries")
        defined = set().union(*(_symbols(f, "--defined-only") for f in [*ours, *real]))
        wanted = set().union(*(_symbols(f, "--undefined-only") for f in ours)) - defined
        names = sorted(n for n in wanted if CUDA_NAMES.match(n))
        source = libraries / "stand_in.c"
        body = '(void) { fputs(__func__, stderr); fputs(": a stand-in of tools/torch_env.py\\n", stderr); abort(); }'
        source.write_text("#include <stdio.h>\n#include <stdlib.h>\n" + "".join(f"void {n}{body}\n" for n in names))
        for name in missing:
            flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}"]
            call([*self.c_compiler, *flags, "-o", libraries / name, source], f"compiling a stand-in for {name}")
            if name == missing[0]:  # one library with the functions is enough for all of them
                source.write_text("")
        source.unlink()

    def project(self) -> None:
        """Install this checkout, in place: torch finds the backend by the entry points of what is installed.

        The core is free of torch, so the extension in the checkout serves every environment and is compiled once.
        """
        say("monarch_backend, from this checkout")
        if not core_is_current():
            say("compiling the core, once for all environments")
            call([self.python, "setup.py", "build_ext", "--inplace"], "compiling the core")
        call([self.python, "setup.py", "-q", "dist_info", "--output-dir", self.packages()], "writing the metadata")
        (self.packages() / "monarch_backend.pth").write_text(f"{ROOT}\n")
        script = self.folder / "bin" / "monarch-backend"
        script.write_text(f"#!{self.python}\nimport sys\nfrom monarch_backend.cli import main\nsys.exit(main())\n")
        script.chmod(0o755)

    def variables(self) -> dict[str, str]:
        """The process environment of a command that runs in it."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        found = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(self.folder)}
        if self.xla:
            found.setdefault("PJRT_DEVICE", "CPU")
        return found


def lowest_versions() -> list[str]:
    """Return the requirements of the installed project besides torch, each pinned to its lower bound."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    lowest: dict[str, Version] = {}
    for required in map(Requirement, importlib.metadata.requires("monarch_backend") or []):
        if required.name != "torch" and (required.marker is None or required.marker.evaluate({"extra": ""})):
            bounds = [Version(each.version) for each in required.specifier]
            lowest[required.name] = max([*bounds, lowest.get(required.name, Version("0"))])
    return [f"{name}=={version}" for name, version in sorted(lowest.items())]


def core_is_current() -> bool:
    """Return whether the checkout has an extension for this Python that is newer than its sources."""
    built = ROOT / "monarch_backend" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [f for f in (ROOT / "csrc").rglob("*") if f.suffix in (".cpp", ".h", ".inc")]
    return built.exists() and built.stat().st_mtime >= max(f.stat().st_mtime for f in sources)


def _needed(library: Path) -> set[str]:
    text = call(["readelf", "-d", library], f"reading {library.name}")
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))


def _symbols(library: Path, which: str) -> set[str]:
    text = call(["nm", "-D", which, library], f"reading {library.name}")
    return {line.split()[-1].split("@")[0] for line in text.splitlines() if line.strip()}


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("version", help="a release of torch, as 2.14.1")
    parser.add_argument("--xla", action="store_true", help="with torch_xla of the same version (2.9.0 is its last)")
    parser.add_argument("--lowest", action="store_true", help="with the lowest versions of the other dependencies")
    parser.add_argument("--without-project", action="store_true", help="without this checkout; for tests of wheels")
    parser.add_argument("--dir", type=Path, help="where to; .envs/torch-VERSION in this checkout")
    parser.add_argument("--run", action="store_true", help="run the command behind -- in the environment")
    # Split by hand: argparse would take options of the command for its own.
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    args, command = parser.parse_args(words[:split]), words[split + 1 :]
    if not re.fullmatch(r"\d+\.\d+\.\d+\w*", args.version):
        parser.error(f"{args.version!r} is no release of torch; give one as 2.14.1")
    if args.run != bool(command):
        parser.error("--run and a command behind -- go together")
    absent = [tool for tool in ("cc", "nm", "readelf") if shutil.which(tool) is None]
    if absent:
        parser.error(f"{', '.join(absent)} not found; install a C compiler and binutils")
    kind = "-xla" * args.xla + "-lowest" * args.lowest
    folder = Path(args.dir or ROOT / ".envs" / f"torch-{args.version}{kind}").absolute()
    environment = Environment(
        folder, args.version, xla=args.xla, lowest=args.lowest, with_project=not args.without_project
    )
    try:
        environment.build()
    except BuildError as error:
        say(str(error))
        return 1
    if args.run:
        sys.stdout.flush()
        os.execvpe(command[0], command, environment.variables())
    return 0


if __name__ == "__main__":
    sys.exit(main())
