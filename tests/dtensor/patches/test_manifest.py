"""The replaced names of torch are exactly those of the manifests. Other meshes get torch's own functions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import patches, torch_version
from monarch_backend._core.patches import Patch
from monarch_backend.dtensor._patches import manifest
from monarch_backend.process_group._c10d_manifest import C10D, NAMED_AS

ROOT = Path(__file__).parents[3]
ROWS = (*manifest.PATCHES, *manifest.WORKER_XLA, *manifest.WORKER_INDUCTOR, *C10D, *NAMED_AS)

COMPARE = """
import inspect, json, sys, types

def names():
    # Of torch's modules and classes: the objects by name, the code of functions, and the bases of classes.
    found, classes = {}, set()
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                found[f"{name}:{key}"] = value
                if inspect.isclass(value) and (value.__module__ or "").partition(".")[0] == "torch":
                    classes.add(value)
    for cls in classes:
        found.update({f"{cls.__module__}:{cls.__qualname__}.{key}": value for key, value in vars(cls).items()})
        found[f"{cls.__module__}:{cls.__qualname__}.__bases__"] = cls.__bases__
    functions = {id(f): f for f in map(function_of, found.values()) if f is not None}
    for function in functions.values():
        if (function.__module__ or "").partition(".")[0] == "torch":
            found[f"code of {function.__module__}:{function.__qualname__}"] = function.__code__
    for name, value in INSTANCES.items():
        found[name] = value.__class__
    return found

def function_of(value):
    value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    value = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
    return value if isinstance(value, types.FunctionType) else None

def changed(before, after):
    kinds = (
        types.FunctionType, types.BuiltinFunctionType, types.CodeType, property, type, staticmethod, classmethod, tuple
    )
    return sorted(
        name.removeprefix("code of ") for name, value in after.items()
        if (name in before or "." in name.partition(":")[2]) and isinstance(value, kinds)
        and (before.get(name) != value if isinstance(value, tuple) else before.get(name) is not value)
    )
"""

CONTROLLER = """
import torch
import monarch_backend.dtensor
monarch_backend.dtensor.device_mesh
from monarch_backend._core import patches
from monarch_backend.dtensor._patches import manifest
from monarch_backend.dtensor._patches import trace_installation
from monarch_backend._core.torch_version import torch_version
INSTANCES = {}
ROWS = [row for row in manifest.PATCHES if row.is_for(torch_version())]
for row in ROWS:
    owner, name = patches.locate(row)
    if name == "__class__":
        INSTANCES[row.target] = owner
    for maker in row.makers:
        patches.named(maker)
before = names()
trace_installation.install()
found = changed(before, names())
listed = set()
for row in ROWS:
    owner, name = patches.locate(row)
    if row.swaps_code:
        function = inspect.unwrap(getattr(owner, name))
        listed.add(f"{function.__module__}:{function.__qualname__}")
    elif inspect.isclass(owner):
        listed.add(f"{owner.__module__}:{owner.__qualname__}.{name}")
    else:
        listed.add(row.target)
