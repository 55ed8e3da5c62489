"""State dicts whose tensors lie in pieces on one mesh, read into a mesh of another shape.

Each owner registers what it has; the descriptions are merged; each reader fetches the bytes that it needs from where
they are. The geometry stands in shard_geometry.py, what a rank holds in local_shards.py, the moving of bytes in
transfer_engine.py.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from monarch_backend._actor.context import current_rank
from monarch_backend._actor.future import Future
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._mesh.value_mesh import ValueMesh
from monarch_backend._rdma import gpu_memory
from monarch_backend._rdma.buffer import RDMABuffer
from monarch_backend._rdma.local_memory import CPU
from monarch_backend._rdma.local_shards import LocalShard, StateEntry, check_value, leaves, local, offset_in
from monarch_backend._rdma.shard_geometry import (
    LayoutError,
    Overlap,
    Region,
    Segment,
    merged,
    segments,
    shared,
    uncovered,
    without,
)
from monarch_backend._rdma.transfer_engine import ReadWriteOp, engine
from monarch_backend._transport.network.envelope import host_of

_SHOWN = 8  # names, ranks or boxes in a message


class TensorPart(NamedTuple):
    """One rank's part of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole
    pieces: tuple[Overlap, ...]
    strides: tuple[int, ...]  # bytes
    address: int  # of the first element, in its owner
    buffer: int  # index into the buffers
    start: int  # bytes from the beginning of the buffer to the first element


