"""Wheels: metadata, the checks of tools/wheels with inputs that must fail, and a wheel that is built and installed."""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from monarch_backend import _native
from tools.wheels import build, check, index, table
from tools.wheels.foreign import ForeignTorch
from tools.wheels.headers import adapted_pyconfig
from tools.wheels.targets import PLATFORMS, PYTHONS, Target, all_targets

if sys.version_info >= (3, 11):
    import tomllib

    PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
else:
    PROJECT = {}

ROOT = Path(__file__).parents[1]
X86_64, AARCH64, MACOS = PLATFORMS.values()
EXTENSION = "monarch_backend/_native.cpython-311-x86_64-linux-gnu.so"


def findings(found: object) -> str:
    return "\n".join(found)  # type: ignore[call-overload]


@pytest.mark.skipif(not PROJECT, reason="tomllib is new in Python 3.11")
def test_metadata_names_every_python_and_system() -> None:
    versions = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text}
    assert versions == {python.removesuffix("t") for python in PYTHONS}
    systems = {text for text in PROJECT["classifiers"] if text.startswith("Operating System")}
    assert systems == {"Operating System :: MacOS", "Operating System :: POSIX :: Linux"}
    assert PROJECT["authors"] and len(PROJECT["keywords"]) > 5
    for word in ("backend", "actors", "DTensors", "controller"):
        assert word in PROJECT["description"]


@pytest.mark.skipif(not PROJECT, reason="tomllib is new in Python 3.11")
def test_each_requirement_has_a_lower_bound() -> None:
    required = [
        *PROJECT["dependencies"],
        *(text for extra in PROJECT["optional-dependencies"].values() for text in extra),
    ]
    assert len(required) > 40
    for text in required:
        assert text.startswith("monarch_backend[") or re.match(r"[\w.-]+>=\d[\d.]*(;|$)", text), text


@pytest.mark.skipif(not PROJECT, reason="tomllib is new in Python 3.11")
def test_each_tool_of_the_wheels_extra_has_a_reason() -> None:
    page = (ROOT / "docs" / "operate" / "release.md").read_text()
    for text in PROJECT["optional-dependencies"]["wheels"]:
        name = re.split("[>;]", text)[0]
        assert re.search(rf"^\|[^|]*\b{name}\b[^|]*\|", page, re.M), name


def test_cibuildwheel_builds_the_same_pythons() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (line,) = re.findall(r'^build = "(.*)"$', text, re.M)
    assert line.split() == [f"cp{python.replace('.', '')}-*" for python in PYTHONS]


def test_installed_version_is_that_of_the_package() -> None:
    import monarch_backend

    assert f'version = "{monarch_backend.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert distribution("monarch_backend").version == monarch_backend.__version__


def test_every_target_is_read_back_from_its_tag() -> None:
    assert len(all_targets()) == len(PYTHONS) * len(PLATFORMS)
    for target in all_targets():
        assert check.target_of(f"monarch_backend-0.1.0-{target.tag}.whl") == target
    for tag in ("cp311-cp311-linux_x86_64", "cp311-cp312-manylinux_2_28_x86_64", "py3-none-any"):
        with pytest.raises(ValueError, match="no target"):
            check.target_of(f"monarch_backend-0.1.0-{tag}.whl")


def test_names_of_files() -> None:
    target = Target("3.11", X86_64)
    good = [EXTENSION, "monarch_backend/__init__.py", "monarch_backend-0.1.0.dist-info/METADATA"]
    assert findings(check.check_names(target, good)) == ""
    for bad, text in {
        "tests/test_wheels.py": "outside of the package",
        "monarch_backend/core.cpp": "does not belong",
        "monarch_backend/_native.cpython-312-x86_64-linux-gnu.so": "extensions are",
    }.items():
        assert text in findings(check.check_names(target, [*good, bad]))
    assert "extensions are" in findings(check.check_names(Target("3.11", AARCH64), good))
    assert "extensions are" in findings(check.check_names(target, good[1:]))


def test_symbol_versions() -> None:
    assert findings(check.check_symbol_versions(["GLIBC_2.28", "GLIBC_2.2.5", "GLIBCXX_3.4.24", "GCC_3.0"])) == ""
    for name in ("GLIBC_2.29", "GLIBC_2.34", "GLIBCXX_3.4.25", "CXXABI_1.3.13", "OPENSSL_3.0.0", "GLIBC_PRIVATE"):
        assert f"needs {name}" in findings(check.check_symbol_versions([name]))


@pytest.mark.skipif(sys.platform != "linux", reason="reads this machine's extension")
def test_an_extension_for_this_machine_only_is_refused() -> None:
    data = Path(_native.__file__).read_bytes()
    other = AARCH64 if sysconfig.get_platform() == X86_64.host else X86_64
    assert "the extension is for" in findings(check.check_elf(Target("3.11", other), data))
    here = X86_64 if other is AARCH64 else AARCH64
    assert findings(check.check_elf(Target("3.11", here), data.replace(b"PyInit__native", b"PyInit__notive"))) != ""