print(json.dumps([found, sorted(listed)]))
"""

PLAIN = """
import torch, torch.distributed as dist
import torch.distributed.nn
INSTANCES = {}
before = names()
import monarch_backend
from monarch_backend import _autoload
_autoload.torch_backends_entry()
dist.init_process_group("monarch", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
dist.barrier()
found = changed(before, names())
print(json.dumps(found))
dist.destroy_process_group()
"""

COMPILING_WORKER = """
import torch._inductor
from torch.fx.experimental.proxy_tensor import make_fx
import monarch_backend.process_group
INSTANCES = {}
before = names()
from monarch_backend.dtensor._worker import grouped_mm
grouped_mm.install()
print(json.dumps(changed(before, names())))
"""

COMPARE_SHARDS = """
import torch, torch.distributed as dist
from monarch_backend import _native
_native.park_threads_at_exit()  # Gloo's threads drop tensors, and abort if the interpreter is ending then
from monarch_backend.dtensor._patches import installation
installation.install()
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

mesh = init_device_mesh("cpu", (2,))
one = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)])
other = DTensor.from_local(torch.full((2,), float(dist.get_rank())), mesh, [Shard(0)])
assert torch.equal(one, one) and not torch.equal(one, other)
assert DTensor.from_local(torch.tensor(3.0), mesh, [Replicate()]).item() == 3
dist.destroy_process_group()
"""

OTHER_MESH = """
import torch, torch.distributed as dist
import monarch_backend.dtensor
monarch_backend.dtensor.device_mesh
from monarch_backend.dtensor._patches import trace_installation
trace_installation.install()
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, ones
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
assert list(mesh.get_coordinate()) == [0, 1] and mesh.get_rank() == 1 and mesh.get_local_rank("tp") == 1
assert dist.get_rank() == 1 and dist.get_rank(mesh.get_group("dp")) == 0
whole = torch.arange(24.0).view(4, 6)
x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)], src_data_rank=None)
assert type(x.to_local()) is torch.Tensor and torch.equal(x.to_local(), whole[:2, 3:]), x.to_local()
assert torch.equal((x * 2 + 1).to_local(), whole[:2, 3:] * 2 + 1)
assert x.device.type == "cpu" and x.is_cpu and not x.is_cuda and not x.is_meta
assert type(x.data) is DTensor and type(x.data_ptr()) is int
assert type(x.cpu()) is DTensor and x.to(torch.float64).to_local().dtype == torch.float64
assert [each.shape for each in x.redistribute(mesh, [Replicate(), Shard(1)])] == [torch.Size([6])] * 4
assert x.sum().placements == (Partial(), Partial()) and "local_tensor" in repr(x)
y = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Shard(1)])
assert y.shape == (4, 6) and type(ones(4, 6, device_mesh=mesh).to_local()) is torch.Tensor
assert (x == x)._local_tensor.all() and torch.split(x, 2, 1)[0].shape == (4, 2)
model = distribute_module(torch.nn.Linear(6, 4), mesh)
model(y).sum().backward()
assert type(model.weight.grad.to_local()) is torch.Tensor
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
sharded = fully_shard(torch.nn.Linear(6, 4), mesh=mesh["dp"])
sharded(torch.ones(2, 6)).sum().backward()
assert type(sharded.weight.to_local()) is torch.Tensor and sharded.weight.to_local().shape == (2, 6)
plain = torch.arange(4.0)
plain[1] = 7
assert plain[1] == 7 and (plain * 2)[1] == 14
assert torch.equal(torch.compile(lambda v: v * 2 + 1, backend="aot_eager")(whole), whole * 2 + 1)
torch.manual_seed(3)
first = torch.rand(2)
torch.manual_seed(3)
assert torch.equal(first, torch.rand(2))
if not torch.cuda.is_available():
    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError):
        pass
    else:
        raise AssertionError("a process without GPUs that is not a controller has a current GPU")
