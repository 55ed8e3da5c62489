"""Build of deploy/k8s/Dockerfile without a registry: a base image of Debian's packages, and a folder of wheels.

It needs root, buildah, debootstrap and Debian's mirror. All images are in one folder, and end with it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.k8s.cluster import ROOT

BUILD_NEEDS = ("setuptools>=77", "pybind11>=2.13")
RELEASES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Releases of Debian by their Python: the image has the Python of the tests."""
WHEELS = "/wheelhouse"


def refusal() -> str:
    """Return the reason why no image can be built here, or ''."""
    if missing := [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found: apt-get install buildah debootstrap"
    if sys.version_info[:2] not in RELEASES:
        return f"no release of Debian has Python {sys.version_info[0]}.{sys.version_info[1]}"
    return ""


class Image(NamedTuple):
    """A built image: the folder with its files, its user and its environment."""

    root: Path
    user: str
    env: dict[str, str]


@contextlib.contextmanager
def built(folder: Path) -> Iterator[Image]:
    """Build the image in a folder, and remove all of it at the end."""
    store = ["buildah", f"--root={folder / 'store'}", f"--runroot={folder / 'run'}", "--storage-driver=vfs"]

    def buildah(*words: str) -> str:
        done = subprocess.run([*store, *words], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    wheels = folder / "wheels"
    _download(wheels)
    try:
        base = buildah("from", "scratch")
        packages = "python3,python3-dev,python3-pip,python-is-python3,ca-certificates"
        options = ["--variant=minbase", f"--include={packages}", RELEASES[sys.version_info[:2]]]
        subprocess.run(["debootstrap", *options, buildah("mount", base)], stdout=subprocess.DEVNULL, check=True)
        buildah("umount", base)
        # Debian's pip refuses to install beside packages of Debian.
        variables = ["PIP_BREAK_SYSTEM_PACKAGES=1", "PIP_NO_INDEX=1", f"PIP_FIND_LINKS={WHEELS}"]
        buildah("config", *(f"--env={each}" for each in variables), base)
        buildah("commit", "--quiet", "--rm", base, "base")
        arguments = ["--build-arg=BASE=base", f"--build-arg=TORCH={torch.__version__.partition('+')[0]}"]
        buildah(
            "build", "--isolation=chroot", "--pull=never", f"--volume={wheels}:{WHEELS}:ro", *arguments,
            f"--file={ROOT / 'deploy/k8s/Dockerfile'}", "--tag=pod", str(ROOT),
        )  # fmt: skip
        config: dict[str, Any] = json.loads(buildah("inspect", "--type=image", "pod"))["OCIv1"]["config"]
        root = Path(buildah("mount", buildah("from", "--pull=never", "pod")))
        yield Image(root, config["User"], dict(each.split("=", 1) for each in config["Env"]))
    finally:
        buildah("umount", "--all")
        shutil.rmtree(folder)


def _download(wheels: Path) -> None:
    """Fetch what pip installs in the image: torch of the tests, and what package, build and example need."""
    own = [each for each in metadata.requires("monarch_backend") or () if "extra ==" not in each]
    needed = [*BUILD_NEEDS, *own, "tqdm", f"torch=={torch.__version__}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={wheels}"]
    subprocess.run([*command, f"--constraint={ROOT / 'constraints.txt'}", *needed], check=True)
