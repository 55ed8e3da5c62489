"""Checks of built wheels: `python -m tools.wheels.check dist`. The exit status is 1 where one has a finding.

Ready-made tools check tags, contents and metadata. Functions in this module check what those leave out: the symbols of
the extension, its name, its size, and a macOS extension, which `auditwheel` does not read.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection
from macholib.mach_o import LC_BUILD_VERSION, MH_BUNDLE, MH_DYLIB, N_EXT, N_TYPE, N_UNDF
from macholib.MachO import MachO
from macholib.SymbolTable import SymbolTable

from tools.wheels.commands import status_and_output
from tools.wheels.targets import PLATFORMS, Target

MAX_INSTALLED_BYTES = 5_000_000

ENTRY = "PyInit__native"

LIBRARIES = re.compile(r"(libstdc\+\+\.so\.6|libgcc_s\.so\.1|lib(c|m|dl|rt|pthread)\.so\.\d|ld-linux.*\.so\.\d)")

NEWEST_SYMBOLS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Of manylinux_2_28."""

MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}

CPU_TYPE_ARM64 = 0x0100000C


def target_of(wheel: str) -> Target:
    """Return the target that the name of a wheel says."""
    python, abi, tag = wheel.removesuffix(".whl").split("-")[-3:]
    for platform in PLATFORMS.values():
        digits = abi.removeprefix("cp")
        if platform.wheel in tag.split(".") and digits.removesuffix("t") == python.removeprefix("cp"):
            return Target(f"{digits[0]}.{digits[1:]}", platform)
    raise ValueError(f"{wheel}: no target has the tag {python}-{abi}-{tag}")


def check_names(target: Target, names: Iterable[str]) -> Iterator[str]:
    """Findings in the names of a wheel's files."""
    names = list(names)
    found = [name for name in names if re.search(r"\.(so|dylib|pyd)$", name)]
    wanted = f"monarch_backend/_native{target.extension}"
    if found != [wanted]:
        yield f"extensions are {found}; its tag {target.tag} wants {wanted}"
    for name in names:
        if not re.match(r"monarch_backend/|monarch_backend-[^/]+\.dist-info/", name):
            yield f"{name} is outside of the package"
        if re.search(r"\.(cpp|h|inc|o|a|pyc)$|/tests?/", name):
            yield f"{name} does not belong in a wheel"


def check_symbol_versions(names: Iterable[str]) -> Iterator[str]:
    """Findings in versions of symbols, as "GLIBC_2.28"."""
    for name in sorted(names):
        family, _, text = name.partition("_")
        newest = NEWEST_SYMBOLS.get(family)
        version = tuple(int(part) for part in text.split(".")) if re.fullmatch(r"[\d.]+", text) else None
        if newest is None or version is None or version > newest:
            yield f"a symbol needs {name}; manylinux_2_28 has {family}_{'.'.join(map(str, newest or ('none',)))}"


