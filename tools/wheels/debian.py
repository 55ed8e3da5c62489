"""Packages of Debian, unpacked into a folder: apt checks their signatures, and nothing is installed on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
SUITES = ("bullseye", "bookworm", "trixie", "forky")
ARCHITECTURES = ("amd64", "arm64")


class DebianPackages:
    """A private apt in a folder, which has its own list of packages. Its root is not the machine's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.root = self.folder / "apt"

    def unpacked(self, package: str, architecture: str, suite: str) -> Path:
        """Return the folder with the files of a package. The first call downloads it."""
        target = self.folder / f"{package}-{suite}-{architecture}"
        if not target.exists():
            self._configure()
            archives = self.folder / "archives"
            archives.mkdir(exist_ok=True)
            self._apt("download", f"{package}:{architecture}/{suite}", cwd=archives)
            # apt writes a colon of a version as %3a.
            found = sorted(archives.glob(f"{package}_*_{architecture}.deb"), key=lambda path: path.stat().st_mtime)
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            subprocess.run(["dpkg-deb", "--extract", found[-1], partial], check=True)
            partial.rename(target)
        return target

    def _configure(self) -> None:
        ready = self.root / "ready"
        if ready.exists():
            return
        shutil.rmtree(self.root, ignore_errors=True)
        for tool in ("apt-get", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise RuntimeError(f"{tool} not found; headers of other Pythons come from Debian's packages")
        if not Path(KEYS).exists():
            raise RuntimeError(f"{KEYS} not found; install the package debian-archive-keyring")
        for name in (
            "etc/apt/apt.conf.d",
            "etc/apt/preferences.d",
            "var/lib/apt/lists/partial",
            "var/cache/apt/archives/partial",
        ):
            (self.root / name).mkdir(parents=True)
        (self.root / "status").touch()
        # An old list of packages will do: its signature is checked all the same.
        lines = [f"deb [signed-by={KEYS} check-valid-until=no] {MIRROR} {suite} main" for suite in SUITES]
        (self.root / "etc/apt/sources.list").write_text("\n".join(lines) + "\n")
        options = [
            f'Dir "{self.root}";',
            f'Dir::State::status "{self.root}/status";',
            'APT::Sandbox::User "root";',
            f'APT::Architecture "{ARCHITECTURES[0]}";',
            *(f'APT::Architectures:: "{name}";' for name in ARCHITECTURES),
        ]
        (self.root / "apt.conf").write_text("\n".join(options) + "\n")
        self._apt("update", cwd=self.root)
        ready.touch()

    def _apt(self, *arguments: str, cwd: Path) -> None:
        env = dict(os.environ, APT_CONFIG=str(self.root / "apt.conf"))
        done = subprocess.run(["apt-get", "-qq", *arguments], cwd=cwd, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"apt-get {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
