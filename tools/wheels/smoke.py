"""Install a wheel from an index on loopback in a clean environment, and run its smoke test there.

    python -m tools.wheels.smoke dist --here
    python -m tools.wheels.smoke dist --python 3.12 --torch 2.13.0
    python -m tools.wheels.smoke dist --python 3.14 --root build/root-arm64 --platform linux-aarch64 --torch 2.13.0

`--here` is this Python with the torch that it has. Without torch only the parts of the core that need none are tested.
`--root` is the folder of another Linux, as `mmdebstrap` makes it; its programs run with this folder as their root.
Results are added to `results.json`.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.wheels.build import ROOT, WORK, first_error
from tools.wheels.commands import run, status_and_output
from tools.wheels.foreign import ForeignTorch, foreign_pip
from tools.wheels.index import metadata, served, write_index
from tools.wheels.table import Results
from tools.wheels.targets import PLATFORMS, PYTHONS, Target

MAX_INSTALL_S = 10
"""Processor time of pip for the wheel alone, from the index."""

SMOKE_TEST = Path(__file__).with_name("smoke_test.py")

ENTER_ROOT = """
set -e
for name in proc dev sys; do mkdir -p "$0/$name"; mount --rbind "/$name" "$0/$name"; done
touch "$0/etc/hosts"
mount --bind /etc/hosts "$0/etc/hosts"
if [ -n "$EMULATED_CPUINFO" ]; then
  mount --bind "$EMULATED_CPUINFO" "$0/proc/cpuinfo"
  ulimit -v 67108864
fi
exec chroot "$0" "$@"
"""
"""The mounts are in a namespace of this process and end with it. torchrun needs the names in /etc/hosts.

QEMU 7.2 allocates memory for each page that a program reserves. The 16 TiB of a controller, which cost nothing on a
processor, would fill the machine. A controller reserves none below a limit of 16 TiB on addresses; 64 GiB are enough.
"""

CPUINFO = {
    "aarch64": """processor\t: {}
Features\t: fp asimd crc32 atomics
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3

"""
}
"""One processor of an emulated machine (Cortex-A72), for QEMU before 8.1: there /proc/cpuinfo is that of the host.
`import torch` reads it with pytorch/cpuinfo, which then ends with a segmentation fault."""


class Machine:
    """This machine, or another Linux in a folder. Paths of an environment are the same inside and outside."""

    def __init__(self, root: Path | None, processor: str) -> None:
        self.root = root.absolute() if root else None  # pip runs in another folder
        self.work = Path(tempfile.mkdtemp(prefix="wheel-", dir=self.root / "tmp" if self.root else None))
        self.cpuinfo = ""
        if processor != platform.machine():
            cpuinfo = self.work / "cpuinfo"
            cpuinfo.write_text("".join(CPUINFO[processor].format(i) for i in range(os.cpu_count() or 1)))
            self.cpuinfo = str(cpuinfo)

    def path(self, name: str) -> str:
        """The path of a file in the folder of this test, as programs there see it."""
        path = self.work / name
        return str(Path("/") / path.relative_to(self.root)) if self.root else str(path)

    def run(self, command: Sequence[str], check: bool = True) -> tuple[int, str]:
        """Run a command and return its exit status and output."""
        words = list(command)
        if self.root:
            words = ["unshare", "--mount", "sh", "-c", ENTER_ROOT, str(self.root), *words]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "EMULATED_CPUINFO": self.cpuinfo}
        folder = None if self.root else self.work
        return (0, run(words, folder, env)) if check else status_and_output(words, folder, env)

    def install(self, command: Sequence[str]) -> None:
        """Run pip, on this machine. A folder with another Linux needs neither network nor certificates."""
        run(command, self.work)

    def close(self) -> None:
        """Remove the environment."""
        shutil.rmtree(self.work)


def processor_seconds() -> float:
    """Processor time of all commands so far. It depends less on other programs than the clock does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def requirements(wheel: Path) -> list[str]:
    """What a wheel requires besides torch; markers are the reader's to evaluate."""
    found = metadata(wheel).get_all("Requires-Dist", [])
    return [text for text in found if "extra ==" not in text and not text.startswith("torch")]


