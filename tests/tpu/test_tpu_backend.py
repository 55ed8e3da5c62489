"""Device "tpu" of the torch-tpu package: how its registrations are found, tested with a stand-in for the package.

torch-tpu 0.2 renames PrivateUse1 to "tpu". If it sees a TPU, it registers a compiled `c10d::Backend` under the names
"tpu_dist" and "tpu". There are two stand-ins that register in the same way. One is torch's FakeProcessGroup, which is
compiled and takes tensors of any device. The other is a recorder of its calls. Both are used in forked ranks, because
the renaming of a device cannot be undone. The real package is tested as far as it works without a TPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import backend_registration

import monarch_backend
from monarch_backend import GroupClosedError, NoRouteError
from monarch_backend._core import platform
from monarch_backend._telemetry import program_recording, sql
from monarch_backend.process_group import _backend_selection
from tests.support.ranks import init, run_ranks

INSTALLED = importlib.util.find_spec("torch_tpu") is not None
CAN_RENAME = hasattr(backend_registration, "_setup_privateuseone_for_python_backend") and not INSTALLED
needs_device = pytest.mark.skipif(
    not CAN_RENAME,
    reason='this torch can\'t make a device "tpu" from Python: 2.13 and later can, unless torch-tpu is installed',
)


class _Recorder:
    """A process group that records its collectives. Every work is done at once."""

    def __init__(self, *created_with: Any) -> None:
        self.created_with = created_with
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("_") and not name.endswith("_base")) or name.startswith("supports_"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            future: torch.futures.Future[None] = torch.futures.Future()
            future.set_result(None)
            return torch._C._distributed_c10d._create_work_from_future(future)

        return call


def _fake(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup._create_internal(rank, size)


_kernels: list[torch.library.Library] = []  # the kernels are removed when their library is freed


def _add_kernels() -> None:
    """Register kernels of the fake group and of functional collectives, for a device without memory."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_copy_from", lambda source, target, non_blocking=False: target, "PrivateUse1")
    library.impl("zero_", lambda tensor: tensor, "PrivateUse1")
    for name in ("as_strided", "empty.memory_format", "empty_strided"):
        library.impl(name, lambda *args, **kwargs: _on_tpu(4), "PrivateUse1")
    _kernels.append(library)


def _load_stand_in(create: Callable[..., Any]) -> None:
    backend_registration._setup_privateuseone_for_python_backend("tpu")
    for name in ("tpu_dist", "tpu"):  # in the order of torch-tpu's loader: the first name becomes the default
        dist.Backend.register_backend(name, create, devices=["tpu"])
    assert dist.Backend.default_device_backend_map["tpu"] == "tpu_dist"


def _on_tpu(size: int = 4) -> torch.Tensor:
    return torch._C._acc.create_empty_tensor((size,), torch.float32)


def _created(rank: int, address: str) -> str:
    made: list[_Recorder] = []

    def create(*args: Any) -> _Recorder:
        made.append(_Recorder(*args))
        return made[-1]

    _load_stand_in(create)
    init(rank, 2, address, seconds=17.0)
    [first] = made  # created with the group, because C++ callers may ask for the backend before the first tensor
    store, *rest = first.created_with
    assert rest == [rank, 2, timedelta(seconds=17)]
    store.set(f"from {rank}", "hello")  # the backend has a working store of its own
    store.wait([f"from {1 - rank}"], timedelta(seconds=20))
    group = dist.new_group([1, 0], timeout=timedelta(seconds=9))
    assert made[1].created_with[1:] == (rank, 2, timedelta(seconds=9))
    assert group._get_backend(torch.device("tpu")) is made[1]
    group.set_timeout(timedelta(seconds=8))
    assert made[1].calls == [("set_timeout", (timedelta(seconds=8),))]
    assert {"cpu", "tpu"} == set(monarch_backend.routes()) == set(monarch_backend.routes(group))
    dist.destroy_process_group(group)
    assert made[1].calls[-1][0] == "shutdown"
    assert made[0].calls == []
    with pytest.raises(GroupClosedError):
        group.allreduce([_on_tpu()])
    dist.destroy_process_group()
    return str(_backend_selection.choose("tpu"))


@needs_device
def test_the_package_s_group_is_made_with_ours(capfd: pytest.CaptureFixture[str]) -> None:
    route = "tpu -> tpu_dist ('tpu' tensors take the group registered for them)"
    assert run_ranks(_created, 2, backend=None, env={"MONARCH_DEBUG": "1"}) == [route] * 2
    assert capfd.readouterr().err.count(f"group 0: {route}") == 2


# torch 2.13 renames these two and warns about the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "allreduce": lambda out, x: dist.all_reduce(out),
    "reduce": lambda out, x: dist.reduce(out, 0),
    "broadcast": lambda out, x: dist.broadcast(out, 1),
    "allgather": lambda out, x: dist.all_gather([out, out], x),
    "_allgather_base": lambda out, x: all_gather_single(_on_tpu(8), x),
    "reduce_scatter": lambda out, x: dist.reduce_scatter(out, [x, x]),
    "_reduce_scatter_base": lambda out, x: reduce_scatter_single(_on_tpu(2), x),
    "alltoall_base": lambda out, x: dist.all_to_all_single(out, x),
    "alltoall": lambda out, x: dist.all_to_all([out, out], [x, x]),
    "gather": lambda out, x: dist.gather(x, [out, out] if dist.get_rank() == 0 else None, 0),
    "scatter": lambda out, x: dist.scatter(out, [x, x] if dist.get_rank() == 0 else None, 0),
    "send": lambda out, x: dist.send(x, 1 - dist.get_rank()),
    "recv": lambda out, x: dist.recv(out, 1 - dist.get_rank()),
    "barrier": lambda out, x: dist.barrier(device_ids=[0]),
}


