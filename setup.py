"""Build of the extension module monarch_backend._native from csrc/. All other metadata is in pyproject.toml."""

import os
import sysconfig
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

is_for_linux = sysconfig.get_platform().startswith("linux")  # in a cross build this is the target's platform
# A build for tests of the code for macOS, without Linux-only system calls: csrc/platform/system.h.
is_portable_test = is_for_linux and os.environ.get("MONARCH_BUILD_PORTABLE") == "1"
parts = ["shm", "channel", "memory", "telemetry", *(["verbs"] if is_for_linux and not is_portable_test else [])]
folders = ["csrc", "csrc/records", "csrc/platform"]
folders += [f"csrc/{part}{folder}" for part in parts for folder in ("", "/python")]
portable_args = ["-DMONARCH_PORTABLE=1", "-include", "platform/linux_names.h"] if is_portable_test else []

native = Pybind11Extension(
    "monarch_backend._native",
    sorted(source for folder in folders for source in glob(f"{folder}/*.cpp")),
    include_dirs=["csrc"],
    depends=sorted(header for kind in ("h", "inc") for header in glob(f"csrc/**/*.{kind}", recursive=True)),
    libraries=[*(["dl"] if is_for_linux else []), *(["rt"] if is_portable_test else [])],  # in libc since glibc 2.34
    cxx_std=20,
    # Without contraction to FMA, all instruction sets round alike: a sum has the same bits on every processor.
    extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden", *portable_args],
)

ParallelCompile("MONARCH_BUILD_JOBS").install()  # default: one job per processor
setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
