"""Cross compilers: zig's clang with glibc 2.28 or macOS 11, and the environment in which setuptools uses it.

On Linux the extension uses the libstdc++ of the process, as torch does. A second C++ runtime inside of it would have a
`std::terminate` and an unwinder of its own. GCC 10 of Debian 11 has C++20 headers that need no newer libstdc++ than
manylinux_2_28 has; `check.py` looks at the result.
"""

from __future__ import annotations

import importlib.util
import os
import pprint
import shlex
import shutil
from pathlib import Path

from tools.wheels.debian import DebianPackages
from tools.wheels.targets import Platform, Target

GCC = "10"
GCC_SUITE = "bullseye"


def zig() -> Path:
    """Return the program of the `ziglang` package."""
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        raise RuntimeError("the package ziglang is not installed; pip install -e '.[wheels]'")
    return Path(found.origin).parent / "zig"


def compiler(platform: Platform, debian: DebianPackages, folder: Path) -> tuple[Path, list[str]]:
    """Return a script that compiles C++ for a platform, and what the linker needs besides the objects."""
    options = ["-target", platform.zig]
    link = ["-shared", "-Wl,-s"]
    if platform.is_linux:
        triplet = platform.soabi
        gcc = debian.unpacked(f"libstdc++-{GCC}-dev", platform.debian, GCC_SUITE) / "usr" / "include"
        # Not -isystem: zig puts such folders behind those of the C library.
        options += ["-nostdinc++", f"-I{gcc / 'c++' / GCC}", f"-I{gcc / triplet / 'c++' / GCC}"]
        standard = (
            debian.unpacked("libstdc++6", platform.debian, GCC_SUITE) / "usr" / "lib" / triplet / "libstdc++.so.6"
        )
        unwinder = debian.unpacked("libgcc-s1", platform.debian, GCC_SUITE) / "lib" / triplet / "libgcc_s.so.1"
        link += ["-nostdlib++", "-Wl,--as-needed", str(standard), str(unwinder)]
    else:
        # No names of local symbols, which -s leaves, and no part of the C++ library that nothing uses.
        link += ["-Wl,-x", "-Wl,-dead_strip"]
        link += ["-undefined", "dynamic_lookup"]  # Python's functions are in the program that loads the extension
    script = folder / f"c++-{platform.name}"
    script.parent.mkdir(parents=True, exist_ok=True)
    text = f'#!/bin/sh\nexec {shlex.join([str(zig()), "c++", *options])} "$@"\n'
    if not script.exists() or script.read_text() != text:  # ccache looks at its time
        script.write_text(text)
        script.chmod(0o755)
    return script, link


def build_environment(target: Target, include: Path, script: Path, link: list[str], folder: Path) -> dict[str, str]:
    """Return the variables that make setuptools build for a target, on any other Python.

    `_PYTHON_SYSCONFIGDATA_NAME` names a module with the variables of the target's Makefile, as CPython's own
    cross builds have it. `_PYTHON_HOST_PLATFORM` is the platform.
    """
    compile_command = shlex.join(([ccache] if (ccache := shutil.which("ccache")) else []) + [str(script)])
    variables = {
        "ABIFLAGS": "t" if target.is_free_threaded else "",
        "AR": f"{zig()} ar",
        "ARFLAGS": "rcs",
        "CC": compile_command,
        "CCSHARED": "-fPIC",
        "CFLAGS": "-DNDEBUG -g0",
        "CONFINCLUDEPY": str(include),
        "CXX": compile_command,
        "EXT_SUFFIX": target.extension,
        "INCLUDEPY": str(include),
        "LDCXXSHARED": shlex.join([str(script), *link]),
        "LDSHARED": shlex.join([str(script), *link]),
        "Py_DEBUG": 0,
        "Py_ENABLE_SHARED": 0,
        "Py_GIL_DISABLED": int(target.is_free_threaded),
        "SHLIB_SUFFIX": ".so",
        "SOABI": target.soabi,
        "VERSION": target.version,
        "py_version_nodot": target.version.replace(".", ""),
        "py_version_short": target.version,
    }
    name = f"_sysconfigdata_{target.python.replace('.', '_')}_{target.platform.name.replace('-', '_')}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(f"build_time_vars = {pprint.pformat(variables)}\n")
    cache = str(folder.absolute().parent / "zig")
    return {
        **{name: value for name, value in os.environ.items() if name not in {"CC", "CXX", "CFLAGS", "LDFLAGS"}},
        "PYTHONPATH": str(folder.absolute()),
        "_PYTHON_HOST_PLATFORM": target.platform.host,
        "_PYTHON_SYSCONFIGDATA_NAME": name,
        "ZIG_GLOBAL_CACHE_DIR": cache,
        "ZIG_LOCAL_CACHE_DIR": cache,
    }
