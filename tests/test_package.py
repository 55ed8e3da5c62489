"""The package: exports, entry points, doctests, and the content of the wheel."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import os
import pickle
import pkgutil
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch.distributed as dist

import monarch_backend
from monarch_backend import _autoload, _native
from monarch_backend._core import torch_version
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[1]
MODULES = sorted(m.name for m in pkgutil.walk_packages(monarch_backend.__path__, "monarch_backend."))


def test_public_names_resolve() -> None:
    for name in monarch_backend.__all__:
        assert getattr(monarch_backend, name) is not None
    assert set(monarch_backend.__all__) <= set(dir(monarch_backend))
    with pytest.raises(AttributeError, match="no attribute 'missing'; it has"):
        monarch_backend.missing  # noqa: B018


@pytest.mark.parametrize("name", ["monarch_backend", *MODULES])
def test_docstrings(name: str) -> None:
    if name.endswith("_native"):
        pytest.skip("compiled; its docstrings have no examples")
    if name.endswith((".providers.pyverbs", ".providers.ibverbs")):
        pytest.importorskip(name.rpartition(".")[2], reason="the package that it adapts is not installed")
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} does not say what lives in it"
    if any(found.examples for found in doctest.DocTestFinder().find(module)):
        assert run_ranks(_examples, 1, name, backend=None) == [0]


# in a process of its own, so that the objects of an example end with it
def _examples(rank: int, address: str, name: str) -> int:
    return doctest.testmod(importlib.import_module(name)).failed


def test_exported_exceptions_show_their_public_path() -> None:
    found = set()
    for name in ["monarch_backend", *MODULES]:
        if any(part.startswith("_") for part in name.split(".")):
            continue
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", ()):
            kind = getattr(module, exported)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                found.add(kind)
                assert not re.search(r"\._", kind.__module__), f"{name}.{exported} is in {kind.__module__}"
                assert pickle.loads(pickle.dumps(kind)) is kind
                line = traceback.format_exception_only(kind, kind.__new__(kind))[-1]
                assert line.startswith(f"{kind.__module__}.{exported}"), line
    assert len(found) > 20


def test_entry_points_are_ours() -> None:
    for group, target in {
        "torch.backends": "monarch_backend._autoload:torch_backends_entry",
        "torch.distributed.backends": "monarch_backend._autoload:register",
    }.items():
        (entry,) = (e for e in importlib.metadata.entry_points(group=group) if e.name == "monarch")
        assert entry.value == target


SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group("monarch", init_method="file://{store}", rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
print(dist.get_backend(), x.tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("autoload", ["1", "0"])
def test_no_import_needed(tmp_path: Path, autoload: str) -> None:
    """With autoload, the entry point imports the package.

    With TORCH_DEVICE_BACKEND_AUTOLOAD=0 the script imports it.
    """
    script = SCRIPT.format(store=tmp_path / "store")
    if autoload == "0" and _autoload._needs_stand_ins(dist):
        script = "import monarch_backend\n" + script
    env = dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout == "monarch [2.0, 2.0]\n".replace("2.0", "1.0")


def test_import_torch_imports_little() -> None:
    code = "import torch, sys; print(*sorted(m for m in sys.modules if m.startswith('monarch_backend')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    allowed = {"monarch_backend", "monarch_backend._autoload"}
    assert set(out.stdout.split()) <= allowed


HOST = """
import sys
import monarch_backend.cli
from monarch_backend._hosts import daemon
from monarch_backend._hosts import startup_handshake
from monarch_backend._hosts.protocol import Versions
daemon, versions = daemon.Daemon(bytes(32)), Versions.here()
daemon.start("127.0.0.1", 0)
daemon.close()
print(*(name for name in ("torch", "numpy") if name in sys.modules))
import torch
print(versions == Versions.here(), "monarch" in torch.distributed.Backend.backend_list)
"""


def test_a_hosts_daemon_imports_no_torch() -> None:
    """If a program imports torch later, torch has the backend, too."""
    out = subprocess.run([sys.executable, "-c", HOST], capture_output=True, text=True, timeout=120)
    known = str(_autoload._needs_stand_ins(dist))  # else torch asks for the backend at its first use
    assert (out.stdout, out.returncode) == (f"\nTrue {known}\n", 0), out.stdout + out.stderr


def test_a_broken_hook_does_not_break_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(_autoload, "_needs_stand_ins", lambda _: True)
    monkeypatch.setattr(_autoload, "register", broken)
    with pytest.warns(UserWarning, match="could not register with torch .*: no luck"):
        _autoload.torch_backends_entry()


def test_second_registration_has_no_effect() -> None:
    before = dict(dist.Backend._plugins), dist.monitored_barrier
    _autoload.register()
    assert (dict(dist.Backend._plugins), dist.monitored_barrier) == before
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


@pytest.mark.parametrize("version", ["2.8.1", "2.16.0a0+git1", "3.0"])
def test_unsupported_version_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch_version.torch, "__version__", version)
    torch_version.remark.cache_clear()
    with pytest.warns(UserWarning, match=re.escape(version)) as caught:
        line = torch_version.remark()
    assert "\n" not in line
    assert len(caught) == 1
    torch_version.remark.cache_clear()


def test_a_version_inside_is_not_remarked() -> None:
    torch_version.remark.cache_clear()
    assert torch_version.remark() == ""


@pytest.mark.parametrize("installed", [False, True])
def test_source_folder_without_compiled_core_names_the_remedy(tmp_path: Path, installed: bool) -> None:
    """``installed``: whether `sys.path` has another copy of the package, which the source folder hides."""
    clone = tmp_path / "clone"
    package = ROOT / "monarch_backend"
    shutil.copytree(package, clone / "monarch_backend", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    (clone / "csrc").mkdir()
    script = clone / "use.py"  # the interpreter puts the script's folder first in `sys.path`
    hide = "" if installed else f"import sys; sys.path.remove({str(ROOT)!r})\n"
    script.write_text(hide + "from monarch_backend import _native\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    (line,) = (line for line in out.stderr.splitlines() if line.startswith("ImportError: "))
    assert f"source folder {clone / 'monarch_backend'}, which has no compiled core" in line
    assert f"pip install -e {clone}" in line and "make setup" in line
    assert (f"hides the installed package in {package}" in line) == installed
    assert (f"run the program from a directory outside {clone}" in line) == installed


def test_csrc_never_includes_torch() -> None:
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".hpp", ".cpp", ".cc"}]
    assert sources
    for source in sources:
        for include in re.findall(r'#\s*include\s*[<"]([^>"]+)[>"]', source.read_text()):
            assert not re.match(r"(torch|ATen|c10|caffe2|cuda|nccl|hip)", include), f"{source.name}: {include}"


def test_the_extension_needs_no_torch_library() -> None:
    data = Path(_native.__file__).read_bytes()
    for library in (b"libtorch", b"libc10"):
        assert library not in data


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("readelf"), reason="asks readelf")
def test_the_extension_needs_no_driver() -> None:
    """The extension opens libcuda, libamdhip64 and libssl at run time, if they exist and are needed."""
    done = subprocess.run(["readelf", "-d", _native.__file__], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[([^]]*)\]", done.stdout)
    assert any(name.startswith("libstdc++") for name in needed), done.stdout
    assert not [name for name in needed if re.match(r"lib(cuda|amdhip|ssl|crypto|ibverbs)", name)], needed


def test_native_stub_matches() -> None:
    stub = (ROOT / "monarch_backend" / "_native.pyi").read_text()
    declared = set(re.findall(r"^(?:def |class )?(\w+)(?=\(|: |:$)", stub, re.M))
    if _native.is_portable:
        declared = {name for name in declared if not name.startswith("Verbs")}
    assert declared == {n for n in dir(_native) if not n.startswith("_")}


def test_native_probes() -> None:
    assert isinstance(_native.boot_id(), str)
    assert set(_native.kernel_features()) == {"memfd_create", "pidfd_open", "process_vm_readv", "futex"}
    if not _native.is_portable:
        assert _native.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert _native.ipc_namespace().startswith("ipc:[")
        flags = Path("/proc/cpuinfo").read_text()
        assert all(f in flags for f in _native.cpu_features())