class StatePart:
    """What one rank has registered of a state dict. Picklable, and small: names, boxes and handles.

    Made by `ShardedState.register`. Holds at most as many buffers as there are tensors: those that share memory share
    a buffer.
    """

    def __init__(self, tensors: dict[str, TensorPart], values: dict[str, Any], buffers: list[RDMABuffer]) -> None:
        self._tensors = tensors
        self._values = values
        self._buffers = buffers

    @property
    def names(self) -> list[str]:
        """Of everything registered, in order."""
        return sorted([*self._tensors, *self._values])

    def size(self) -> int:
        """Bytes of the registered memory."""
        return sum(buffer.size() for buffer in self._buffers)

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError if a tensor of this rank is not where it was when it was registered.

        In-place updates, such as those of torch's optimizers, keep a tensor where it is. ``model.to(...)``,
        ``parameter.data = ...`` and the like don't, nor does, under torch 2.9, the first step with FSDP2 for parameters
        of uneven shards; readers would go on reading what is left behind. It takes microseconds for each tensor, so
        call it after every step.
        """
        now = {name: leaf.value for name, leaf in leaves(state_dict).items()}
        moved = [name for name, part in self._tensors.items() if name not in now or part != _moved(part, name, now)]
        if moved:
            raise ValueError(
                f"{_some(moved)}: not where it was when it was registered; drop() this description, register again, "
                "and merge again"
            )

    def drop(self) -> None:
        """On the owner: let go of the memory. Readers that come later get an error."""
        for buffer in self._buffers:
            buffer.drop()

    def __repr__(self) -> str:
        return f"<StatePart {len(self._tensors)} tensors, {len(self._values)} values, {self.size()} bytes>"


class Plan:
    """Which bytes one reader fetches from where, for one state dict. Made by `ShardedState.plan`, used every step.

    It writes to the memory that the state dict's tensors had when it was made: make another one after ``model.to(...)``
    and the like.
    """

    def __init__(
        self,
        parts: list[ReadWriteOp],
        bytes_by_rank: dict[int, int],
        keep: list[Any],
        values: list[tuple[StateEntry, Any]],
        missing: list[str],
        unexpected: list[str],
    ) -> None:
        self.bytes_by_rank = bytes_by_rank  # of owners, by their rank among the descriptions
        self.missing_keys = missing  # names that no owner has; with strict=True there are none
        self.unexpected_keys = unexpected  # names that only owners have; likewise
        self._parts = parts
        self._keep = keep
        self._values = values

    @property
    def nbytes(self) -> int:
        """All bytes that a `read` fetches."""
        return sum(self.bytes_by_rank.values())

    def read(self, *, timeout: float | None = None) -> Future[None]:
        """Fetch everything, in one batch with one completion; the future fails if any of it does.

        Tensors must not be used before the future is done. After an error their contents are undefined. What the
        owners hold for keys that are no tensors is put into the state dict at once.
        """
        timeout = check_timeout(timeout)
        for leaf, value in self._values:
            leaf.holder[leaf.key] = copy.deepcopy(value)  # the reader may change what it gets
        for device in {storage.device for storage in self._keep}:
            gpu_memory.settle(device)
        return engine().start(self._parts, self._keep, timeout)

    def __repr__(self) -> str:
        count = sum(len(part.segments) for part in self._parts)
        return f"<Plan {self.nbytes} bytes in {count} runs from ranks {_some(self.bytes_by_rank)}>"


class ShardedState:
    """A state dict whose tensors lie in pieces on the ranks of one mesh, for readers of any other mesh. Picklable.

    Three steps, of which only the last is taken again in every round. Owners `register` their state dicts and return
    the descriptions; someone has them merged and sends the result to the readers; each reader calls `read_into` (or
    keeps a `plan` and calls its `read`). A reader fetches exactly the bytes of its own part, each once, from the ranks
    that have them, whatever the two meshes look like.

    >>> import torch
    >>> from monarch_backend.rdma import ShardedState
    >>> trained = {"weight": torch.arange(6.0).reshape(2, 3), "step": 7}
    >>> part = ShardedState.register(trained)  # on each rank that has some of it
    >>> state = ShardedState.merge([part])  # of all ranks, for example of an actor call's ValueMesh
    >>> mine = {"weight": torch.zeros(2, 3), "step": 0}
    >>> done = state.read_into(mine).get()  # on each rank that wants some of it
    >>> mine["weight"].tolist(), mine["step"]
    ([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], 7)
    >>> part.drop()

    The registration stays valid while tensors are updated in place, as optimizers do: no new handles after a step.
    **Order is up to the user.** A read that overlaps with an update gets some bytes from before it and some from
    after it, and nobody notices. So ask for the read when the step's call has returned, and for the next step when the
    readers' calls have. With actors: ``trainers.step.call().get()``, ``generators.load.call().get()``.
    """

    def __init__(self, parts: Sequence[StatePart]) -> None:
        self._parts = list(parts)
        self._tensors: dict[str, dict[int, TensorPart]] = defaultdict(dict)
        for rank, part in enumerate(self._parts):
            for name, tensor in part._tensors.items():
                self._tensors[name][rank] = tensor
        self._values = _agreed_values(self._parts, self._tensors)
        for name, by_rank in self._tensors.items():
            _check_agreement(name, by_rank)
            _check_coverage(name, by_rank)

    def __reduce__(self) -> Any:
        return _restored, (self._parts, dict(self._tensors), self._values)

    @staticmethod
    def register(state_dict: Mapping[str, Any]) -> StatePart:
        """Offer this rank's part of a state dict to readers, and return the description of it.

        Values may be DTensors (any mesh and dtype; sharded in any dimensions, evenly or not, and replicated), plain
        tensors (each is the whole; ranks that have the same name are replicas), numbers and other picklable values of
        up to 64 KiB, which travel in the description as they are now, and mappings of all that, whose names are joined
        by ``/``.

        Raises ValueError, with the name, for tensors without memory that can be shared, expanded, a `Partial` sum, or
        cut as no placement says.
        """
        tensors: dict[str, tuple[torch.dtype, LocalShard]] = {}
        values = {}
        for name, leaf in leaves(state_dict).items():
            if isinstance(leaf.value, Tensor):
                tensors[name] = leaf.value.dtype, local(name, leaf.value)
            else:
                check_value(name, leaf.value)
                values[name] = leaf.value
        ranges = _memory(held for _, held in tensors.values())
        buffers = _buffers(memory for memory, _ in ranges.values())
        index = {storage: i for i, storage in enumerate(ranges)}
        parts = {}
        for name, (dtype, held) in tensors.items():
            parts[name] = part = _tensor_part(dtype, held)
            if held.pieces:
                storage = held.tensor.untyped_storage().data_ptr()
                parts[name] = part._replace(buffer=index[storage], start=part.address - ranges[storage][1])
        return StatePart(parts, values, buffers)

    @staticmethod
    def merge(parts: ValueMesh[StatePart] | Iterable[StatePart]) -> ShardedState:
        """One description of what all these ranks have registered.

        The ranks in messages, and in `Plan.bytes_by_rank`, are the places in `parts`.

        Raises ValueError, with names and ranks, where ranks disagree about a dtype, a shape or a value, and where a
        part of a tensor is with nobody.
        """
        return ShardedState([*parts.values()] if isinstance(parts, ValueMesh) else [*parts])

    @property
    def names(self) -> list[str]:
        """Of everything that there is, in order."""
        return sorted([*self._tensors, *self._values])

    def read_into(
        self, state_dict: Mapping[str, Any], *, strict: bool = True, timeout: float | None = None
    ) -> Future[None]:
        """Fill this rank's state dict: `plan` and `Plan.read` in one."""
        timeout = check_timeout(timeout)  # before anything is planned, and told to the owners
        return self.plan(state_dict, strict=strict).read(timeout=timeout)

    def plan(self, state_dict: Mapping[str, Any], *, strict: bool = True, reader: int | None = None) -> Plan:
        """Find out which bytes this rank's state dict needs and where they are.

        Local tensors are filled in place. They may be views; each run of bytes that is whole on both sides costs as
        much as a small copy. `reader` is this reader's number among all readers: of several owners that have the same
        bytes, those on its own host are taken first, and different readers take different ones. By default it is the
        rank in torch's process group, or in the mesh of actors where there is none.

        Raises ValueError, with names, where shape, dtype or kind of a value differ from the owners', where a local
        tensor cannot be filled in place, and with strict=True where the names are not the same on both sides.
        """
        wanted = leaves(state_dict)
        known = self._tensors.keys() | self._values.keys()
        missing, unexpected = sorted(wanted.keys() - known), sorted(known - wanted.keys())
        if strict and (missing or unexpected):
            raise ValueError(
                "; ".join(
                    f"{problem}: {_some(names)}"
                    for problem, names in (("no owner has", missing), ("only owners have", unexpected))
                    if names
                )
                + ". With strict=False only what both have is read"
            )
        reading = _Reading(self, _reader() if reader is None else operator.index(reader))
        for name in sorted(wanted.keys() & known):
            reading.add(wanted[name])
        return reading.plan(missing, unexpected)

    def __repr__(self) -> str:
        return f"<ShardedState {len(self._tensors)} tensors, {len(self._values)} values, of {len(self._parts)} ranks>"


