"""ShardedState: a state dict sharded over one mesh that readers on a mesh of any shape can fetch.

Owners register their parts, and the descriptions are merged. Each reader fetches the bytes that it needs from their
owners. shard_geometry.py computes boxes, local_shards.py describes a rank's part, and transfers/engine.py moves bytes.
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

from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.context import current_rank
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
from monarch_backend._rdma.transfers.engine import ReadWriteOp, engine
from monarch_backend._transport.tokens import host_of

_SHOWN = 8  # names, ranks or boxes that a message lists


class TensorPart(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    pieces: tuple[Overlap, ...]
    strides: tuple[int, ...]  # bytes
    address: int  # of the first element, in the owner's process
    buffer: int  # index into the buffers
    start: int  # bytes from the beginning of the buffer to the first element


class StatePart:
    """Description of the part of a state dict that one rank has registered. It is picklable and small: names, boxes and
    handles.

    `ShardedState.register` makes it. It has at most one buffer per tensor: tensors that share memory share a buffer.

    >>> import torch
    >>> from monarch_backend.rdma import ShardedState
    >>> trained = {"weight": torch.zeros(2, 3), "step": 7}
    >>> part = ShardedState.register(trained)
    >>> part.names, part.size()
    (['step', 'weight'], 24)
    >>> trained["weight"] += 1
    >>> part.check(trained)  # the tensor has not moved
    >>> part.drop()
    """

    def __init__(self, tensors: dict[str, TensorPart], values: dict[str, Any], buffers: list[RDMABuffer]) -> None:
        self._tensors = tensors
        self._values = values
        self._buffers = buffers

    @property
    def names(self) -> list[str]:
        """The names of all registered values, in order."""
        return sorted([*self._tensors, *self._values])

    def size(self) -> int:
        """Return the size of the registered memory in bytes."""
        return sum(buffer.size() for buffer in self._buffers)

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError if a tensor of this rank has moved in memory since it was registered.

        In-place updates, such as those of torch's optimizers, do not move a tensor. ``model.to(...)``,
        ``parameter.data = ...`` and the like do. With torch 2.9, FSDP2's first step also moves parameters with uneven
        shards. Readers would then read the old memory. The check takes microseconds per tensor, so call it after every
        step.
        """
        now = {name: leaf.value for name, leaf in leaves(state_dict).items()}
        moved = [name for name, part in self._tensors.items() if name not in now or part != _moved(part, name, now)]
        if moved:
            raise ValueError(
                f"{_some(moved)}: not where it was when it was registered; drop() this description, register again, "
                "and merge again"
            )

    def drop(self) -> None:
        """End the registrations of this rank's memory. Call it on the owner. Later readers get an error."""
        for buffer in self._buffers:
            buffer.drop()

    def __repr__(self) -> str:
        return f"<StatePart {len(self._tensors)} tensors, {len(self._values)} values, {self.size()} bytes>"


class Plan:
    """Plan of the bytes that one reader fetches for one state dict. `ShardedState.plan` makes it; use it in every step.

    `read` writes to the memory that the tensors had when the plan was made. Make another plan after ``model.to(...)``
    and the like. ``bytes_by_rank``: the bytes from each owner, by its index among the descriptions.
    ``missing_keys`` and ``unexpected_keys``: names that no owner has, and names that only owners have.

    >>> import torch
    >>> from monarch_backend.rdma import ShardedState
    >>> part = ShardedState.register({"weight": torch.ones(2, 3)})
    >>> mine = {"weight": torch.zeros(2, 3)}
    >>> plan = ShardedState.merge([part]).plan(mine)
    >>> plan.nbytes, plan.bytes_by_rank
    (24, {0: 24})
    >>> plan.read(timeout=10).get()
    >>> mine["weight"].sum().item()
    6.0
    >>> part.drop()
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
        self.bytes_by_rank = bytes_by_rank  # by the owner's rank among the descriptions
        self.missing_keys = missing  # names that no owner has; empty with strict=True
        self.unexpected_keys = unexpected  # names that only owners have; empty with strict=True
        self._parts = parts
        self._keep = keep
        self._values = values

    @property
    def nbytes(self) -> int:
        """The bytes that one `read` fetches."""
        return sum(self.bytes_by_rank.values())

    def read(self, *, timeout: float | None = None) -> Future[None]:
        """Fetch everything in one batch. Return a future that fails with the first error, as RDMABuffer.read_into does.

        After ``timeout`` seconds it fails with TimeoutError. The tensors must not be used before the future is done.
        After an error their contents are undefined. Values that are not tensors are stored in the state dict at once.
        """
        timeout = check_timeout(timeout)
        for leaf, value in self._values:
            leaf.holder[leaf.key] = copy.deepcopy(value)  # because the reader may change its value
        for device in {storage.device for storage in self._keep}:
            gpu_memory.settle(device)
        return engine().start(self._parts, self._keep, timeout)

    def __repr__(self) -> str:
        count = sum(len(part.segments) for part in self._parts)
        return f"<Plan {self.nbytes} bytes in {count} runs from ranks {_some(self.bytes_by_rank)}>"


class ShardedState:
    """A state dict sharded over the ranks of one mesh, for readers on any other mesh. Picklable.

    Owners `register` their state dicts and return the descriptions. Their caller merges these, and sends the result to
    the readers. Each reader calls `read_into`, or keeps a `plan` and calls its `read`. Only this last step is repeated
    in every round. A reader fetches exactly the bytes of its own part, each once, whatever the shapes of the two
    meshes.

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

    The registration stays valid while optimizers update the tensors in place: a step needs no new handles. **The caller
    orders reads and updates.** A read during an update returns bytes from before and after it, and nothing detects
    that. So start the read after the step's call has returned, and the next step after the readers' calls have
    returned. With actors: ``trainers.step.call().get()``, ``generators.load.call().get()``.
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
        """Register this rank's part of a state dict for readers, and return its description.

        Values are one of:

        - DTensors of any mesh and dtype, sharded in any dimensions, evenly or not, or replicated.
        - Plain tensors. Each is a whole tensor; ranks with the same name are replicas.
        - Numbers and other picklable values of up to 64 KiB. They are sent in the description as they are now.
        - Mappings of these, whose names are joined by ``/``.

        Raises ValueError, with the name, for a tensor without memory that can be shared, an expanded tensor, and a
        `Partial` placement. It raises it also for a local tensor whose shape does not match its placements.
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
        """Merge the descriptions of all ranks.

        Ranks in messages and in `Plan.bytes_by_rank` are indices of `parts`.

        Raises ValueError, with names and ranks, if ranks disagree about a dtype, a shape or a value, or if a part of a
        tensor has no owner.
        """
        return ShardedState([*parts.values()] if isinstance(parts, ValueMesh) else [*parts])

    @property
    def names(self) -> list[str]:
        """The names of all values, in order."""
        return sorted([*self._tensors, *self._values])

    def read_into(
        self, state_dict: Mapping[str, Any], *, strict: bool = True, timeout: float | None = None
    ) -> Future[None]:
        """Fill this rank's state dict: `plan` and `Plan.read` in one call, with the errors of both.

        ``timeout`` is in seconds.
        """
        timeout = check_timeout(timeout)  # before owners are asked
        return self.plan(state_dict, strict=strict).read(timeout=timeout)

    def plan(self, state_dict: Mapping[str, Any], *, strict: bool = True, reader: int | None = None) -> Plan:
        """Compute the bytes that this rank's state dict needs, and their owners.

        Local tensors are filled in place and may be views. Each run of bytes that is contiguous on both sides costs as
        much as a small copy. `reader` is the index of this reader among all. If several owners have the same bytes,
        owners on the reader's host are preferred, and different readers choose different ones. The default is the rank
        in torch's process group, or in the actor mesh if there is no process group.

        Raises ValueError, with names, if the shape, dtype or kind of a value differs from the owners', or if a local
        tensor can't be filled in place. With strict=True it also raises it if the names differ.
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
    """Rebuild an unpickled state. It was checked before it was sent."""
    state = ShardedState([])
    state._parts, state._values = parts, values
    state._tensors.update(tensors)
    return state


