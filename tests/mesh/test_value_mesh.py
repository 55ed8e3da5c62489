"""ValueMesh: values by rank, compared with a numpy array of them."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.mesh_base import MeshBase
from monarch_backend._mesh.shape import Shape
from monarch_backend._mesh.value_mesh import ValueMesh

BOTH = Extent.of({"hosts": 2, "gpus": 4})
SQUARES = ValueMesh(BOTH, [i * i for i in range(8)])


@pytest.mark.parametrize("seed", range(40))
def test_values_are_where_numpy_has_them(seed: int) -> None:
    rng = random.Random(seed)
    labels = rng.sample(("hosts", "gpus", "tp", "cp"), rng.randint(0, 4))
    extent = Extent(labels, [rng.randint(1, 5) for _ in labels])
    values = [f"value {i}" for i in range(len(extent))]
    chosen: dict[str, Any] = {
        label: rng.choice(
            [rng.randrange(-size, size), slice(None, None, rng.choice([1, -1, 2])), slice(size // 2, None)]
        )
        for label, size in dict(extent).items()
    }
    mesh = ValueMesh(extent, values).slice(**chosen)
    array = np.asarray(np.array(values).reshape(extent.sizes)[tuple(chosen.values())])
    assert tuple(mesh.sizes.values()) == array.shape
    assert list(mesh.values()) == list(array.reshape(-1)) and len(mesh) == array.size
    assert list(mesh) == list(mesh.items())
    for rank, (point, value) in enumerate(mesh):
        assert point.rank == rank and point.extent == mesh.extent
        assert value == mesh.item(**point) == array[tuple(point.values())]
    flat = mesh.flatten("all")
    assert [flat.item(all=i) for i in range(len(mesh))] == list(mesh.values())
    assert list(flat.without([0]).values() if len(flat) > 1 else []) == list(array.reshape(-1))[1:]


def test_every_mesh_operation_is_there() -> None:
    assert isinstance(SQUARES, MeshBase)
    assert SQUARES.slice(hosts=1).item(gpus=-1) == 49
    assert SQUARES.split(gpus=("tp", "cp"), cp=2).item(hosts=1, tp=1, cp=0) == 36
    assert SQUARES.flatten("all").item(all=5) == 25 and SQUARES.rename(gpus="g").item(hosts=0, g=3) == 9
    assert SQUARES.size("gpus") == 4 and SQUARES.sizes == {"hosts": 2, "gpus": 4} and SQUARES.extent == BOTH
    assert list(SQUARES.without([0, 7]).values()) == [1, 4, 9, 16, 25, 36]
    assert SQUARES.slice(hosts=1, gpus=2).item() == 36


def test_slices_share_the_values() -> None:
    values: list[Any] = [object() for _ in range(8)]
    mesh = ValueMesh(BOTH, values)
    part = mesh.slice(hosts=1).slice(gpus=slice(1, 3))
    assert mesh._values is part._values is values
    assert part.item(gpus=0) is values[5]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_a_slice_keeps_only_its_values(protocol: int) -> None:
    whole = ValueMesh(BOTH, [bytes([i]) * 10_000 for i in range(8)])
    for mesh in (whole, whole.slice(gpus=1), whole.without([0, 3]), whole.slice(gpus=0, hosts=1), whole.flatten("x")):
        sent = pickle.dumps(mesh, protocol)
        assert len(sent) < 10_000 * len(mesh) + 1000
        back = pickle.loads(sent)
        assert type(back) is ValueMesh and back == mesh and back.extent == mesh.extent
        assert back.slice(**dict.fromkeys(mesh.sizes, 0)).item() == next(mesh.values())


def test_tensors_pickle_out_of_band() -> None:
    mesh = ValueMesh(Extent.of({"gpus": 2}), [np.arange(1000), np.ones(1000)])
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(mesh, 5, buffer_callback=buffers.append)
    assert len(buffers) == 2 and len(sent) < 1000
    back = pickle.loads(sent, buffers=buffers)
    assert np.shares_memory(back.item(gpus=0), mesh.item(gpus=0))


def test_equality() -> None:
    assert ValueMesh(BOTH, range(8)) == ValueMesh(BOTH, list(range(8)))
    assert ValueMesh(BOTH, range(8)) != ValueMesh(BOTH, range(1, 9))
    assert ValueMesh(BOTH, range(8)) != ValueMesh(Extent.of({"gpus": 8}), range(8))
    assert ValueMesh(BOTH, range(8)).slice(hosts=1) == ValueMesh(Extent.of({"gpus": 4}), [4, 5, 6, 7])
    assert [i * i for i in range(8)] != SQUARES
    assert copy.copy(SQUARES) == SQUARES == copy.deepcopy(SQUARES)
    tensors = ValueMesh(Extent.of({"gpus": 1}), [torch.ones(2)])
    assert tensors == tensors and tensors.slice(gpus=slice(0, 1)) == tensors, "the same objects are equal unseen"
    with pytest.raises(RuntimeError, match="ambiguous"):
        assert tensors == ValueMesh(Extent.of({"gpus": 1}), [torch.ones(2)])
    with pytest.raises(TypeError, match="unhashable"):
        hash(SQUARES)


def test_repr_shows_sizes_and_a_few_values() -> None:
    assert repr(SQUARES) == "ValueMesh(hosts=2, gpus=4: 0, 1, 4, 9, 16, 25 ... and 2 more)"
    assert repr(SQUARES.slice(hosts=0)) == "ValueMesh(gpus=4: 0, 1, 4, 9)"
    assert repr(SQUARES.slice(hosts=1, gpus=1)) == "ValueMesh(one rank: 25)"
    tensors = repr(ValueMesh(Extent.of({"gpus": 100}), [torch.zeros(50, 50)] * 100))
    assert "\n" not in tensors and len(tensors) < 300 and "and 94 more" in tensors


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: ValueMesh(BOTH, range(7)), ValueError, "7 values for the 8 ranks of hosts=2, gpus=4; give one each"),
        (lambda: SQUARES.item(hosts=0), KeyError, "no coordinate for gpus; give one for each of hosts, gpus"),
        (lambda: SQUARES.item(), KeyError, "no coordinate for hosts, gpus"),
        (lambda: SQUARES.item(hosts=0, gpus=0, tp=0), KeyError, "no dimension 'tp'; there are: hosts, gpus"),
        (lambda: SQUARES.slice(hosts=0).item(hosts=0, gpus=0), KeyError, "no dimension 'hosts'; there are: gpus"),
        (lambda: SQUARES.without([1]).item(hosts=0, gpus=0), KeyError, "no dimension 'hosts'; there are: ranks"),
        (lambda: SQUARES.item(hosts=0, gpus=4), IndexError, "gpus=4 is out of range: gpus has size 4, so 0 to 3"),
        (lambda: SQUARES.item(hosts=0, gpus=1.0), TypeError, "gpus=1.0 is a float"),
        (lambda: SQUARES.slice(gpus=slice(4, 8)), ValueError, "selects nothing"),
    ],
)
def test_bad_input(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_shape_of_its_own_gives_the_values_of_those_ranks() -> None:
    shape = Shape.from_ranks(Extent.of({"some": 3}), [6, 1, 2])
    assert list(SQUARES._new_with_shape(shape).values()) == [36, 1, 4]