def smoke(target: Target, wheel: Path, url: str, args: argparse.Namespace) -> tuple[bool, dict[str, str]]:
    """Install the wheel and run the smoke test. Return whether it passed, and the result for the table."""
    machine = Machine(args.root, target.platform.machine)
    try:
        folder = machine.path("env")
        python = f"{folder}/bin/python"
        interpreter = args.interpreter or f"python{target.python}"
        pip = [python, "-m", "pip", "install"]
        if args.root:
            machine.run([interpreter, "-m", "venv", "--without-pip", folder])
            pip = foreign_pip(target, next((machine.work / "env").glob("lib/python3*/site-packages")))
            if args.torch:
                ForeignTorch(target, machine.work / "env", args.torch).install_torch()
        elif args.torch:
            torch_env = shutil.copy2(ROOT / "tools" / "torch_env.py", machine.work)
            script = machine.path(Path(torch_env).name)
            machine.run([interpreter, script, args.torch, "--without-project", "--dir", folder])
        else:
            machine.run([interpreter, "-m", "venv", folder])
        if args.torch_from:
            (packages,) = (machine.work / "env").glob("lib/python3*/site-packages")
            (packages / "torch.pth").write_text(f"{args.torch_from.absolute()}\n")
        else:
            machine.install([*pip, "-q", "--only-binary=:all:", *requirements(wheel)])
        began = processor_seconds()
        install = ["--no-deps", "--ignore-installed", "--only-binary=:all:", "--index-url", url, "monarch_backend"]
        machine.install([*pip, "-q", *install])
        seconds = processor_seconds() - began
        shutil.copy2(SMOKE_TEST, machine.work)
        with_torch = bool(args.torch or args.torch_from)
        options = [] if with_torch else ["--without-torch"]
        code, text = machine.run([python, machine.path(SMOKE_TEST.name), *options], check=False)
        print(text, end="")
        version = "without torch"
        if with_torch:
            _, found = machine.run([python, "-W", "ignore", "-c", "import torch; print(torch.__version__)"])
            version = f"torch {found.strip().splitlines()[-1].partition('+')[0]}"
        _, found = machine.run([python, "-c", "import platform; print(platform.python_version())"])
        print(f"Python {found.strip()}, {version}: installed in {seconds:.1f} s")
        passed = code == 0
        if seconds > MAX_INSTALL_S:
            print(f"FAILED  installing took {seconds:.1f} s, more than {MAX_INSTALL_S}")
            passed = False
        where = f"Python {found.strip()}{' (emulated)' if args.emulated else ''}"
        return passed, {
            "installed": f"{seconds:.1f} s",
            "smoke": f"{'ok' if passed else 'FAILED'}, {version}",
            "on": where,
        }
    finally:
        machine.close()


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("distributions", type=Path, help="the folder with wheels")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--here", action="store_true", help="this Python, with its torch")
    which.add_argument("--python", choices=PYTHONS)
    parser.add_argument("--platform", choices=PLATFORMS, default="linux-x86_64")
    parser.add_argument("--interpreter", help="python3.12 from the PATH, for example")
    parser.add_argument("--root", type=Path, help="a folder with another Linux that has this Python")
    torch = parser.add_mutually_exclusive_group()
    torch.add_argument("--torch", help="a release of torch to install")
    torch.add_argument("--torch-from", type=Path, help="site-packages with torch and all requirements")
    parser.add_argument("--results", type=Path, default=WORK / "results.json")
    args = parser.parse_args()
    if args.here:
        args.python = f"{sys.version_info.major}.{sys.version_info.minor}"
        args.platform = f"linux-{platform.machine()}"
        args.interpreter, args.torch_from = sys.executable, Path(sysconfig.get_path("purelib"))
    target = Target(args.python, PLATFORMS[args.platform])
    args.emulated = target.platform.machine != platform.machine()
    found = list(args.distributions.glob(f"*-{target.tag}.whl"))
    if not found:
        print(f"{args.distributions} has no wheel for {target.tag}; nothing is tested")
        return 0 if args.here else 1
    wheel = found[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(write_index(args.distributions, Path(folder) / "index")) as url,
    ):
        try:
            passed, result = smoke(target, wheel, url, args)
        except RuntimeError as error:
            print(error)
            passed, result = False, {"smoke": f"FAILED: {first_error(str(error))}"}
    Results(args.results).add(target, **result)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
