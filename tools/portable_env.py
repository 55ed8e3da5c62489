"""A virtual environment with the portable core, for tests of the code for macOS on Linux: `make build-portable`.

It has the packages of the environment that runs this, and the sources of this repository. Only the extension
`monarch_backend._native` is another one: built with MONARCH_BUILD_PORTABLE=1 in build/portable. An import hook chooses
it, in every process that the environment's Python starts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "portable"

HOOK = '''"""Chooses the portable core of monarch_backend; written by tools/portable_env.py."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location


class PortableCore:
    """Finds `monarch_backend._native` in build/portable, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_file_location(name, {extension!r}) if name == "monarch_backend._native" else None


sys.meta_path.insert(0, PortableCore)
'''


def build_extension() -> Path:
    """Build the portable core and return its path."""
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += [f"--build-lib={BUILD / 'lib'}", f"--build-temp={BUILD / 'temp'}"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "MONARCH_BUILD_PORTABLE": "1"}, check=True)
    return BUILD / "lib" / "monarch_backend" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def make_environment(folder: Path, *lines: str) -> Path:
    """Make an environment with the packages and scripts of this one, and return its folder of packages.

    Its Python runs the given lines of a .pth file when it starts.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    here = sysconfig.get_path("purelib")
    start = [f"import site; site.addsitedir({here!r})", *lines]
    (packages / "packages_of_main_environment.pth").write_text("".join(f"{line}\n" for line in start))
    for script in Path(sysconfig.get_path("scripts")).iterdir():
        text = script.read_bytes() if script.is_file() and not script.is_symlink() else b""
        shebang, _, rest = text.partition(b"\n")
        if shebang.startswith(f"#!{sys.prefix}/bin/python".encode()):
            copy = folder / "bin" / script.name
            copy.write_bytes(f"#!{folder}/bin/python\n".encode() + rest)
            copy.chmod(0o755)
    return packages


def make_portable_environment(folder: Path, extension: Path) -> None:
    """Make the environment whose import hook chooses the portable core."""
    packages = make_environment(folder, "import monarch_portable_core")
    (packages / "monarch_portable_core.py").write_text(HOOK.format(extension=str(extension)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--dir", type=Path, default=ROOT / ".venv-portable")
    args = parser.parse_args()
    make_portable_environment(args.dir.absolute(), build_extension())


if __name__ == "__main__":
    main()