def _restored(
    parts: list[StatePart], tensors: dict[str, dict[int, TensorPart]], values: dict[str, Any]
) -> ShardedState:
    """One that was checked before it was sent."""
    state = ShardedState([])
    state._parts, state._values = parts, values
    state._tensors.update(tensors)
    return state


# ---- owners


def _tensor_part(dtype: torch.dtype, held: LocalShard) -> TensorPart:
    address = held.tensor.data_ptr() if held.pieces else 0
    return TensorPart(dtype, held.shape, held.pieces, held.strides, address, -1, 0)


def _moved(part: TensorPart, name: str, now: Mapping[str, Any]) -> TensorPart:
    """The same part as it is now."""
    tensor = now[name]
    return _tensor_part(tensor.dtype, local(name, tensor))._replace(buffer=part.buffer, start=part.start)


def _memory(held: Iterable[LocalShard]) -> dict[int, tuple[Tensor, int]]:
    """For each storage that they lie in: the bytes from the first of them to the last, and their address."""
    spans: dict[int, tuple[int, int]] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for one in held:
        if one.pieces:
            first, last = _extent(one)
            storage = one.tensor.untyped_storage()
            low, high = spans.get(storage.data_ptr(), (first, last))
            known = storages.get(storage.data_ptr())
            if known is None or known.nbytes() < storage.nbytes():  # several may stand on the same memory
                storages[storage.data_ptr()] = storage
            spans[storage.data_ptr()] = min(low, first), max(high, last)
    memory = {}
    for base, (low, high) in spans.items():
        whole = torch.empty(0, dtype=torch.uint8, device=storages[base].device).set_(storages[base])
        memory[base] = whole[low - base : high - base], low
    return memory


def _buffers(memory: Iterable[Tensor]) -> list[RDMABuffer]:
    """All of them or none."""
    buffers: list[RDMABuffer] = []
    try:
        for one in memory:
            buffers.append(RDMABuffer(one))
    except BaseException:
        for buffer in buffers:
            buffer.drop()
        raise
    return buffers


