"""Extent, Point, Shape and the mesh operations, compared with numpy's indexing; names of ranks round-trip."""

from __future__ import annotations

import copy
import doctest
import enum
import importlib
import itertools
import pickle
import random
import re
import timeit
from typing import Any

import numpy as np
import pytest

from monarch_backend._mesh.extent import Extent, Point
from monarch_backend._mesh.mesh_base import MeshBase
from monarch_backend._mesh.rank_text import ranks_in_words
from monarch_backend._mesh.shape import Shape

LABELS = ("hosts", "numa", "gpus", "tp", "cp")
BOTH = Extent.of({"hosts": 2, "gpus": 4})
PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


class Mesh(MeshBase):
    """The smallest implementation of a mesh. ``name`` is an example of an attribute that its slices keep."""

    def __init__(self, shape: Shape, name: str = "m") -> None:
        self._shape = shape
        self.name = name

    def _new_with_shape(self, shape: Shape) -> Mesh:
        return Mesh(shape, self.name)

    def ranks(self) -> list[int]:
        return list(self._shape.ranks)


def random_extent(rng: random.Random, most: int = 4) -> Extent:
    labels = rng.sample(LABELS, rng.randint(0, most))
    return Extent(labels, [rng.randint(1, 6) for _ in labels])


def whole(**sizes: int) -> Mesh:
    return Mesh(Shape.of(Extent.of(sizes)))


# Extent and Point


@pytest.mark.parametrize("seed", range(40))
def test_points_are_numpys_unravelled_indices(seed: int) -> None:
    extent = random_extent(random.Random(seed))
    assert len(extent) == extent.nelements == extent.size() == int(np.prod(extent.sizes))
    points = list(extent)
    assert [point.rank for point in points] == list(range(len(extent)))
    for rank, (point, indices) in enumerate(zip(points, np.ndindex(*extent.sizes), strict=True)):
        assert tuple(point.values()) == indices
        assert tuple(point) == tuple(point.keys()) == extent.labels and len(point) == len(extent.labels)
        assert extent.rank_of(**point) == rank == np.ravel_multi_index(indices or (0,), extent.sizes or (1,))
        assert extent.rank_of(**{label: point[label] - extent[label] for label in point}) == rank
        assert extent.point(rank) == point and hash(extent.point(rank)) == hash(point) and point in extent


def test_extent_reads_as_a_mapping() -> None:
    assert dict(BOTH) == {"hosts": 2, "gpus": 4} == {**BOTH}
    assert BOTH["gpus"] == BOTH.size("gpus") == BOTH.point(0).size("gpus") == 4
    assert BOTH.point(0).size() == 8
    assert "gpus" in BOTH and "tpus" not in BOTH and 4 not in BOTH and ["gpus"] not in BOTH
    assert Extent.of({"hosts": 4, "gpus": 4}).point(0) not in BOTH
    assert Extent.of(BOTH) is BOTH and Extent.of({}) == Extent((), ())
    assert Extent(["gpus"], [np.int64(8)]) == Extent(("gpus",), (8,))
    assert type(Extent(["gpus"], [np.int64(8)]).sizes[0]) is int


def test_equality_and_hash() -> None:
    same, swapped = Extent.of({"hosts": 2, "gpus": 4}), Extent.of({"gpus": 4, "hosts": 2})
    assert same == BOTH and hash(same) == hash(BOTH) and swapped != BOTH and dict(BOTH) != BOTH
    assert len({BOTH, same, swapped, BOTH.point(1), same.point(1), same.point(2)}) == 4
    point = BOTH.point(6)
    assert point == {"hosts": 1, "gpus": 2} and point != {"hosts": 1} and point != 6
    assert point == BOTH.point(6) and point != BOTH.point(5)
    assert point != Extent.of({"hosts": 3, "gpus": 4}).point(6)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("sizes", [{}, {"gpus": 8}, {"hosts": 2, "gpus": 4}])
def test_extents_and_points_pickle(sizes: dict[str, int], protocol: int) -> None:
    extent = Extent.of(sizes)
    for thing in (extent, extent.point(len(extent) - 1)):
        for back in (pickle.loads(pickle.dumps(thing, protocol)), copy.deepcopy(thing), copy.copy(thing)):
            assert back == thing and hash(back) == hash(thing) and type(back) is type(thing)


