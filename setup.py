"""Build of the extension module monarch_backend._native from csrc/. All other metadata is in pyproject.toml."""

import sysconfig
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

is_for_linux = sysconfig.get_platform().startswith("linux")  # in a cross build this is the target's platform
# These folders need Linux: shared memory, channels, registered memory, verbs.
linux = [f"csrc/{folder}{part}" for folder in ("shm", "channel", "memory", "verbs") for part in ("", "/python")]
folders = ["csrc", "csrc/records", *(linux if is_for_linux else [])]

native = Pybind11Extension(
    "monarch_backend._native",
    sorted(source for folder in folders for source in glob(f"{folder}/*.cpp")),
    include_dirs=["csrc"],
    depends=sorted(header for kind in ("h", "inc") for header in glob(f"csrc/**/*.{kind}", recursive=True)),
    libraries=["dl"] if is_for_linux else [],  # a part of libc since glibc 2.34
    cxx_std=20,
    # Without contraction to FMA, all instruction sets round alike: a sum has the same bits on every processor.
    extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-fvisibility=hidden"],
)

ParallelCompile("MONARCH_BUILD_JOBS").install()  # default: one job per processor
setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
