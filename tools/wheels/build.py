"""Build the source distribution, and from it a wheel for each Python and platform: `python -m tools.wheels.build`.

Each wheel is built in a fresh folder that contains the unpacked source distribution and nothing else.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tools.wheels.commands import run
from tools.wheels.debian import DebianPackages
from tools.wheels.headers import python_headers
from tools.wheels.table import Results
from tools.wheels.targets import PLATFORMS, PYTHONS, Target
from tools.wheels.toolchain import build_environment, compiler

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheels"
"""Compilers, headers and caches, which later runs use again."""


def build_sdist(out: Path) -> Path:
    """Build the source distribution in `out` and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", out, ROOT], cwd=out)
    (found,) = sorted(out.glob("monarch_backend-*.tar.gz"), key=lambda path: path.stat().st_mtime)[-1:]
    return found


def build_wheel(sdist: Path, target: Target, out: Path, work: Path = WORK) -> Path:
    """Build one wheel from a source distribution in `out` and return its path."""
    debian = DebianPackages(work / "debian")
    include = python_headers(target, debian, work / "headers")
    script, link = compiler(target.platform, debian, work / "bin")
    env = build_environment(target, include, script, link, work / "sysconfig")
    with tempfile.TemporaryDirectory() as fresh:
        with tarfile.open(sdist) as archive:
            archive.extractall(fresh, filter="data")
        (source,) = Path(fresh).iterdir()
        options = [f"--config-setting=--build-option=--plat-name={target.platform.wheel}"]
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", *options, "--outdir", fresh, source]
        run(command, cwd=Path(fresh), env=env)
        (wheel,) = Path(fresh).glob("*.whl")
        if not wheel.name.endswith(f"-{target.tag}.whl"):
            raise RuntimeError(f"setuptools built {wheel.name}, not a wheel for {target.tag}")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def first_error(output: str) -> str:
    """Return the first error of a failed build in one line, for the table."""
    found = re.search(r"\berror: (.+)", output)
    line = found[1] if found else output.strip().splitlines()[-1]
    return line.replace("|", "/")[:100]


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", nargs="*", default=PYTHONS, choices=PYTHONS, help="all of them")
    parser.add_argument("--platform", nargs="*", default=list(PLATFORMS), choices=PLATFORMS, help="all of them")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where to; dist")
    parser.add_argument("--sdist", type=Path, help="one that is there already; else it is built first")
    parser.add_argument("--results", type=Path, default=WORK / "results.json", help="for the table")
    args = parser.parse_args()
    out = args.out.absolute()
    sdist = args.sdist or build_sdist(out)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB", flush=True)
    failures = 0
    for target in (Target(python, PLATFORMS[platform]) for platform in args.platform for python in args.python):
        began = time.monotonic()
        try:
            wheel = build_wheel(sdist.absolute(), target, out)
        except RuntimeError as error:
            failures += 1
            print(f"{target.tag}: {error}", flush=True)
            Results(args.results).begin(target, failed=first_error(str(error)))
        else:
            size = wheel.stat().st_size / 1e6
            print(f"{wheel.name}: {size:.2f} MB, {time.monotonic() - began:.0f} s", flush=True)
            Results(args.results).begin(target, built=f"{size:.1f} MB")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