def test_extent_is_immutable() -> None:
    for thing, name in itertools.product((BOTH, BOTH.point(1), Shape.of(BOTH)), ("rank", "extent", "sizes", "new")):
        with pytest.raises(AttributeError):
            setattr(thing, name, 1)
    with pytest.raises(TypeError):
        BOTH.point(1)["gpus"] = 2  # type: ignore[index]


def test_words_of_extents_and_points() -> None:
    assert (str(BOTH), repr(BOTH)) == ("hosts=2, gpus=4", "Extent.of({'hosts': 2, 'gpus': 4})")
    assert (str(BOTH.point(7)), repr(BOTH.point(7))) == ("hosts 1 gpus 3", "<rank 7 of 8: hosts 1 gpus 3>")
    none = Extent((), ())
    assert (str(none), str(none.point(0)), repr(none.point(0))) == ("one rank", "rank 0", "<rank 0 of 1>")
    assert eval(repr(BOTH)) == BOTH


class Which(enum.IntEnum):
    THIRD = 2


def test_ints_of_other_kinds_become_ints() -> None:
    for rank in (np.int32(2), Which.THIRD):
        point = BOTH.point(rank)
        assert point == BOTH.point(2) and type(point.rank) is int
        assert BOTH.rank_of(hosts=0, gpus=rank) == 2 and type(BOTH.rank_of(hosts=0, gpus=rank)) is int


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Extent("gpus", (8,)), TypeError, r"labels='gpus' is one string; write labels=\('gpus',\)"),
        (lambda: Extent(("gpus",), (2, 4)), ValueError, "1 labels .* and 2 sizes .*; give one each"),
        (lambda: Extent(("gpus", "gpus"), (2, 4)), ValueError, "'gpus' is there twice"),
        (lambda: Extent(("",), (2,)), ValueError, "label '' cannot be a keyword argument; name the dimension"),
        (lambda: Extent(("my gpus",), (2,)), ValueError, "'my gpus' cannot be a keyword argument"),
        (lambda: Extent(("class",), (2,)), ValueError, "'class' cannot be a keyword argument"),
        (lambda: Extent((3,), (2,)), TypeError, "label 3 is not a string; name the dimension"),
        (lambda: Extent.of({"gpus": 0}), ValueError, "gpus=0: a dimension has at least one rank; give a size of 1"),
        (lambda: Extent.of({"gpus": -8}), ValueError, "gpus=-8"),
        (lambda: Extent.of({"gpus": True}), TypeError, "size gpus=True is a bool; give an int"),
        (lambda: Extent.of({"gpus": 8.0}), TypeError, "size gpus=8.0 is a float; give an int"),
        (lambda: Extent.of({"gpus": "8"}), TypeError, "size gpus='8' is a str; give an int"),
        (lambda: Extent.of({"gpus": None}), TypeError, "size gpus=None is a NoneType"),
        (lambda: Extent.of(8), TypeError, "8 gives no dimension a name; write a mapping such as {'gpus': 8}"),
        (lambda: BOTH["tpus"], KeyError, "no dimension 'tpus'; there are: hosts, gpus"),
        (lambda: BOTH[["gpus"]], KeyError, "no dimension"),
        (lambda: BOTH.size("tpus"), KeyError, "there are: hosts, gpus"),
        (lambda: BOTH.point(8), IndexError, "rank 8 is not in hosts=2, gpus=4, which has ranks 0 to 7"),
        (lambda: BOTH.point(-1), IndexError, "rank -1 is not in"),
        (lambda: BOTH.point(True), TypeError, "rank True is a bool; give an int"),
        (lambda: BOTH.point("1"), TypeError, "rank '1' is a str"),
        (lambda: Point(1.5, BOTH), TypeError, "rank 1.5 is a float"),
        (lambda: BOTH.point(1)["tpus"], KeyError, "no dimension 'tpus'; there are: hosts, gpus"),
        (lambda: BOTH.point(1)[{}], KeyError, "no dimension {}"),
        (lambda: Extent((), ()).point(0)["gpus"], KeyError, "'gpus': there is one rank and no dimension"),
        (lambda: BOTH.rank_of(hosts=1), KeyError, "no coordinate for gpus; give one for each of hosts, gpus"),
        (lambda: BOTH.rank_of(), KeyError, "no coordinate for hosts, gpus"),
        (lambda: BOTH.rank_of(hosts=1, gpus=1, tp=0), KeyError, "no dimension 'tp'; there are: hosts, gpus"),
        (lambda: BOTH.rank_of(hosts=2, gpus=0), IndexError, "hosts=2 is out of range: hosts has size 2, so 0 to 1"),
        (lambda: BOTH.rank_of(hosts=-3, gpus=0), IndexError, "hosts=-3 is out of range"),
        (lambda: BOTH.rank_of(hosts=False, gpus=0), TypeError, "coordinate hosts=False is a bool"),
    ],
)
def test_bad_extents_and_points(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_point_and_a_coordinate_cost_less_than_two_microseconds() -> None:
    extent = Extent.of({"hosts": 16, "gpus": 8})
    best = min(timeit.repeat(lambda: extent.point(77)["gpus"], number=2000, repeat=20)) / 2000
    assert best < 2e-6, f"{best * 1e6:.2f} us"


# Shape and the mesh operations


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_every_slice_of_one_dimension(size: int) -> None:
    mesh, array = whole(gpus=size), np.arange(size)
    bounds = (None, *range(-size - 2, size + 3))
    for start, stop, step in itertools.product(bounds, bounds, (None, 1, 2, 3, -1, -2, 7, -7)):
        chosen = slice(start, stop, step)
        if len(array[chosen]):
            assert mesh.slice(gpus=chosen).ranks() == list(array[chosen])
        else:
            with pytest.raises(ValueError, match=f"selects nothing: gpus has size {size}"):
                mesh.slice(gpus=chosen)
    for index in range(-size - 2, size + 2):
        if -size <= index < size:
            assert mesh.slice(gpus=index).ranks() == [array[index]] and mesh.slice(gpus=index).sizes == {}
        else:
            with pytest.raises(IndexError, match=f"gpus={index} is out of range: gpus has size {size}"):
                mesh.slice(gpus=index)


class Walk:
    """A mesh and the numpy array of its ranks. Each step applies an operation to both and compares them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        extent = random_extent(self.rng)
        self.mesh = Mesh(Shape.of(extent), name=f"walk {seed}")
        self.array = np.arange(len(extent)).reshape(extent.sizes)

    def slice(self) -> None:
        selection: dict[str, Any] = {}
        for label, size in self.mesh.sizes.items():
            some = (None, *range(-size, size + 1))
            bounds = slice(self.rng.choice(some), self.rng.choice(some), self.rng.choice([None, 1, 2, -1, -2]))
            index = np.int64(self.rng.randrange(-size, size))
            kept = bounds if len(range(size)[bounds]) else slice(None)
            selection[label] = self.rng.choice([kept, kept, kept, index, slice(None)])
        self.array = np.asarray(self.array[tuple(selection.values())])
        named = {
            label: chosen for label, chosen in selection.items() if chosen != slice(None) or self.rng.random() < 0.5
        }
        self.mesh = self.mesh.slice(**dict(self.rng.sample(list(named.items()), len(named))))

    def split(self) -> None:
        if not self.mesh.sizes:
            return
        label, size = self.rng.choice(list(self.mesh.sizes.items()))
        inner = self.rng.choice([n for n in range(1, size + 1) if size % n == 0])
        outer = self.rng.choice([n for n in range(1, size // inner + 1) if (size // inner) % n == 0])
        new = [f"new{i}" for i in range(40) if f"new{i}" not in self.mesh.sizes][:3]
        sizes = {new[0]: outer, new[1]: size // inner // outer, new[2]: inner}
        derived = self.rng.choice([*new, None])
        at = list(self.mesh.sizes).index(label)
        shape = self.array.shape
        self.array = self.array.reshape(*shape[:at], *sizes.values(), *shape[at + 1 :])
        given = {name: n for name, n in sizes.items() if name != derived}
        self.mesh = self.mesh.split(**{label: self.rng.choice([tuple, list])(new)}, **given)
        assert {name: self.mesh.sizes[name] for name in new} == sizes

    def flatten(self) -> None:
        self.array = self.array.reshape(-1)
        self.mesh = self.mesh.flatten("flat")
        assert list(self.mesh.sizes) == ["flat"]

    def rename(self) -> None:
        old = list(self.mesh.sizes)
        new = self.rng.sample(old, len(old))
        self.mesh = self.mesh.rename(**dict(zip(old, new, strict=True)))
        assert list(self.mesh.sizes) == new

    def without(self) -> None:
        size = len(self.mesh)
        gone = self.rng.sample(range(size), self.rng.randint(0, min(2, size - 1)))
        label = "ranks" if self.array.ndim != 1 else next(iter(self.mesh.sizes))
        self.array = np.delete(self.array.reshape(-1), gone)
        self.mesh = self.mesh.without([self.rng.choice([rank, self.mesh.extent.point(rank)]) for rank in gone])
        assert list(self.mesh.sizes) == [label]

    def check(self) -> None:
        mesh, shape, array = self.mesh, self.mesh._shape, self.array
        assert mesh.ranks() == list(array.reshape(-1)), "the ranks in row-major order"
        assert tuple(mesh.sizes.values()) == shape.sizes == array.shape
        assert shape.labels == mesh.extent.labels == tuple(mesh.sizes)
        assert len(mesh) == mesh.size() == len(shape) == array.size
        assert mesh.size(list(mesh.sizes)) == array.size
        assert mesh.name.startswith("walk")
        assert shape.offset == array.reshape(-1)[0]
        if shape.strides is not None:
            assert Shape(shape.extent, shape.strides, shape.offset) == shape
        for point in mesh.extent:
            assert shape.rank_of(**point) == array[tuple(point.values())] == shape.ranks[point.rank]
        again = Shape.from_ranks(shape.extent, array.reshape(-1))
        back = pickle.loads(pickle.dumps(shape))
        assert back == again == shape and hash(back) == hash(again) == hash(shape)
        assert (back.strides, back.offset, back.ranks) == (shape.strides, shape.offset, shape.ranks)


@pytest.mark.parametrize("seed", range(150))
def test_random_operations_as_numpy_does_them(seed: int) -> None:
    walk = Walk(seed)
    walk.check()
    for _ in range(7):
        walk.rng.choice([walk.slice, walk.split, walk.flatten, walk.rename, walk.without])()
        walk.check()


def test_strides_where_there_are_some() -> None:
    square = Shape.of(Extent.of({"x": 4, "y": 4}))
    assert square.strides == (4, 1) and square.flatten("z").strides == (1,)
    assert square.slice(x=slice(None, None, 2)).strides == (8, 1)
    assert (
        square.slice(y=slice(None, None, -1)).strides == (4, -1) and square.slice(y=slice(None, None, -1)).offset == 3
    )
    column = square.slice(y=1).flatten("z")
    assert (column.strides, column.offset) == ((4,), 1)
    block = square.slice(x=slice(1, 3), y=slice(1, 3)).flatten("z")
    assert block.strides is None and block.ranks == (5, 6, 9, 10)
    assert block.split(z=("x", "y"), y=2).strides == (4, 1), "split again, strides can say it again"
    assert block.slice(z=slice(2, 4)).strides == (1,)
    assert square.without(range(1, 16, 2)).strides == (2,)


def test_shapes_are_equal_if_they_select_the_same_ranks() -> None:
    one = Extent.of({"x": 1, "y": 3})
    assert Shape(one, (7, 2), 1) == Shape(one, (0, 2), 1) == Shape.from_ranks(one, [1, 3, 5])
    assert len({Shape(one, (7, 2), 1), Shape(one, (0, 2), 1)}) == 1
    assert Shape.of(one) != Shape.of(Extent.of({"y": 3})) and Shape.of(one) != one


def test_at_drops_the_named_dimensions() -> None:
    shape = Shape.of(BOTH)
    assert shape.at(hosts=1) == shape.slice(hosts=1) and shape.at(gpus=-1).ranks == (3, 7)
    assert shape.at(hosts=1, gpus=2).ranks == (6,) and shape.at() == shape


def test_words_of_shapes() -> None:
    assert repr(Shape.of(BOTH)) == "<Shape hosts=2, gpus=4: strides (4, 1), offset 0>"
    assert repr(Shape.of(BOTH).without([2])) == "<Shape ranks=7: base ranks 0, 1, 3, 4, 5, 6, 7>"
    assert repr(Shape.of(Extent.of({"gpus": 20})).without([2])).endswith("7, 8 ... and 11 more>")


def test_a_slice_without_the_failed_ranks_stays_usable() -> None:
    mesh = whole(hosts=2, gpus=4).slice(hosts=1)
    left = mesh.without([1])
    assert left.ranks() == [4, 6, 7] and left.sizes == {"gpus": 3}
    assert left.without([left.extent.point(0)]).ranks() == [6, 7]
    assert left.without([]).ranks() == [4, 6, 7] and left.without([1, 0, 1]).ranks() == [7]
    assert whole(hosts=2, gpus=4).without([]).sizes == {"ranks": 8}
    assert left.slice(gpus=-1).without([]).sizes == {"ranks": 1}


def test_split_as_in_the_documentation() -> None:
    mesh = whole(host=4, gpu=8)
    both = mesh.split(host=("dp", "pp"), gpu=("tp", "cp"), pp=2, cp=2)
    assert both.sizes == {"dp": 2, "pp": 2, "tp": 4, "cp": 2} and both.ranks() == mesh.ranks()
    assert both.slice(dp=1, tp=0).ranks() == [16, 17, 24, 25]
    assert mesh.split(host=("host", "pp"), pp=2).sizes == {"host": 2, "pp": 2, "gpu": 8}, "a label may stay"
    assert mesh.split(host=("node",)).sizes == {"node": 4, "gpu": 8}
    assert mesh.split().sizes == mesh.sizes


def test_size() -> None:
    mesh = whole(hosts=2, numa=3, gpus=4)
    assert (mesh.size(), mesh.size("numa"), mesh.size(["hosts", "gpus"]), mesh.size(())) == (24, 3, 8, 1)


def test_labels_may_have_the_names_of_parameters() -> None:
    mesh = whole(self=2, extent=3, selection=2, how=2, coords=1)
    assert mesh.slice(self=1, selection=0).size() == 6
    assert mesh.rename(self="dim").size("dim") == 2
    assert mesh.extent.rank_of(self=1, extent=2, selection=1, how=1, coords=0) == 23
    assert mesh.split(self=("names", "into"), into=2).sizes["into"] == 2


MESH = whole(hosts=2, gpus=8)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: MESH.slice(tpus=0), KeyError, "no dimension 'tpus'; there are: hosts, gpus"),
        (lambda: MESH.slice(hosts=0, gpus=0).slice(gpus=0), KeyError, "one rank and no dimension"),
        (lambda: MESH.without([3]).slice(gpus=0), KeyError, "no dimension 'gpus'; there are: ranks"),
        (lambda: MESH.slice(hosts=2), IndexError, "hosts=2 is out of range: hosts has size 2, so 0 to 1"),
        (lambda: MESH.slice(gpus=slice(8, 9)), ValueError, "gpus=slice.8, 9, None. selects nothing: gpus has size 8"),
        (lambda: MESH.slice(gpus=True), TypeError, "gpus=True is a bool; give an int"),
        (lambda: MESH.slice(gpus=[0, 1]), TypeError, r"gpus=\[0, 1\]: give an int, .* or slice\(start, stop, step\)"),
        (lambda: MESH.slice(gpus="0"), TypeError, "gpus='0': give an int"),
        (lambda: MESH.slice(gpus=None), TypeError, "gpus=None: give an int"),
        (lambda: MESH.slice(gpus=slice(0, 1.5)), TypeError, "gpus=slice.*: slice indices must be integers"),
        (lambda: MESH.slice(gpus=slice(0, 8, 0)), ValueError, "gpus=slice.*: slice step cannot be zero"),
        (lambda: MESH._shape.at(gpus=slice(0, 1)), TypeError, "gpus=slice.* is a slice; give an int"),
        (lambda: MESH.split(tpus=("a", "b"), a=1), KeyError, "no dimension 'tpus'; there are: hosts, gpus"),
        (lambda: MESH.split(gpus="dp"), TypeError, r"gpus='dp': give the new labels as a tuple, .*gpus=\('dp', 'pp'\)"),
        (lambda: MESH.split(gpus=("a", "b")), ValueError, "the sizes of a, b are not given; give all but one of them"),
        (lambda: MESH.split(gpus=("a", "b", "c"), b=2), ValueError, "the sizes of a, c are not given"),
        (lambda: MESH.split(gpus=("a", "b"), b=3), ValueError, "split gpus=8 into .*: 8 is not a multiple of 3"),
        (lambda: MESH.split(gpus=("a", "b"), b=16), ValueError, "8 is not a multiple of 16"),
        (lambda: MESH.split(gpus=("a", "b"), a=2, b=2), ValueError, "given sizes multiply to 4, not to 8; leave one"),
        (lambda: MESH.split(gpus=("a", "b"), c=2), KeyError, "c=2 is the size of no new dimension; .* new: a, b"),
        (lambda: MESH.split(gpus=4), KeyError, "gpus=4 is the size of no new dimension; these are new: none"),
        (lambda: MESH.split(gpus=("a", "b"), b=0), ValueError, "b=0: a dimension has at least one rank"),
        (lambda: MESH.split(gpus=("a", "b"), b=2.0), TypeError, "b=2.0 is a float"),
        (lambda: MESH.split(gpus=()), ValueError, "name at least one dimension"),
        (lambda: MESH.split(gpus=("a", "a"), a=2), ValueError, "multiply to 4, not to 8"),
        (lambda: MESH.split(gpus=("hosts", "a"), a=2), ValueError, "given sizes|'hosts' is there twice"),
        (lambda: MESH.split(gpus=("a", 3), a=2), TypeError, "label 3 is not a string"),
        (lambda: MESH.flatten("not a label"), ValueError, "'not a label' cannot be a keyword argument"),
        (lambda: MESH.flatten(3), TypeError, "label 3 is not a string"),
        (lambda: MESH.rename(tpus="a"), KeyError, "no dimension 'tpus'; there are: hosts, gpus"),
        (lambda: MESH.rename(hosts="gpus"), ValueError, "'gpus' is there twice"),
        (lambda: MESH.rename(hosts=""), ValueError, "label '' cannot be"),
        (lambda: MESH.rename(hosts=1), TypeError, "label 1 is not a string"),
        (lambda: MESH.size("tpus"), KeyError, "no dimension 'tpus'; there are: hosts, gpus"),
        (lambda: MESH.size(("gpus", "tpus")), KeyError, "no dimension 'tpus'"),
        (lambda: MESH.without([16]), IndexError, "rank 16 is not in hosts=2, gpus=8, which has ranks 0 to 15"),
        (lambda: MESH.without([-1]), IndexError, "rank -1"),
        (lambda: MESH.without(3), TypeError, r"give the ranks as a list, without\(\[3\]\)"),
        (lambda: MESH.without(MESH.extent.point(3)), TypeError, "give the ranks as a list"),
        (lambda: MESH.without(range(16)), ValueError, "no rank of hosts=2, gpus=8 is left without hosts 0-1 gpus 0-7"),
        (
            lambda: MESH.without([BOTH.point(3)]),
            ValueError,
            "hosts 0 gpus 3> is a point of hosts=2, gpus=4, the mesh is",
        ),
        (lambda: Shape(BOTH, (1,)), ValueError, "1 strides .* for the dimensions hosts=2, gpus=4; give one each"),
        (lambda: Shape(BOTH, (3, 1)), ValueError, "the rank 3 is there more than once"),
        (lambda: Shape(BOTH, (4, -1)), ValueError, "the rank -3 is below 0"),
        (lambda: Shape(BOTH, (4, 1.0)), TypeError, "the stride 1.0 is a float; give an int"),
        (lambda: Shape(BOTH, (4, 1), None), TypeError, "the offset None is a NoneType"),
        (lambda: Shape.from_ranks(BOTH, "01234567"), TypeError, "the rank '0' is a str"),
        (lambda: Shape.from_ranks(BOTH, range(7)), ValueError, "7 ranks for the 8 points of hosts=2, gpus=4"),
        (lambda: Shape.from_ranks(BOTH, [5] * 8), ValueError, "the rank 5 is there more than once"),
        (lambda: Shape.from_ranks(BOTH, range(-1, 7)), ValueError, "the rank -1 is below 0"),
    ],
)
def test_bad_operations(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_a_mesh_without_its_constructor_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="_new_with_shape"):
        MeshBase()  # type: ignore[abstract]


# Names of ranks


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        ({"gpus": 8}, range(8), "gpus 0-7"),
        ({"gpus": 8}, [5, 3, 1, 4, 3], "gpus 1,3-5"),
        ({"gpus": 8}, [7], "gpus 7"),
        ({"gpus": 8}, [], "no ranks"),
        ({"gpus": 1}, [0], "gpus 0"),
        ({}, [0], "rank 0"),
        ({}, [], "no ranks"),
        ({"hosts": 2, "gpus": 4}, range(4), "hosts 0 gpus 0-3"),
        ({"hosts": 2, "gpus": 4}, range(8), "hosts 0-1 gpus 0-3"),
        ({"hosts": 2, "gpus": 4}, [1, 5], "hosts 0-1 gpus 1"),
        ({"hosts": 2, "gpus": 4}, [0, 2, 4, 6], "hosts 0-1 gpus 0,2"),
        ({"hosts": 2, "gpus": 4}, [0, 5], "hosts 0 gpus 0; hosts 1 gpus 1"),
        ({"hosts": 2, "gpus": 4}, [6, 0, 1, 2, 3], "hosts 0 gpus 0-3; hosts 1 gpus 2"),
        # The shortest name splits by the middle dimension: one product for n 0, another for n 1.
        ({"h": 3, "n": 2, "g": 3}, [0, 1, 6, 7, 9, 11, 15, 17], "h 0-1 n 0 g 0-1; h 1-2 n 1 g 0,2"),
        ({"gpus": 10_000}, range(10_000), "gpus 0-9999"),
        ({"hosts": 100, "gpus": 100}, range(0, 10_000, 100), "hosts 0-99 gpus 0"),
    ],
)
def test_words_that_name_ranks(sizes: dict[str, int], ranks: Any, words: str) -> None:
    assert ranks_in_words(Extent.of(sizes), ranks) == words


def read_back(extent: Extent, words: str) -> tuple[set[int], int]:
    """Return the ranks that the text names, and the number of further ranks that it mentions."""
    named, _, more = words.partition(" ... and ")
    ranks: set[int] = set()
    for box in named.split("; "):
        dims = re.findall(r"(\w+) ([\d,-]+)", box)
        assert tuple(label for label, _ in dims) == extent.labels
        chosen = []
        for _, runs in dims:
            ends = [[int(end) for end in run.split("-")] for run in runs.split(",")]
            assert all(after[0] > before[-1] + 1 for before, after in itertools.pairwise(ends)), "runs that could join"
            chosen.append([index for run in ends for index in range(run[0], run[-1] + 1)])
        for coords in itertools.product(*chosen):
            rank = extent.rank_of(**dict(zip(extent.labels, coords, strict=True)))
            assert rank not in ranks, "named twice"
            ranks.add(rank)
    return ranks, int(more.removesuffix(" more")) if more else 0


@pytest.mark.parametrize("seed", range(60))
def test_words_name_just_these_ranks(seed: int) -> None:
    rng = random.Random(seed)
    labels = rng.sample(LABELS, rng.randint(1, 4))
    extent = Extent(labels, [rng.choice([1, 2, 3, 8, 40 if len(labels) < 3 else 4]) for _ in labels])
    for share in (0.02, 0.3, 0.7, 0.98, 1.0):
        ranks = {rank for rank in range(len(extent)) if rng.random() < share} or {len(extent) - 1}
        words = ranks_in_words(extent, ranks)
        assert len(words) <= 120
        named, more = read_back(extent, words)
        assert named <= ranks and len(named) + more == len(ranks)
        assert more == 0 or len(words) > 60, "what there is room for is named"


@pytest.mark.parametrize("extent", [BOTH, Extent.of({"gpus": 3}), Extent((), ())], ids=str)
def test_one_rank_is_named_like_its_point(extent: Extent) -> None:
    assert [ranks_in_words(extent, [point.rank]) for point in extent] == [str(point) for point in extent]


def test_name_of_a_huge_rank_set_is_fast_and_short() -> None:
    extent = Extent.of({"hosts": 100, "gpus": 100})
    ranks = random.Random(0).sample(range(len(extent)), 5000)
    words = ranks_in_words(extent, ranks)
    named, more = read_back(extent, words)
    assert len(words) <= 120 and len(named) + more == 5000 and named
    diagonal = ranks_in_words(extent, range(0, 10_000, 101))
    assert diagonal.startswith("hosts 0 gpus 0; hosts 1 gpus 1; ") and diagonal.endswith(" more")
    assert ranks_in_words(Extent.of({"g": 10_000}), range(1, 10_000, 2)).endswith(" more")
    assert ranks_in_words(Extent.of({"x" * 200: 9}), [1, 3]).endswith("x 1 ... and 1 more"), "at least one, if too long"


@pytest.mark.parametrize(("rank", "error"), [(8, IndexError), (-1, IndexError), (True, TypeError), ("1", TypeError)])
def test_ranks_that_are_none_cannot_be_named(rank: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="rank"):
        ranks_in_words(BOTH, [0, rank])


@pytest.mark.parametrize("name", ["extent", "value_mesh"])
def test_examples(name: str) -> None:
    ran = doctest.testmod(importlib.import_module(f"monarch_backend._mesh.{name}"))
    assert ran.attempted > 3 and ran.failed == 0
