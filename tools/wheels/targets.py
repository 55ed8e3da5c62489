"""Targets of the wheels: each CPython on each platform, with the names that pip, zig, Debian and CPython give it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """An operating system and a processor.

    zig:    target of `zig c++`; its last part is the oldest glibc or macOS
    host:   `sysconfig.get_platform()` of a Python there
    wheel:  platform tag of the wheel
    soabi:  last part of the file name of an extension there
    debian: Debian's name of the processor; empty for macOS
    """

    name: str
    zig: str
    host: str
    wheel: str
    soabi: str
    debian: str = ""

    @property
    def is_linux(self) -> bool:
        """Whether wheels for it are manylinux wheels."""
        return bool(self.debian)

    @property
    def machine(self) -> str:
        """The processor, as `uname -m` prints it there."""
        return self.host.rpartition("-")[2]


PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform(
            name="linux-x86_64",
            zig="x86_64-linux-gnu.2.28",
            host="linux-x86_64",
            wheel="manylinux_2_28_x86_64",
            soabi="x86_64-linux-gnu",
            debian="amd64",
        ),
        Platform(
            name="linux-aarch64",
            zig="aarch64-linux-gnu.2.28",
            host="linux-aarch64",
            wheel="manylinux_2_28_aarch64",
            soabi="aarch64-linux-gnu",
            debian="arm64",
        ),
        # The oldest macOS of torch 2.9's wheels.
        Platform(
            name="macos-arm64",
            zig="aarch64-macos.11.0",
            host="macosx-11.0-arm64",
            wheel="macosx_11_0_arm64",
            soabi="darwin",
        ),
    )
}

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t", "3.15")
"""A `t` at the end: the build without a global interpreter lock."""

DEBIAN_PYTHONS = ("3.11", "3.13", "3.14", "3.14t", "3.15")
"""Those that a suite of Debian has. Smoke tests of another processor run the interpreters of Debian under emulation."""


@dataclass(frozen=True)
class Target:
    """One wheel: a Python, as "3.14t", on a platform."""

    python: str
    platform: Platform

    @property
    def version(self) -> str:
        """Major and minor, as "3.14"."""
        return self.python.removesuffix("t")

    @property
    def is_free_threaded(self) -> bool:
        """Whether this Python has no global interpreter lock."""
        return self.python.endswith("t")

    @property
    def soabi(self) -> str:
        """CPython's SOABI, as "cpython-314t-x86_64-linux-gnu"."""
        return f"cpython-{self.python.replace('.', '')}-{self.platform.soabi}"

    @property
    def extension(self) -> str:
        """End of the file name of an extension module."""
        return f".{self.soabi}.so"

    @property
    def tag(self) -> str:
        """The wheel's tag, as "cp314-cp314t-manylinux_2_28_x86_64"."""
        digits = self.python.replace(".", "")
        return f"cp{digits.removesuffix('t')}-cp{digits}-{self.platform.wheel}"


def all_targets() -> list[Target]:
    """Every wheel of a release, platform by platform."""
    return [Target(python, platform) for platform in PLATFORMS.values() for python in PYTHONS]
