"""C headers of each CPython of each platform, in one folder per target.

Headers of a Python are the same on all platforms, except `pyconfig.h`. They come from Debian, or from an interpreter
on this machine where Debian has no such Python. `adapted_pyconfig` changes `pyconfig.h` where neither has the platform.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tools.wheels.debian import DebianPackages
from tools.wheels.targets import Target

SUITE_OF_PYTHON = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky", "3.15": "forky"}

X86_64_ONLY = ("HAVE_GCC_ASM_FOR_X64", "HAVE_GCC_ASM_FOR_X87")

FEATURES = ("_POSIX_C_SOURCE", "_XOPEN_SOURCE", "_XOPEN_SOURCE_EXTENDED")
"""Add functions to the headers of Linux and hide functions in those of macOS, where CPython leaves them undefined."""


def python_headers(target: Target, debian: DebianPackages, folder: Path) -> Path:
    """Return the folder with `Python.h` and `pyconfig.h` of a target, below `folder`."""
    include = folder / f"python{target.python}-{target.platform.name}"
    if (include / "pyconfig.h").exists():
        return include
    common, pyconfig, has_platform = _source(target, debian)
    shutil.copytree(common, include, ignore=shutil.ignore_patterns("pyconfig.h"), dirs_exist_ok=True)
    text = pyconfig.read_text()
    (include / "pyconfig.h").write_text(adapted_pyconfig(text, target, has_platform=has_platform))
    return include


def _source(target: Target, debian: DebianPackages) -> tuple[Path, Path, bool]:
    """The folder of headers, a `pyconfig.h`, and whether that is of the target's platform."""
    suite = SUITE_OF_PYTHON.get(target.version)
    if suite is None:
        include = _include_of_interpreter(target.version)
        return include, include / "pyconfig.h", target.platform.name == "linux-x86_64"
    architecture = target.platform.debian or "arm64"
    root = debian.unpacked(f"libpython{target.version}-dev", architecture, suite) / "usr" / "include"
    triplet = "aarch64-linux-gnu" if architecture == "arm64" else "x86_64-linux-gnu"
    name = f"python{target.version}"
    return root / name, root / triplet / name / "pyconfig.h", target.platform.is_linux


def _include_of_interpreter(version: str) -> Path:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    name = f"python{version}"
    found = [str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/{name}"))] + [name]
    code = "import sysconfig; print(sysconfig.get_path('include'))"
    for python in found:
        if shutil.which(python) is None:
            continue
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        include = Path(done.stdout.strip())
        if done.returncode == 0 and (include / "pyconfig.h").exists():
            return include
    raise RuntimeError(
        f"no headers of Python {version}: Debian has none, and no {name} with headers is on this machine"
    )


def adapted_pyconfig(text: str, target: Target, *, has_platform: bool) -> str:
    """Return a `pyconfig.h` for a target, from one of the same Python on Linux.

    Sizes of types are the same on all 64-bit targets, and CPython's `pymacconfig.h` sets those of macOS.
    """
    changes: dict[str, str | None] = {}
    if target.is_free_threaded:
        changes["Py_GIL_DISABLED"] = "1"
    if not has_platform:
        changes |= dict.fromkeys(X86_64_ONLY)
        changes["HAVE_USABLE_WCHAR_T"] = "1" if target.platform.is_linux else None  # an unsigned wchar_t
        changes["PY_SUPPORT_TIER"] = "2"
    if not target.platform.is_linux:
        changes |= dict.fromkeys(FEATURES)
        changes |= {"HAVE_KQUEUE": "1", "SOABI_PLATFORM": '"darwin"'}
    for name, value in changes.items():
        text = _with_macro(text, name, value)
    return text


def _with_macro(text: str, name: str, value: str | None) -> str:
    """Define or undefine a macro. A macro that this Python does not know is left out."""
    line = f"/* #undef {name} */" if value is None else f"#define {name} {value}"
    return re.sub(rf"^[ \t]*#[ \t]*define[ \t]+{name}\b.*$|^/\* #undef {name} \*/$", line, text, flags=re.M)