def _extent(held: LocalShard) -> tuple[int, int]:
    """The addresses of its first byte, and of the one after its last."""
    first, itemsize = held.tensor.data_ptr(), held.tensor.element_size()
    length = sum((size - 1) * stride for size, stride in zip(held.tensor.shape, held.strides, strict=True))
    return first, first + length + itemsize


# ---- merging


def _agreed_values(parts: list[StatePart], tensors: Mapping[str, object]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    pickled: dict[str, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, part in enumerate(parts):
        for name, value in part._values.items():
            if name in tensors:
                raise ValueError(
                    f"{name}: rank {rank} says it is of type {type(value).__name__}, others that it is a tensor"
                )
            pickled[name][check_value(name, value)].append(rank)
            values.setdefault(name, value)
    for name, ranks in pickled.items():
        if len(ranks) > 1:
            raise ValueError(
                f"{name}: {_groups(ranks.values())} have different values; give a value of each rank its own name, or "
                "leave it out"
            )
    return values


def _check_agreement(name: str, by_rank: Mapping[int, TensorPart]) -> None:
    told: dict[tuple[torch.dtype, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, part in by_rank.items():
        told[part.dtype, part.shape].append(rank)
    if len(told) > 1:
        says = "; ".join(f"{_ranks(ranks)}: {dtype} {shape}" for (dtype, shape), ranks in told.items())
        raise ValueError(f"{name}: owners disagree about its dtype or shape ({says})")


def _check_coverage(name: str, by_rank: Mapping[int, TensorPart]) -> None:
    shape = next(iter(by_rank.values())).shape
    boxes = {piece.box: None for part in by_rank.values() for piece in part.pieces}
    left = uncovered(Region((0,) * len(shape), shape), tuple(boxes))
    if left:
        raise ValueError(
            f"{name}: no owner has {_some(map(str, left))} of its shape {shape}; {_ranks(by_rank)} have parts of it. "
            "Merge the descriptions of all ranks of the mesh that it is sharded on"
        )


# ---- reading


class _Reading:
    """What a reader fetches, tensor by tensor."""

    def __init__(self, state: ShardedState, reader: int) -> None:
        self._state = state
        self._reader = reader
        host = host_of(engine().program.router.token)
        self._near = {rank for rank, part in enumerate(state._parts) if _is_on(host, part)}
        self._runs: dict[tuple[int, int], list[Segment]] = defaultdict(list)  # by rank and buffer
        self._values: list[tuple[StateEntry, Any]] = []
        self._filled: dict[tuple[object, ...], str] = {}  # destinations, and the names they have
        self._extents: list[tuple[int, int, str]] = []
        self._keep: list[Any] = []  # storages: a parameter may get another one

    def add(self, leaf: StateEntry) -> None:
        if leaf.name in self._state._values:
            if isinstance(leaf.value, Tensor):
                raise ValueError(f"{leaf.name}: a tensor here, and a value that is none at its owners")
            self._values.append((leaf, self._state._values[leaf.name]))
            return
        if not isinstance(leaf.value, Tensor):
            raise ValueError(f"{leaf.name}: {type(leaf.value).__name__} here, and a tensor at its owners")
        owned = self._state._tensors[leaf.name]
        _check_same(leaf.name, leaf.value, next(iter(owned.values())))
        here = local(leaf.name, leaf.value)
        if here.tensor.is_cuda:
            gpu_memory.use(leaf.name)
        if here.pieces and not self._is_filled(leaf.name, here, owned):
            self._extents.append((*_extent(here), leaf.name))
            self._keep.append(here.tensor.untyped_storage())
            self._add_tensor(leaf.name, here, owned)

    def _is_filled(self, name: str, here: LocalShard, owned: dict[int, TensorPart]) -> bool:
        """Whether another name has the same memory here and, as with tied weights, at the owners."""
        place = here.tensor.data_ptr(), here.shape, here.pieces, here.strides, here.tensor.dtype
        first = self._filled.setdefault(place, name)
        if first == name:
            return False
        if self._state._tensors[first] != owned:
            raise ValueError(f"{first} and {name} are the same memory here, and two tensors at their owners")
        return True

    def _add_tensor(self, name: str, here: LocalShard, owned: dict[int, TensorPart]) -> None:
        sources = list(self._sources(owned, len(self._keep)))
        for piece in here.pieces:
            left = [piece.box]
            for rank, part, source in sources:
                for box in left:
                    common = shared(box, source.box)
                    if common is not None:
                        self._add_box(name, common, here, piece, rank, part, source)
                left = [rest for box in left for rest in without(box, source.box)]
                if not left:
                    break

    def _sources(self, owned: dict[int, TensorPart], turn: int) -> Iterator[tuple[int, TensorPart, Overlap]]:
        """One owner of each box: on this host if there is one, and another one for other readers and tensors."""
        replicas: dict[Region, list[tuple[int, TensorPart, Overlap]]] = defaultdict(list)
        for rank, part in owned.items():
            for piece in part.pieces:
                replicas[piece.box].append((rank, part, piece))
        far = []
        for i, candidates in enumerate(replicas.values()):
            near = [candidate for candidate in candidates if candidate[0] in self._near]
            among = near or candidates
            chosen = among[(self._reader + turn + i) % len(among)]
            if near:
                yield chosen
            else:
                far.append(chosen)
        yield from far

    def _add_box(
        self, name: str, box: Region, here: LocalShard, piece: Overlap, rank: int, part: TensorPart, source: Overlap
    ) -> None:
        kind = self._state._parts[rank]._buffers[part.buffer].device
        if (kind == CPU) != here.tensor.is_cpu:
            raise ValueError(
                f"{name}: it is on {here.tensor.device} here and on {kind} at rank {rank}: read into a tensor on the "
                "same kind of device, and copy_() from it"
            )
        there = part.start + offset_in(box, source, part.strides)
        address = here.tensor.data_ptr() + offset_in(box, piece, here.strides)
        try:
            runs = segments(box.sizes, here.tensor.element_size(), there, part.strides, address, here.strides)
        except LayoutError as error:
            raise ValueError(
                f"{name}: here and on rank {rank}, {error} (strides in bytes {here.strides} and {part.strides}): read "
                "into a tensor laid out as the owner's is, and copy_() from it"
            ) from None
        self._runs[rank, part.buffer].extend(runs)

    def plan(self, missing: list[str], unexpected: list[str]) -> Plan:
        parts, by_rank = [], defaultdict[int, int](int)
        for (rank, buffer), runs in sorted(self._runs.items()):
            parts.append(ReadWriteOp(self._state._parts[rank]._buffers[buffer]._handle, False, merged(runs)))
            by_rank[rank] += sum(size for _, _, size in runs)
        self._refuse_overlaps()
        return Plan(parts, dict(by_rank), self._keep, self._values, missing, unexpected)

    def _refuse_overlaps(self) -> None:
        """Two names that share some memory here would be written over each other, in no order."""
        extents = sorted(self._extents)
        end, suspects = 0, []
        for (first, last, name), before in zip(extents, [None, *extents], strict=False):
            if before is not None and first < end:
                suspects.append(f"{before[2]} and {name}")
            end = max(end, last)
        if suspects:  # rarely: columns of one tensor under several names are no overlap
            writes = sorted((here, size) for runs in self._runs.values() for _, here, size in runs)
            if any(a + size > b for (a, size), (b, _) in itertools.pairwise(writes)):
                raise ValueError(f"{_some(suspects)} share some of their memory here; read into tensors of their own")


def _check_same(name: str, tensor: Tensor, owned: TensorPart) -> None:
    if tuple(tensor.shape) != owned.shape:
        raise ValueError(f"{name}: its shape is {tuple(tensor.shape)} here and {owned.shape} at its owners")
    if tensor.dtype != owned.dtype:
        raise ValueError(
            f"{name}: its dtype is {tensor.dtype} here and {owned.dtype} at its owners, and bytes are moved as they "
            "are: cast on one side first"
        )


def _is_on(host: str, part: StatePart) -> bool:
    return any(host_of(buffer._handle.token) == host for buffer in part._buffers[:1])


def _reader() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else current_rank().rank


# ---- words


def _some(things: Iterable[object]) -> str:
    names = [str(thing) for thing in things]
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"rank{'s' * (len(found) != 1)} {_some(found)}"


def _groups(groups: Iterable[Iterable[int]]) -> str:
    return " and ".join(_ranks(group) for group in groups)