def mach_o(
    cpu: int = check.CPU_TYPE_ARM64,
    oldest: int = 11 << 16,
    library: str = "/usr/lib/libSystem.B.dylib",
    symbol: str = "_Py_x",
) -> bytes:
    """Return a dynamic library without content. It exports nothing, and needs one symbol of no named library."""
    name = library.encode().ljust((len(library) // 8 + 1) * 8, b"\0")
    strings = b"\0" + symbol.encode() + b"\0"
    commands = struct.pack("<IIIIII", 0x32, 24, 1, oldest, oldest, 0)  # LC_BUILD_VERSION
    commands += struct.pack("<IIIIII", 0xC, 24 + len(name), 24, 0, 0, 0) + name  # LC_LOAD_DYLIB
    end = 32 + len(commands) + 24 + 80
    commands += struct.pack("<IIIIII", 0x2, 24, end, 1, end + 16, len(strings))  # LC_SYMTAB
    commands += struct.pack("<II18I", 0xB, 80, 0, 0, 0, 0, 0, 1, *[0] * 12)  # LC_DYSYMTAB
    header = struct.pack("<IiiIIIII", 0xFEEDFACF, cpu, 0, 6, 4, len(commands), 0, 0)
    return header + commands + struct.pack("<IBBHQ", 1, 1, 0, 0, 0) + strings


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (mach_o(), "does not export PyInit__native"),
        (mach_o(cpu=0x01000007), "is not for arm64"),
        (mach_o(oldest=14 << 16), "needs macOS 14.0, its tag says 11.0"),
        (mach_o(library="/opt/lib/libfoo.dylib"), "needs /opt/lib/libfoo.dylib"),
        (mach_o(symbol="_foo"), "no library is named for foo"),
    ],
)
def test_extensions_for_macos(data: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "extension.so"
    path.write_bytes(data)
    found = findings(check.check_macho(Target("3.11", MACOS), data, path))
    assert text in found
    assert found.count("needs") == text.count("needs")
    assert found.count("no library") == text.count("no library")


def wheel_file(folder: Path, extension: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"monarch_backend-0.1.0-{Target('3.11', X86_64).tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(EXTENSION, extension)
        metadata = "Metadata-Version: 2.4\nName: monarch_backend\nVersion: 0.1.0\nRequires-Python: >=3.10\n"
        archive.writestr("monarch_backend-0.1.0.dist-info/METADATA", metadata)
        archive.writestr("monarch_backend-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return path


def test_a_large_wheel_is_refused(tmp_path: Path) -> None:
    path = wheel_file(tmp_path, Path(_native.__file__).read_bytes() + bytes(6_000_000))
    assert "MB installed, more than 5" in findings(check.check_wheel(path, tmp_path))


def test_index_is_read_by_pip(tmp_path: Path) -> None:
    path = wheel_file(tmp_path / "dist", b"")
    folder = index.write_index(tmp_path / "dist", tmp_path / "index")
    with index.served(folder) as url:
        page = urllib.request.urlopen(f"{url}monarch-backend/", timeout=30).read().decode()
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        command += ["--python-version", "3.11", "--platform", X86_64.wheel, "--index-url", url]
        done = subprocess.run(
            [*command, "--dest", str(tmp_path / "got"), "monarch_backend"], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got" / path.name).read_bytes() == path.read_bytes()
    assert f"#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}" in page
    assert 'data-requires-python="&gt;=3.10"' in page


PYCONFIG = """
#define HAVE_GCC_ASM_FOR_X64 1
/* #undef HAVE_KQUEUE */
/* #undef HAVE_USABLE_WCHAR_T */
#define PY_SUPPORT_TIER 1
/* #undef Py_GIL_DISABLED */
#define SIZEOF_LONG 8
# define _POSIX_C_SOURCE 200809L
"""


@pytest.mark.parametrize(
    ("target", "has_platform", "changed"),
    [
        (Target("3.14", X86_64), True, set()),
        (Target("3.14t", X86_64), True, {"#define Py_GIL_DISABLED 1"}),
        (
            Target("3.12", AARCH64),
            False,
            {"/* #undef HAVE_GCC_ASM_FOR_X64 */", "#define HAVE_USABLE_WCHAR_T 1", "#define PY_SUPPORT_TIER 2"},
        ),
        (
            Target("3.12", MACOS),
            False,
            {
                "/* #undef HAVE_GCC_ASM_FOR_X64 */",
                "/* #undef _POSIX_C_SOURCE */",
                "#define HAVE_KQUEUE 1",
                "#define PY_SUPPORT_TIER 2",
            },
        ),
    ],
)
def test_pyconfig_of_other_platforms(target: Target, has_platform: bool, changed: set[str]) -> None:
    text = adapted_pyconfig(PYCONFIG, target, has_platform=has_platform)
    assert set(text.splitlines()) - set(PYCONFIG.splitlines()) == changed
    assert len(text.splitlines()) == len(PYCONFIG.splitlines())


def test_table_has_a_line_for_each_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    results = table.Results(tmp_path / "results.json")
    results.begin(Target("3.11", X86_64), built="1.6 MB")
    results.add(Target("3.11", X86_64), installed="2.0 s", smoke="ok, torch 2.13.0", on="Python 3.11.7")
    for python in ("3.12", "3.14t"):
        results.begin(Target(python, AARCH64), built="1.5 MB")
    results.begin(Target("3.12", X86_64), built="1.6 MB")
    results.begin(Target("3.12", MACOS), built="1.3 MB")
    results.begin(Target("3.13", MACOS), built="1.3 MB")
    results.begin(Target("3.13", MACOS), failed="no member 'x'")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    again = table.Results(results.path)
    table.insert(page, table.long_table(again))
    text = page.read_text()
    assert "| 3.11 | manylinux_2_28_x86_64 | 1.6 MB | 2.0 s | ok, torch 2.13.0 | Python 3.11.7 |" in text
    assert "| 3.14t | manylinux_2_28_aarch64 | 1.5 MB | not run | not run |  |" in text
    reason = "not run: no interpreter, Debian has none for aarch64"
    assert f"| 3.12 | manylinux_2_28_aarch64 | 1.5 MB | {reason} | {reason} |  |" in text
    assert "| 3.12 | manylinux_2_28_x86_64 | 1.6 MB | not run | not run |  |" in text
    assert "| 3.10 | manylinux_2_28_x86_64 | not built | no wheel | no wheel |  |" in text
    assert "| 3.12 | macosx_11_0_arm64 | 1.3 MB | not run: needs a Mac | not run: needs a Mac |  |" in text
    assert "| 3.13 | macosx_11_0_arm64 | failed: no member 'x' | no wheel | no wheel |  |" in text
    assert text.count("\n| 3.") == len(all_targets()) and "old" not in text and text.endswith("after\n")
    assert "| linux-x86_64 | no | tested | built | no |" in table.short_table(again)
    assert table.short_table(again).count("built") == 4
    assert "| macos-arm64 | no | no | built | failed | no |" in table.short_table(again)
    page.write_text("no place")
    with pytest.raises(RuntimeError, match="no place for the table"):
        table.insert(page, "")


def test_a_failed_smoke_test_is_in_the_short_table(tmp_path: Path) -> None:
    results = table.Results(tmp_path / "results.json")
    results.begin(Target("3.10", X86_64), built="1.6 MB")
    results.add(Target("3.10", X86_64), smoke="FAILED, torch 2.13.0")
    assert "| linux-x86_64 | test failed | no |" in table.short_table(results)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("warning: x\na.cpp:1:2: error: use of 'a | b'\nb.cpp: error: later", "use of 'a / b'"),
        ("first\nlast line\n", "last line"),
    ],
)
def test_the_first_error_of_a_build_is_one_line(output: str, line: str) -> None:
    assert build.first_error(output) == line


def test_requirements_of_torch_are_those_of_the_target(tmp_path: Path) -> None:
    folder = tmp_path / "lib" / "python3.15" / "site-packages" / "torch-2.15.0.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", "Name: torch", "Version: 2.15.0"]
    lines += ["Requires-Dist: filelock", 'Requires-Dist: triton==3.8; python_version < "3.15"']
    lines += [
        'Requires-Dist: newer>=2; python_version >= "3.15"',
        'Requires-Dist: mkl==1; platform_machine == "x86_64"',
    ]
    lines += ['Requires-Dist: arm==1; platform_machine == "aarch64"', 'Requires-Dist: optree; extra == "optree"']
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    found = ForeignTorch(Target("3.15", AARCH64), tmp_path, "2.15.0").required_by_torch()
    assert found == ["filelock", "newer>=2", "arm==1"]


def test_pages_have_a_place_for_their_tables() -> None:
    for page in (table.PAGE, table.README):
        assert page.read_text().count(table.BEGIN) == 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(
    not shutil.which("apt-get") or sys.platform != "linux", reason="headers come from Debian's packages"
)
def test_a_wheel_from_the_source_distribution_works(tmp_path: Path) -> None:
    """Build a wheel with zig, check it, install it from an index on loopback, and use it in a clean environment."""
    for tool in ("ziglang", "auditwheel", "twine", "check_wheel_contents", "build"):
        pytest.importorskip(tool, reason="pip install -e '.[wheels]'")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    dist, results = tmp_path / "dist", ["--results", tmp_path / "results.json"]
    for words in (
        ["build", "--python", here, "--platform", sysconfig.get_platform(), "--out", dist, *results],
        ["check", dist],
        ["smoke", dist, "--here", *results],
    ):
        command = [sys.executable, "-m", f"tools.wheels.{words[0]}", *map(str, words[1:])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    ((_, result),) = table.Results(tmp_path / "results.json").all.items()
    assert result["smoke"].startswith("ok, torch")
    (wheel,) = dist.glob("*.whl")
    metadata = index.metadata(wheel)
    assert metadata["Summary"] == "PyTorch distributed backend, actors and remote DTensors from one controller"
    assert metadata["License-Expression"] == "BSD-3-Clause"