def check_elf(target: Target, data: bytes) -> Iterator[str]:
    """Findings in an extension for Linux."""
    elf = ELFFile(io.BytesIO(data))
    if elf["e_machine"] != MACHINES[target.platform.machine]:
        yield f"the extension is for {elf['e_machine']}, the wheel for {target.platform.machine}"
    versions = set()
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            needed = {tag.needed for tag in section.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
            yield from (f"needs {name}" for name in sorted(needed) if not LIBRARIES.fullmatch(name))
        elif isinstance(section, GNUVerNeedSection):
            versions |= {each.name for _, all_of_one in section.iter_versions() for each in all_of_one}
        elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
            exported = {
                symbol.name
                for symbol in section.iter_symbols()
                if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
            }
            if ENTRY not in exported:
                yield f"does not export {ENTRY}"
            private = {name for name in exported if "pybind11" not in name} - {ENTRY}
            yield from (f"exports {name}" for name in sorted(private))
        elif section.name in {".symtab", ".debug_info"}:
            yield f"has {section.name}: it is not stripped"
    yield from check_symbol_versions(versions)


def check_macho(target: Target, data: bytes, path: Path) -> Iterator[str]:
    """Findings in an extension for macOS. `path` is a file with the same bytes, for libraries that want one."""
    headers = MachO(str(path)).headers
    if len(headers) != 1 or headers[0].header.cputype & 0xFFFFFFFF != CPU_TYPE_ARM64:
        yield "the extension is not for arm64 alone"
        return
    if headers[0].header.filetype not in (MH_BUNDLE, MH_DYLIB):
        yield f"the extension has Mach-O file type {headers[0].header.filetype}"
    oldest = target.platform.zig.rpartition("-")[2].removeprefix("macos.")
    commands = {command[0].cmd: command[1] for command in headers[0].commands}
    if LC_BUILD_VERSION in commands:
        least = commands[LC_BUILD_VERSION].minos
    else:
        yield "does not say which macOS it needs"
        return
    needed = f"{least >> 16}.{least >> 8 & 0xFF}"
    if needed != oldest:
        yield f"needs macOS {needed}, its tag says {oldest}"
    libraries = [name for _, _, name in headers[0].walkRelocatables()]
    for name in libraries:
        if not re.fullmatch(r"/usr/lib/lib(System\.B|c\+\+(abi)?\.1)\.dylib", name):
            yield f"needs {name}"
    exported = set()
    for entry, name in SymbolTable(MachO(str(path))).nlists:
        text = name.decode().removeprefix("_")
        if not entry.n_type & N_EXT:
            continue
        if entry.n_type & N_TYPE != N_UNDF:
            exported.add(text)
        elif entry.n_desc >> 8 not in range(1, len(libraries) + 1) and not re.match(r"_?Py", text):
            yield f"no library is named for {text}"
    if ENTRY not in exported:
        yield f"does not export {ENTRY}"
    if b"/root/" in data or b"/home/" in data:
        yield "contains a path of the machine that built it"


def check_wheel(path: Path, folder: Path) -> Iterator[str]:
    """Findings of this module in one wheel. `folder` is for its files."""
    target = target_of(path.name)
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        yield from check_names(target, names)
        size = sum(info.file_size for info in archive.infolist())
        if size > MAX_INSTALLED_BYTES:
            yield f"takes {size / 1e6:.1f} MB installed, more than {MAX_INSTALLED_BYTES / 1e6}"
        extension = f"monarch_backend/_native{target.extension}"
        if extension in names:
            data = archive.read(extension)
            if target.platform.is_linux:
                yield from check_elf(target, data)
            else:
                yield from check_macho(target, data, Path(archive.extract(extension, folder)))


def run_tools(wheels: list[Path], sdists: list[Path]) -> Iterator[str]:
    """Findings of the ready-made tools, as "tool: text"."""
    commands = [
        ["twine", "check", "--strict", *wheels, *sdists],
        ["check_wheel_contents", *wheels],
    ]
    for command in commands:
        code, text = status_and_output([sys.executable, "-m", *command])
        if code:
            yield f"{command[0]}: {text.strip()}"
    for wheel in wheels:
        platform = target_of(wheel.name).platform
        if not platform.is_linux:
            continue
        code, text = status_and_output([sys.executable, "-m", "auditwheel", "show", wheel])
        found = re.search(r'following platform\s+tag:\s+"manylinux_(\d+)_(\d+)_(\w+)"', text)
        if code or not found or (int(found[1]), int(found[2])) > (2, 28) or found[3] != platform.machine:
            yield f"auditwheel: {wheel.name}: {text.strip()}"


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="with wheels and the source distribution")
    folder = parser.parse_args().folder
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    findings = [] if wheels else [f"no wheels in {folder}"]
    with tempfile.TemporaryDirectory() as scratch:
        for wheel in wheels:
            findings += [f"{wheel.name}: {text}" for text in check_wheel(wheel, Path(scratch))]
    findings += run_tools(wheels, sdists)
    print("\n".join(findings) or f"{len(wheels)} wheels, no finding")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
