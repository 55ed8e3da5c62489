"""State dicts of one mesh, read into those of another mesh: equal bits, each byte once, and clear errors.

All ranks are in this process, one after the other. test_sharded_state_actors.py runs each in its own process.
"""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from monarch_backend import rdma
from monarch_backend.rdma import ShardedState, StatePart
from tests.rdma.fake_ranks import cut, on_each, rank

Placements = tuple[Placement, ...]
State = dict[str, Any]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8]


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a tensor of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.bool)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (math.prod(shape) * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def bits(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture
def registered() -> Iterator[Callable[[State], StatePart]]:
    """Yield `ShardedState.register`, and drop all registrations at the end."""
    parts: list[StatePart] = []

    def register(state: State) -> StatePart:
        parts.append(ShardedState.register(state))
        return parts[-1]

    yield register
    for part in parts:
        part.drop()


Register = Callable[[State], StatePart]


def moved(state: ShardedState, wanted: State, **options: Any) -> int:
    """Read the state, and return the number of bytes."""
    plan = state.plan(wanted, **options)
    assert plan.read(timeout=30).get() is None
    return plan.nbytes


# Any mesh to any mesh ----------------------------------------------------------------------------------------------


def random_placements(rng: random.Random, mesh: tuple[int, ...], ndim: int) -> Placements:
    return tuple(rng.choice([Replicate(), *(Shard(dim) for dim in range(ndim))]) for _ in mesh)


@pytest.mark.parametrize("seed", range(12))
def test_any_mesh_to_any_mesh(seed: int, registered: Register) -> None:
    rng = random.Random(seed)
    meshes = [(1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 1, 2)]
    theirs, ours = rng.choice(meshes), rng.choice(meshes)
    wholes: dict[str, Tensor] = {}
    for i in range(8):
        shape = tuple(rng.choice([1, 2, 3, 4, 7, 8]) for _ in range(rng.randint(0, 3)))
        wholes[f"t{i}"] = noise(shape, rng.choice(DTYPES), seed=100 * seed + i)
    source = {name: random_placements(rng, theirs, whole.ndim) for name, whole in wholes.items()}
    target = {name: random_placements(rng, ours, whole.ndim) for name, whole in wholes.items()}

    def offer(mesh: DeviceMesh) -> StatePart:
        return registered({name: cut(whole, mesh, source[name]) for name, whole in wholes.items()})

    state = pickle.loads(pickle.dumps(ShardedState.merge(on_each(theirs, offer))))

    def fetch(mesh: DeviceMesh) -> None:
        expected = {name: cut(whole, mesh, target[name]) for name, whole in wholes.items()}
        mine = {name: cut(torch.zeros_like(whole), mesh, target[name]) for name, whole in wholes.items()}
        assert moved(state, mine) == sum(len(bits(value)) for value in expected.values())
        for name, value in expected.items():
            assert torch.equal(bits(mine[name]), bits(value)), (name, source[name], target[name])

    on_each(ours, fetch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_from_columns_to_rows(dtype: torch.dtype, registered: Register) -> None:
    whole = noise((6, 10), dtype)
    parts = on_each((2,), lambda mesh: registered({"w": cut(whole, mesh, [Shard(1)])}))
    state = ShardedState.merge(parts)

    def fetch(mesh: DeviceMesh) -> None:
        mine = cut(torch.zeros_like(whole), mesh, [Shard(0)])
        assert moved(state, {"w": mine}) == 20 * dtype.itemsize
        assert torch.equal(bits(mine), bits(cut(whole, mesh, [Shard(0)])))

    on_each((3,), fetch)


def test_fsdp_after_tensor_parallelism(registered: Register) -> None:
    """`_StridedShard`, whose pieces simple arithmetic would get wrong."""
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = noise((8, 6), torch.float32)

    def offer(mesh: DeviceMesh) -> StatePart:
        d, t = mesh.get_coordinate() or (0, 0)
        mine = whole.chunk(2)[t].chunk(2)[d].clone()
        placements = (_StridedShard(0, split_factor=2), Shard(0))
        return registered({"w": DTensor.from_local(mine, mesh, placements, run_check=False)})

    parts = on_each((2, 2), offer)
    assert [part._tensors["w"].pieces[0].box.offset[0] for part in parts] == [0, 4, 2, 6]
    mine = torch.zeros(8, 6)
    assert moved(ShardedState.merge(parts), {"w": mine}) == mine.nbytes
    assert torch.equal(bits(mine), bits(whole))


def test_a_registration_stays_valid_while_an_optimizer_steps(registered: Register) -> None:
    layer = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    part = registered(layer.state_dict())
    mine = nn.Linear(5, 3)
    plan = ShardedState.merge([part]).plan(mine.state_dict())
    for _ in range(3):
        layer(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        part.check(layer.state_dict())
        plan.read().get()
        for name, value in layer.state_dict().items():
            assert torch.equal(bits(mine.state_dict()[name]), bits(value))
    layer.weight.data = layer.weight.data.clone()
    with pytest.raises(ValueError, match=r"^weight: not where it was when it was registered; drop\(\)"):
        part.check(layer.state_dict())


# Memory ------------------------------------------------------------------------------------------------------------


def test_tensors_that_share_memory_are_registered_once(registered: Register) -> None:
    flat = noise((1000,), torch.float32)
    first, second = flat[100:200], flat[150:300].reshape(10, 15)
    part = registered({"first": first, "second": second, "again": first})
    assert part.size() == 4 * 200  # from the first to the last byte of the tensors
    assert len(part._buffers) == 1
    mine = {"first": torch.zeros(100), "second": torch.zeros(10, 15), "again": torch.zeros(100)}
    assert moved(ShardedState.merge([part]), mine) == 4 * 350
    assert torch.equal(bits(mine["second"]), bits(second)) and torch.equal(bits(mine["again"]), bits(first))


def test_memory_that_others_have_mapped(registered: Register) -> None:
    weight = rdma.empty(5, 4).copy_(noise((5, 4), torch.float32))
    part = registered({"w": weight[1:], "first": weight[:1]})
    assert part.size() == weight.nbytes
    mine = {"w": torch.zeros(4, 4), "first": torch.zeros(1, 4)}
    assert moved(ShardedState.merge([part]), mine) == weight.nbytes
    assert torch.equal(bits(mine["w"]), bits(weight[1:]))


def test_tied_weights_are_fetched_once(registered: Register) -> None:
    weight = noise((4, 6), torch.float32)
    state = ShardedState.merge([registered({"embed": weight, "head": weight, "other": weight.clone()})])
    mine = torch.zeros(4, 6)
    assert moved(state, {"embed": mine, "head": mine}, strict=False) == weight.nbytes
    assert torch.equal(bits(mine), bits(weight))
    with pytest.raises(ValueError, match=r"^embed and other are the same memory here, and two tensors at their owners"):
        state.plan({"embed": mine, "other": mine}, strict=False)
    flat = torch.zeros(40)
    with pytest.raises(ValueError, match=r"^embed and other share some of their memory here"):
        state.plan({"embed": flat[:24].view(4, 6), "other": flat[10:34].view(4, 6)}, strict=False)


def test_views_are_filled_in_place_without_other_writes(registered: Register) -> None:
    q, k = noise((4, 6), torch.float32, 1), noise((4, 3), torch.float32, 2)
    state = ShardedState.merge([registered({"q": q, "k": k, "t": q.t(), "c": q[:, 1:2]})])
    fused = torch.full((4, 12), 7.0)
    mine = {"q": fused[:, 1:7], "k": fused[:, 8:11], "t": torch.zeros(4, 6).t(), "c": torch.zeros(4, 2)[:, :1]}
    moved(state, mine)
    for name, value in {"q": q, "k": k, "t": q.t(), "c": q[:, 1:2]}.items():
        assert torch.equal(bits(mine[name]), bits(value)), name
    assert bool((fused[:, [0, 7, 11]] == 7).all())


def test_other_memory_order_is_refused(registered: Register) -> None:
    state = ShardedState.merge([registered({"w": torch.zeros(4, 6)})])
    with pytest.raises(ValueError, match=r"^w: here and on rank 0, their dimensions lie in memory in another order"):
        state.plan({"w": torch.zeros(6, 4).t()})


class Wrapper(Tensor):
    """A tensor subclass with unknown content."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return function(*arguments, **(options or {}))


def freed() -> Tensor:
    tensor = torch.zeros(3, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("where", ["register", "plan"])
@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(1, 4).expand(3, 4), "share their place in memory"),
        (torch.zeros(3, 4, device="meta"), "only strided tensors in memory of the CPU, or of GPUs"),
        (torch.eye(3).to_sparse(), "only strided tensors in memory of the CPU, or of GPUs"),
        (torch.zeros(3, 4, dtype=torch.complex64).conj(), "conjugate or negated view"),
        (freed(), "the memory of its storage was freed"),
        (torch.zeros(3, 4).as_subclass(Wrapper), "is a Wrapper, which may have no memory of its own"),
    ],
    ids=["expanded", "meta", "sparse", "conjugate", "freed", "wrapper"],
)
def test_tensors_that_have_no_memory_of_their_own(where: str, tensor: Tensor, says: str, registered: Register) -> None:
    state = ShardedState.merge([registered({"model/w": torch.zeros(tensor.shape, dtype=tensor.dtype)})])
    call: Callable[[State], object] = registered if where == "register" else state.plan
    with pytest.raises(ValueError, match=f"^model/w: .*{says}"):
        call({"model": {"w": tensor}})


def test_parts_of_a_sum_are_refused(registered: Register) -> None:
    def offer(mesh: DeviceMesh) -> None:
        with pytest.raises(ValueError, match=r"^g: .*part of a sum that was not made yet: redistribute\(\)"):
            registered({"g": DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)})

    on_each((2,), offer)


def test_empty_tensors_and_empty_shards(registered: Register) -> None:
    whole = {"nothing": torch.zeros(0, 4), "one": noise((1, 3), torch.float32)}
    placed = {name: [Shard(0)] for name in whole}
    parts = on_each((3,), lambda mesh: registered({name: cut(x, mesh, placed[name]) for name, x in whole.items()}))
    assert [part.size() for part in parts] == [12, 0, 0]
    mine = {"nothing": torch.zeros(0, 4), "one": torch.zeros(1, 3)}
    assert moved(ShardedState.merge(parts), mine) == 12
    assert torch.equal(bits(mine["one"]), bits(whole["one"]))


def test_failed_registration_leaves_no_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch_backend._rdma import sharded_state

    made: list[Any] = []

    class Buffer:
        def __init__(self, memory: Tensor) -> None:
            if len(made) == 2:
                raise RuntimeError("there are too many")
            made.append(self)
            self.dropped = False

        def drop(self) -> None:
            self.dropped = True

    monkeypatch.setattr(sharded_state, "RDMABuffer", Buffer)
    with pytest.raises(RuntimeError, match="too many"):
        ShardedState.register({name: torch.zeros(3) for name in "abc"})
    assert [buffer.dropped for buffer in made] == [True, True]


# Names and values --------------------------------------------------------------------------------------------------


def test_nested_state_and_values_that_are_no_tensors(registered: Register) -> None:
    network = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    part = registered({"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "name": "x"})
    assert "optimizer/state/0/exp_avg" in part.names and "optimizer/param_groups" in part.names
    other = nn.Linear(3, 2)
    others = torch.optim.Adam(other.parameters(), lr=7.0)
    other(torch.ones(1, 3)).sum().backward()
    others.step()
    mine: State = {"model": other.state_dict(), "optimizer": others.state_dict(), "epoch": 0, "name": ""}
    ShardedState.merge([part]).read_into(mine).get()
    assert (mine["epoch"], mine["name"], mine["optimizer"]["param_groups"][0]["lr"]) == (3, "x", 0.001)
    for slot, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(bits(mine["optimizer"]["state"][slot][name]), bits(value))


def test_fetch_of_an_empty_state(registered: Register) -> None:
    mine: State = {"n": 0}
    state = ShardedState.merge([registered({"n": 1})])
    assert moved(state, mine) == 0
    assert mine == {"n": 1}
    groups = ShardedState.merge([registered({"groups": [{"lr": 1.0}]})])
    changed: State = {"groups": None}
    plan = groups.plan(changed)
    for _ in range(2):  # the second read ignores the reader's change of the first result
        plan.read().get()
        assert changed["groups"] == [{"lr": 1.0}]
        changed["groups"][0]["lr"] = 2.0
    ShardedState.merge([registered({})]).read_into({}, timeout=10).get()


def test_names_that_are_not_the_same(registered: Register) -> None:
    state = ShardedState.merge([registered({"a": torch.ones(2), "b": torch.ones(2), "step": 1})])
    mine = {"a": torch.zeros(2), "c": torch.zeros(2), "d": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"^no owner has: c, d; only owners have: b, step\. With strict=False"):
        state.plan(mine)
    plan = state.plan(mine, strict=False)
    assert (plan.missing_keys, plan.unexpected_keys, plan.nbytes) == (["c", "d"], ["b", "step"], 8)
    plan.read().get()
    assert mine["a"].tolist() == [1, 1] and mine["c"].tolist() == [0, 0]
    assert state.names == ["a", "b", "step"]


def test_invalid_state_dict_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a mapping of names to tensors, not list"):
        ShardedState.register([torch.ones(2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^layers: tensors in a list have no names"):
        ShardedState.register({"layers": [{"w": torch.ones(2)}]})
    with pytest.raises(ValueError, match=r"^a/b: two entries"):
        ShardedState.register({"a": {"b": 1}, "a/b": 2})
    with pytest.raises(TypeError, match=r"^f: function is no tensor and can't be pickled"):
        ShardedState.register({"f": lambda: None})
    with pytest.raises(ValueError, match=r"^text: str of 1000.. bytes is no tensor.*make it a tensor"):
        ShardedState.register({"text": "x" * 100_000})


# Merging -----------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_missing(registered: Register) -> None:
    whole = noise((7, 4), torch.float32)
    parts = on_each((3,), lambda mesh: registered({"w": cut(whole, mesh, [Shard(0)])}))
    with pytest.raises(ValueError, match=r"^w: no owner has \[3:6, 0:4\] of its shape \(7, 4\); ranks 0, 1 have parts"):
        ShardedState.merge([parts[0], parts[2]])
    with pytest.raises(ValueError, match=r"\[3:7, 0:4\].*; rank 0 have parts|\[3:7, 0:4\]"):
        ShardedState.merge(parts[:1])


def test_ranks_that_disagree(registered: Register) -> None:
    def merged(*states: State) -> ShardedState:
        return ShardedState.merge([registered(state) for state in states])

    with pytest.raises(ValueError, match=r"^w: .*\(rank 0: torch.float32 \(3,\); ranks 1, 2: torch.bfloat16 \(3,\)\)"):
        merged({"w": torch.zeros(3)}, *[{"w": torch.zeros(3, dtype=torch.bfloat16)}] * 2)
    with pytest.raises(ValueError, match=r"^w: owners disagree .*\(rank 0: .*\(3,\); rank 1: .*\(4,\)\)"):
        merged({"w": torch.zeros(3)}, {"w": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"^seed: ranks 0, 2 and rank 1 have different values"):
        merged({"seed": 1}, {"seed": 2}, {"seed": 1})
    with pytest.raises(ValueError, match=r"^w: rank 1 says it is of type int, others that it is a tensor"):
        merged({"w": torch.zeros(3)}, {"w": 3})
    assert merged({"a": torch.zeros(3)}, {"b": 1}).names == ["a", "b"]


def test_readers_that_do_not_fit(registered: Register) -> None:
    state = ShardedState.merge([registered({"w": torch.zeros(3, 4), "n": 1})])
    for wanted, says in [
        ({"w": torch.zeros(4, 3)}, r"^w: its shape is \(4, 3\) here and \(3, 4\) at its owners"),
        ({"w": torch.zeros(3, 4).half()}, "^w: its dtype is torch.float16 here and torch.float32 .*cast on one side"),
        ({"w": 1}, "^w: int here, and a tensor at its owners"),
        ({"n": torch.zeros(1)}, "^n: a tensor here, and a value that is none"),
    ]:
        with pytest.raises(ValueError, match=says):
            state.plan(wanted, strict=False)


# Replicas ----------------------------------------------------------------------------------------------------------


def test_readers_share_the_replicas(registered: Register) -> None:
    wholes = {f"w{i}": noise((6, 4), torch.float32, i) for i in range(4)}
    rows = (Replicate(), Shard(0))
    parts = on_each((2, 2), lambda mesh: registered({name: cut(w, mesh, rows) for name, w in wholes.items()}))
    state = ShardedState.merge(parts)
    mine = {name: torch.zeros(6, 4) for name in wholes}
    plans = [state.plan(mine, reader=reader) for reader in range(2)]
    total = sum(w.nbytes for w in wholes.values())
    for plan in plans:
        assert plan.nbytes == total
        assert set(plan.bytes_by_rank.values()) == {total // 4}, "all of its owners alike"
    taken = [{(part.handle, next(iter(part.segments))[0]) for part in plan._parts} for plan in plans]
    assert not taken[0] & taken[1], "no owner's bytes go to both"
    assert str(plans[0]) == f"<Plan {total} bytes in 8 runs from ranks 0, 1, 2, 3>"


def test_an_owner_on_this_host_is_preferred(registered: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch_backend._rdma import sharded_state

    whole = noise((6, 4), torch.float32)
    parts = on_each((2, 3), lambda mesh: registered({"w": cut(whole, mesh, [Replicate(), Shard(0)])}))
    near = {id(part) for part in parts[3:]}
    monkeypatch.setattr(sharded_state, "_is_on", lambda host, part: id(part) in near)
    state = ShardedState.merge(parts)
    for reader in range(3):
        assert set(state.plan({"w": torch.zeros(6, 4)}, reader=reader).bytes_by_rank) == {3, 4, 5}


def test_replicas_that_overlap_by_halves(registered: Register) -> None:
    """Some ranks have rows and others have columns. Each byte is still read once."""
    whole = noise((6, 4), torch.float32)
    parts = [
        *on_each((2,), lambda mesh: registered({"w": cut(whole, mesh, [Shard(0)])})),
        *on_each((2,), lambda mesh: registered({"w": cut(whole, mesh, [Shard(1)])})),
    ]
    for kept in itertools.combinations(parts, 3):
        state = ShardedState.merge(kept)
        mine = torch.zeros(6, 4)
        assert moved(state, {"w": mine}) == whole.nbytes
        assert torch.equal(bits(mine), bits(whole))


def test_repr_of_sharded_state(registered: Register) -> None:
    part = registered({"w": torch.zeros(3), "n": 1})
    assert repr(part) == "<StatePart 1 tensors, 1 values, 12 bytes>"
    assert repr(ShardedState.merge([part])) == "<ShardedState 1 tensors, 1 values, of 1 ranks>"


def test_a_reader_s_number_is_its_rank() -> None:
    from monarch_backend._rdma import sharded_state

    assert sharded_state._reader() == 0
    with rank(1, (3,)):
        assert sharded_state._reader() == 1
