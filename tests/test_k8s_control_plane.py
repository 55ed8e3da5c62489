"""tools/k8s_control_plane.sh on distributions without its packages, by replaced commands of apt."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "k8s_control_plane.sh"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs flock of util-linux")

DEBIAN_12 = 'case "$*" in *showsrc*) echo "Version: 1.20.5+really1.20.2-1.1";; esac'


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return ``prepare(apt_get=TEXT, apt_cache=TEXT)``, which runs the tool with these commands."""

    def run(apt_get: str = ":", apt_cache: str = DEBIAN_12) -> subprocess.CompletedProcess[str]:
        commands = {
            "apt-get": apt_get,
            "apt-cache": apt_cache,
            "etcd": ":",
            "id": "echo 0",
            "uname": "echo Linux x86_64",
        }
        for name, text in commands.items():
            (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/log\n{text}\n')
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "K8S_TESTBED_CACHE": str(tmp_path / "cache")}
        return subprocess.run([TOOL, "--prepare"], env=environment, capture_output=True, text=True, timeout=60)

    return run


def installs(folder: Path) -> bool:
    return " install " in (folder / "log").read_text()


def test_distribution_without_a_package_is_a_skip_with_the_reason(
    prepare: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Ubuntu 24.04 has no Go 1.19."""
    done = prepare(apt_cache='case "$2" in golang-1.19-go) exit 100;; esac')
    assert done.returncode == 3
    assert "cannot be built here: " in done.stderr
    assert done.stderr.endswith(" has no package golang-1.19-go; Debian 12 has it\n")
    assert not installs(tmp_path)


def test_distribution_with_another_source_package_is_a_skip_with_the_reason(
    prepare: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Ubuntu's package of this name installs a snap."""
    done = prepare(apt_cache='case "$*" in *showsrc*) echo "Version: 1.0";; esac')
    assert done.returncode == 3
    assert done.stderr.endswith(" has no source package kubernetes 1.20; Debian 12 has it\n")
    assert not installs(tmp_path)
    assert not list((tmp_path / "cache").glob("build.??????"))


def test_lists_that_cannot_be_fetched_are_a_failure(
    prepare: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The packages may exist, so the tests must not be skipped."""
    done = prepare(apt_get='case "$*" in *update) exit 100;; esac', apt_cache="exit 100")
    assert done.returncode == 125
    assert "apt-get update has failed, and its lists have no package dpkg-dev" in done.stderr


def test_failed_build_is_a_failure(prepare: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = prepare(apt_get='case "$*" in *install*) echo no space left >&2; exit 100;; esac')
    assert done.returncode == 125
    assert "no space left" in done.stderr
    assert "no control plane; see " in done.stderr