print("done")
"""


def run(source: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT,
        env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_controller_replaces_exactly_the_rows_of_its_manifest() -> None:
    found, listed = json.loads(run(COMPARE + CONTROLLER))
    assert found == listed
    rows = [row for row in manifest.PATCHES if row.is_for(torch_version.torch_version())]
    assert len(rows) == len({row.target for row in rows}) == len(listed)
    assert len(manifest.PATCHES) == len({row.target for row in manifest.PATCHES})


def test_program_with_the_backend_only_has_at_most_six_replaced_names() -> None:
    found = json.loads(run(COMPARE + PLAIN, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    wanted = sorted(row.target for row in C10D if row.is_for(torch_version.torch_version()))
    listed = [name for name in wanted if not name.endswith(":new_group")]  # only for torch_xla
    assert found == listed
    assert len(wanted) <= 6
    assert all(sum(row.is_for(release) for row in C10D) <= 6 for release in ((2, 9), (2, 13), (2, 14), (2, 15)))


def test_program_with_torchs_names_has_one_more_replaced_name() -> None:
    plain = json.loads(run(COMPARE + PLAIN, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    found = json.loads(run(COMPARE + PLAIN, TORCH_DEVICE_BACKEND_AUTOLOAD="0", MONARCH_AS="gloo"))
    assert found == sorted([*plain, *(row.target for row in NAMED_AS)])


def test_worker_that_compiles_has_the_rows_of_its_manifest() -> None:
    found = json.loads(run(COMPARE + COMPILING_WORKER, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    assert found == [row.target for row in manifest.WORKER_INDUCTOR if row.is_for(torch_version.torch_version())]


def test_meshes_of_other_backends_get_torchs_own_functions() -> None:
    assert run(OTHER_MESH) == "done"


def test_other_meshes_compare_the_shards_of_all_ranks(tmp_path: Path) -> None:
    """Rank 0 has equal shards, and torch must compare those of rank 1 too."""
    script = tmp_path / "compare.py"
    script.write_text(COMPARE_SHARDS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_row_names_a_test_that_exists_and_says_why(row: Patch) -> None:
    path, _, name = row.test.partition("::")
    text = (ROOT / path).read_text()
    assert f"def {name}(" in text or f"class {name}(" in text
    assert row.why.endswith(".") and row.kind in ("semantics", "fix", "cache")
    is_thread = re.fullmatch(r"pytorch/pytorch#\d+", row.upstream) is not None
    assert (is_thread or row.upstream == "not reported") if row.kind == "fix" else row.upstream == "none"


def test_each_row_of_this_release_is_in_torch() -> None:
    done = run("import sys; from monarch_backend.dtensor._patches import manifest; sys.exit(manifest.check())")
    assert done.startswith("0 of ")


def test_newer_torch_without_a_name_lacks_its_feature_only() -> None:
    newer = (torch_version.NEWEST[0], torch_version.NEWEST[1] + 1)
    there = Patch("json:load", "semantics", ("json:loads",), "A test.", "none", (2, 0))
    missing = Patch("json:gone", "semantics", ("json:loads",), "A test.", "none", (2, 0))
    feature = patches.Feature("A test's feature", (there, missing), (2, 0))
    own = json.load

    def refuse(own: Any) -> Any:
        def load(*args: Any, **options: Any) -> Any:
            patches.require(feature, newer)
            return own(*args, **options)

        return load

    try:
        assert not patches.apply_feature(feature, refuse, newer)
        with pytest.raises(patches.FeatureUnavailableError, match=r"A test's feature .* lacks json:gone. Use torch 2"):
            json.load(None)  # type: ignore[arg-type]
    finally:
        json.load = own
        patches.originals.pop("json:load")
    with pytest.raises(patches.FeatureUnavailableError, match=r"with torch 2\.1: use torch 2\.2 to "):
        patches.require(patches.Feature("A test's feature", (), (2, 2)), (2, 1))


def test_newer_torch_without_what_is_corrected_warns_once() -> None:
    newer = (torch_version.NEWEST[0], torch_version.NEWEST[1] + 1)
    missing = Patch("json:gone", "fix", ("json:loads",), "A test.", "none", (2, 0))
    with pytest.warns(UserWarning, match=r"newer than tested .*json:gone \(A test"):
        assert patches.apply((missing,), newer) == []


def test_missing_target_in_range_is_refused_before_anything_is_replaced() -> None:
    there = Patch("json:dumps", "fix", ("json:loads",), "A test.", "none", (2, 0))
    missing = Patch("json:JSONEncoder.gone", "fix", ("json:loads",), "A test.", "none", (2, 0))
    own = json.dumps
    with pytest.raises(patches.PatchTargetError, match=r"no json:JSONEncoder.gone.*2.0 up to the newest"):
        patches.apply((there, missing))
    assert json.dumps is own


def test_row_of_another_release_is_not_applied() -> None:
    row = Patch("json:gone", "fix", ("json:loads",), "A test.", "none", (2, 0), (2, 9))
    assert patches.apply((row,), release=(2, 9)) == []
    assert row.is_for((2, 8)) and not row.is_for((1, 13))


def test_page_is_generated_from_the_manifests() -> None:
    assert (ROOT / "docs" / "reference" / "torch-patches.md").read_text() == manifest.table()
