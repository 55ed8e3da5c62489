"""Each kind of access to the memory of a remote tensor returns its values or raises. None crashes the program."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from monarch_backend.dtensor import NotReadableError, RemoteTensor, run
from tests.dtensor import worker_functions
from tests.dtensor.conftest import DEVICE
from tests.dtensor.data_pointer import address_of
from tests.dtensor.values import same

WHOLE = torch.arange(12.0).view(4, 3)

KINDS: dict[str, Callable[[Any], Any]] = {
    "dtensor": lambda x: x,
    "uneven": lambda x: distribute_tensor(torch.ones(5, 2), x.device_mesh, [Shard(0)]),
    "result": lambda x: x * 2,
    "view": lambda x: x.view(12),
    "parameter": nn.Parameter,
    "activation": lambda x: x.clone().requires_grad_() * 2,
    "shard": lambda x: x.to_local(),
    "view of a shard": lambda x: x.to_local()[1:],
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "ctypes": lambda x: ctypes.c_float.from_address(x.data_ptr()).value,
    "untyped_storage": lambda x: x.untyped_storage().data_ptr(),
    "its list": lambda x: x.untyped_storage().tolist(),
    "its bytes": lambda x: bytes(x.untyped_storage()),
    "its first byte": lambda x: x.untyped_storage()[0],
    "its copy": lambda x: x.untyped_storage().clone(),
    "its copy in shared memory": lambda x: x.untyped_storage().share_memory_(),
    "copy of it": lambda x: copy.deepcopy(x.untyped_storage()),
    "pickle of it": lambda x: pickle.dumps(x.untyped_storage()),
    "written into it": lambda x: x.untyped_storage().fill_(0),
    "storage": lambda x: x.storage(),
    "share_memory_": lambda x: x.share_memory_(),
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x.detach()),
    "from_dlpack": lambda x: torch.from_dlpack(x.detach()),
    "NumPy's from_dlpack": lambda x: np.from_dlpack(x.detach()),
    "apply_": lambda x: x.detach().apply_(lambda number: number),
    "const_data_ptr, read": lambda x: ctypes.string_at(address_of(x), 4),
    "const_data_ptr, written": lambda x: ctypes.memset(address_of(x), 1, 4),
    "map_": lambda x: x.detach().map_(x.detach(), lambda number, _: number),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", REFUSED)
def test_access_to_the_memory_itself_is_refused(mesh_of: Callable[[str], Any], way: str, kind: str) -> None:
    x = KINDS[kind](distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its TypedStorage
        with pytest.raises(NotReadableError, match=r"in other processes.*\.numpy\(\).*monarch_backend\.dtensor\.run"):
            REFUSED[way](x)


NO_BUFFERS: dict[str, Callable[[Any], Any]] = {
    "memoryview": memoryview,
    "frombuffer": lambda x: torch.frombuffer(x, dtype=torch.float32),
    "set_": lambda x: torch.empty(0).set_(x.untyped_storage()),
}


@pytest.mark.parametrize("way", NO_BUFFERS)
def test_remote_tensor_has_no_buffer_protocol(mesh_of: Callable[[str], Any], way: str) -> None:
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)])
    for each in (x, x.to_local()):
        with pytest.raises((TypeError, ValueError), match=r"buffer|bytes-like|RemoteStorage"):
            NO_BUFFERS[way](each)


def test_functions_that_read_values_get_them(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)])
    for each, expected in ((x, WHOLE), (x.to_local(), WHOLE[:2])):
        for found in (each.__array__(), each.__array__(np.float64), np.asarray(each)):
            np.testing.assert_equal(found, expected.numpy())
    same(copy.deepcopy(x), WHOLE)
    same(copy.deepcopy(nn.Parameter(x)), WHOLE)
    written = io.BytesIO()
    torch.save(x.to_local(), written)
    written.seek(0)
    same(torch.load(written), WHOLE[:2])
    same(pickle.loads(pickle.dumps(x.to_local())), WHOLE[:2])


def test_the_interface_of_gpus(mesh_of: Callable[[str], Any]) -> None:
    """numba and CuPy read this attribute of every object."""
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)])
    assert not hasattr(x, "__cuda_array_interface__") and not hasattr(x.to_local(), "__cuda_array_interface__")
    on_gpus = x.to_local()
    on_gpus._meta = copy.copy(on_gpus._meta)
    on_gpus._meta.device = torch.device("cuda", 0)
    for each in (on_gpus, DTensor.from_local(x.to_local(), x.device_mesh, [Shard(0)])):
        if isinstance(each, DTensor):
            each._local_tensor = on_gpus
        with pytest.raises(NotReadableError, match=r"__cuda_array_interface__: .*in other processes"):
            getattr(each, "__cuda_array_interface__")  # noqa: B009


def test_storage_reports_its_size(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)])
    for each, size in ((x, 48), (x.to_local(), 24)):
        storage = each.untyped_storage()
        assert storage.size() == storage.nbytes() == len(storage) == size
        assert storage._cdata == each.untyped_storage()._cdata
        assert "in other processes" in repr(storage) and not hasattr(storage, "__array__")
        assert not each.is_shared()
    with pytest.raises(NotReadableError):
        x.untyped_storage().resize_(0)


def test_c_plus_plus_that_asks_for_the_memory(mesh_of: Callable[[str], Any]) -> None:
    """C++ gets an error instead of address 0. `_to_dlpack` is an example of such C++."""
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)])
    made = [x, x.detach(), x.view(12), x.redistribute(placements=[Replicate()]), x.add_(1), x.full_tensor()]
    made += [(x * 2).to_local(), x.to_local()[1:], nn.Parameter(x).detach(), torch.cat([x, x]), x.split(2, 1)[1]]
    made += [x * 2 for _ in range(3)]  # Python makes the first; C++ may make the others, as the operation is known
    made += [torch.compile(lambda x: x * 2, backend="monarch", options={"inductor": False})(x), x[x > 0]]
    for each in made:
        with pytest.raises(RuntimeError, match="Cannot access data pointer of Tensor"):
            torch._C._to_dlpack(each)  # type: ignore[attr-defined]
        with pytest.raises(NotReadableError):
            ctypes.string_at(address_of(each), 4)
    for each in (x, x.to_local()):
        with pytest.raises(RuntimeError, match="Cannot access data pointer of Tensor"):
            torch.Tensor.data_ptr(each)


def test_tensors_of_a_process_have_their_memory(mesh_of: Callable[[str], Any]) -> None:
    """On the controller and on the workers, where they are torch's own DTensors, plain tensors have memory."""
    here = torch.ones(3)
    assert here.data_ptr() == here.untyped_storage().data_ptr() != 0
    assert torch.equal(torch.from_dlpack(here), here)
    assert torch.equal(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(here)), here)
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)])
    if DEVICE == "cpu":
        assert set(run(x.device_mesh, worker_functions.reads_its_memory, x).get().values()) == {True}
    assert isinstance(x.to_local(), RemoteTensor)