def _arrives(rank: int, address: str) -> None:
    recorder = _Recorder()
    _load_stand_in(lambda *args: recorder)
    init(rank, 2, address)
    for name, call in CALLS.items():
        call(_on_tpu(), _on_tpu())
        assert recorder.calls.pop()[0] == name
    assert recorder.calls == []
    x = torch.full((2,), float(rank + 1))
    dist.all_reduce(x)  # CPU tensors use Gloo in the same group
    dist.barrier()
    assert x.tolist() == [3.0, 3.0]
    assert recorder.calls == []
    dist.destroy_process_group()


@needs_device
def test_every_collective_reaches_the_tpu_group() -> None:
    run_ranks(_arrives, 2, backend=None)


def _is_recorded(_rank: int, address: str) -> None:
    _load_stand_in(lambda *args: _Recorder())
    init(_rank, 2, address)
    for call in CALLS.values():
        call(_on_tpu(), _on_tpu())
    own = program_recording.read_pids([os.getpid()])
    query = "select detail, dtype, number from collectives where name = 'group 0 on tpu' order by number"
    rows = sql.answer(query, own).rows
    operations = (
        "all_reduce", "reduce", "broadcast", "all_gather", "all_gather", "reduce_scatter", "reduce_scatter",
        "all_to_all", "all_to_all", "gather", "scatter",
    )  # fmt: skip
    assert rows == [
        *((name, "float32", number) for number, name in enumerate(operations, 1)), ("barrier", None, 12)
    ]  # fmt: skip
    dist.destroy_process_group()


@needs_device
@pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")
def test_every_collective_is_recorded_when_it_is_enqueued() -> None:
    run_ranks(_is_recorded, 2, backend=None)


def _compiled(rank: int, address: str) -> None:
    _load_stand_in(_fake)
    _add_kernels()
    init(rank, 2, address, device_id=torch.device("tpu:0"))
    group = dist.group.WORLD
    assert group.bound_device_id == torch.device("tpu:0")
    assert group._get_backend(torch.device("tpu")).name() == "fake"
    # CommDebugMode counts the calls of torch's dispatcher, where the compiled base class finds the same group.
    counted = CommDebugMode()
    for mode in (contextlib.nullcontext(), counted):
        with mode:
            for call in CALLS.values():
                call(_on_tpu(), _on_tpu())
    assert counted.get_total_counts() == len(CALLS) - 3  # CommDebugMode does not count send, recv and barrier
    assert funcol.all_reduce(_on_tpu(), "sum", group).device.type == "tpu"
    mesh = init_device_mesh("tpu", (2,))
    assert mesh.get_group() is group
    dist.destroy_process_group()


@needs_device
def test_a_compiled_group_is_registered_with_the_base_class() -> None:
    run_ranks(_compiled, 2, backend=None)


def _unrouted(rank: int, address: str) -> str:
    backend_registration._setup_privateuseone_for_python_backend("tpu")
    init(rank, 1, address)
    with pytest.raises(NoRouteError) as caught:
        dist.all_reduce(_on_tpu())
    dist.destroy_process_group()
    return str(caught.value)


@needs_device
def test_tpu_tensor_without_the_package_names_the_package() -> None:
    [text] = run_ranks(_unrouted, 1, backend=None)
    assert text.startswith("no route for tensors on device 'tpu': no package registered a backend for 'tpu'; ")
    assert "pip install torch-tpu" in text or "found no TPU on this machine" in text
    assert "Routes of this group: cpu -> shm" in text
    assert "rank 0 of 1" in text


def _late(rank: int, address: str) -> None:
    backend_registration._setup_privateuseone_for_python_backend("npu")
    init(rank, 1, address)
    with pytest.raises(NoRouteError, match="import the package that brings 'npu' devices before init_process_group"):
        dist.all_reduce(_on_tpu())
    recorder = _Recorder()
    dist.Backend.register_backend("npu_dist", lambda *args: recorder, devices=["npu"])
    dist.all_reduce(_on_tpu())
    assert recorder.calls[0][0] == "allreduce"
    dist.destroy_process_group()


@needs_device
def test_any_other_device_and_a_package_that_comes_late() -> None:
    run_ranks(_late, 1, backend=None)


def test_package_without_a_tpu_gets_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert _backend_selection.choose("tpu").missing.endswith("torch-tpu is installed and found no TPU on this machine")


def test_a_registered_device_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "tpu", "tpu_dist")
    monkeypatch.setattr(torch, "tpu", object(), raising=False)
    assert _backend_selection.choose("tpu").missing == "torch sees no 'tpu' device on this machine"


def test_torch_s_own_fake_backend_is_no_route() -> None:
    # torch registers "fake" for "hpu", which has no other default.
    assert not _backend_selection.choose("hpu").available


REAL = """
import torch, torch_tpu, torch.distributed as dist
from torch_tpu import _loader
_loader._init_device("tpu")  # what loading does where there is a TPU; the TPU itself is opened later
dist.init_process_group("monarch", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
from monarch_backend.process_group import _backend_selection
print(_backend_selection.survey()["tpu"])
dist.destroy_process_group()
"""


@pytest.mark.skipif(not INSTALLED, reason="torch-tpu is not installed here")
def test_real_package_registers_the_same_names() -> None:
    # otherwise the package waits half a minute for a cloud's metadata server
    env = {**os.environ, "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("tpu -> tpu_dist (")
