"""Builds monarch_backend._native from csrc/; everything else about the package stands in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

native = Pybind11Extension(
    "monarch_backend._native",
    sorted(glob("csrc/*.cpp")),
    include_dirs=["csrc"],
    depends=sorted(glob("csrc/*.h")),
    cxx_std=20,
    extra_compile_args=["-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
)

setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