# ---- owners


def _tensor_part(dtype: torch.dtype, held: LocalShard) -> TensorPart:
    address = held.tensor.data_ptr() if held.pieces else 0
    return TensorPart(dtype, held.shape, held.pieces, held.strides, address, -1, 0)


def _moved(part: TensorPart, name: str, now: Mapping[str, Any]) -> TensorPart:
    tensor = now[name]
    return _tensor_part(tensor.dtype, local(name, tensor))._replace(buffer=part.buffer, start=part.start)


def _memory(held: Iterable[LocalShard]) -> dict[int, tuple[Tensor, int]]:
    """Return, for each storage, its bytes from the first shard's start to the last shard's end, and their address."""
    spans: dict[int, tuple[int, int]] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for one in held:
        if one.pieces:
            first, last = _extent(one)
            storage = one.tensor.untyped_storage()
            low, high = spans.get(storage.data_ptr(), (first, last))
            known = storages.get(storage.data_ptr())
            if known is None or known.nbytes() < storage.nbytes():  # several storages may have the same address
                storages[storage.data_ptr()] = storage
            spans[storage.data_ptr()] = min(low, first), max(high, last)
    memory = {}
    for base, (low, high) in spans.items():
        whole = torch.empty(0, dtype=torch.uint8, device=storages[base].device).set_(storages[base])
        memory[base] = whole[low - base : high - base], low
    return memory


def _buffers(memory: Iterable[Tensor]) -> list[RDMABuffer]:
    """Register all tensors, or none if one fails."""
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
    """Return the address of the first byte, and of the byte after the last."""
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
    """Builder of a reader's plan. Tensors are added one by one."""

    def __init__(self, state: ShardedState, reader: int) -> None:
        self._state = state
        self._reader = reader
        host = host_of(engine().program.router.token)
        self._near = {rank for rank, part in enumerate(state._parts) if _is_on(host, part)}
        self._runs: dict[tuple[int, int], list[Segment]] = defaultdict(list)  # by rank and buffer
        self._values: list[tuple[StateEntry, Any]] = []
        self._filled: dict[tuple[object, ...], str] = {}  # names by destination
        self._extents: list[tuple[int, int, str]] = []
        self._keep: list[Any] = []  # storages, because a parameter may get another one

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
        """Return whether another name has the same memory here and at the owners, as tied weights have."""
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
        """Choose one owner of each box, on this host if possible. Other readers and tensors choose other owners."""
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
        """Raise ValueError if two names share memory here, because their writes would have no defined order."""
        extents = sorted(self._extents)
        end, suspects = 0, []
        for (first, last, name), before in zip(extents, [None, *extents], strict=False):
            if before is not None and first < end:
                suspects.append(f"{before[2]} and {name}")
            end = max(end, last)
        if suspects:  # rare, and no error for interleaved columns of one tensor
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


# ---- texts for messages


def _some(things: Iterable[object]) -> str:
    names = [str(thing) for thing in things]
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"rank{'s' * (len(found) != 1)} {_some(found)}"


def _groups(groups: Iterable[Iterable[int]]) -> str:
    return " and ".join(_ranks(group) for group in groups)
