"""Random programs of collectives and messages, drawn from a seed, equal on every rank, and checked byte by byte.

`draw` makes the program without communication. A `Player` runs one rank's part of it. Every rank computes all inputs
and the expected results (reference.py), and waits for its operations in its own order. test_random_programs.py runs
programs, test_chaos.py kills ranks in the middle.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import monarch_backend
from tests.process_group import reference

# torch 2.13 introduced these names and deprecates the old ones.
ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

DTYPES = (*reference.DTYPES, "float8_e5m2")
TAGS = (0, 1, 2, 7)
ANY_SOURCE_TAGS = 1000  # plus the step's number: a receive from any source must not take a message of another step

# Limits in bytes where the core changes its algorithm: a cache line, the smallest chunk, the slots' limit, the limit of
# one piece, the largest chunk, a quarter of the stage, the whole stage, and the ring of a lane.
SMALL = (0, 1, 8, 64, 128, 192, 1024, 4096)
MIDDLE = (16 << 10, 32 << 10, 64 << 10, 128 << 10)
LARGE = (256 << 10, 512 << 10, 1 << 20)
HUGE = (2 << 20, 3 << 20, 4 << 20)


# The program ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """One message. Ranks are ranks of the group."""

    number: int
    source: int
    to: int
    tag: int
    dtype: str
    count: int


@dataclass(frozen=True)
class Step:
    """One operation of a program. ``root`` is a rank of the group, ``count`` the number of elements of one piece."""

    number: int
    group: int
    kind: str
    dtype: str
    op: str
    count: int
    root: int
    asynchronous: bool
    strided: bool
    placed: str = ""  # which ranks have their tensors in shared memory: "all", "some" or, if empty, none
    messages: tuple[Message, ...] = ()

    def __str__(self) -> str:
        how = ("async" if self.asynchronous else "sync") + (f", {self.placed} shared" if self.placed else "")
        messages = f", {len(self.messages)} messages" if self.messages else ""
        what = f"{self.kind}({self.op or '-'}) {self.dtype}[{self.count}], root {self.root}"
        return f"step {self.number}: {what}{messages}, {how}, group {self.group}"


@dataclass(frozen=True)
class Program:
    """The operations of all ranks. Group 0 is the default group."""

    seed: int
    size: int
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]


def draw(
    seed: int,
    size: int,
    steps: int,
    *,
    groups: int = 4,
    messages: bool = True,
    weights: Sequence[float] = (50, 32, 15, 3),
) -> Program:
    """Draw a program for ``size`` ranks. ``weights`` are those of the sizes SMALL, MIDDLE, LARGE and HUGE."""
    pick = random.Random(f"program {seed}")
    made = [tuple(range(size))]
    for _ in range(groups - 1):
        made.append(tuple(sorted(pick.sample(range(size), pick.randint(2, size)))))
    kinds = [*COLLECTIVES] + (["burst", "batch", "one way", "any source"] * 2 if messages else [])
    drawn = [_draw_step(pick, number, made, kinds, weights) for number in range(steps)]
    return Program(seed, size, tuple(made), tuple(drawn))


def _draw_step(
    pick: random.Random, number: int, groups: list[tuple[int, ...]], kinds: list[str], weights: Sequence[float]
) -> Step:
    index, kind = pick.randrange(len(groups)), pick.choice(kinds)
    members = len(groups[index])
    dtype, op = pick.choice(DTYPES), ""
    if "reduce" in kind or kind == "coalescing":
        op = pick.choice(reference.OPS)
        dtype = pick.choice([name for name in DTYPES if reference.reduces(name, op)])
    count = _draw_count(pick, dtype, weights, members if pick.random() < 0.4 else 1)
    messages: tuple[Message, ...] = ()
    root, asynchronous = pick.randrange(members), pick.random() < 0.6
    if kind in MESSAGES:
        messages = tuple(_draw_messages(pick, number, kind, members, root, dtype, count, weights))
    strided, placed = pick.random() < 0.15, pick.choices(("", "all", "some"), (60, 30, 10))[0]
    return Step(number, index, kind, dtype, op, count, root, asynchronous, strided, placed, messages)


def _draw_count(pick: random.Random, dtype: str, weights: Sequence[float], share: int) -> int:
    """Draw a number of elements: near a limit in bytes, near its ``share``-th part, or any smaller number."""
    (limits,) = pick.choices((SMALL, MIDDLE, LARGE, HUGE), weights)
    width = getattr(torch, dtype).itemsize
    limit = pick.choice(limits) // share
    if pick.random() < 0.2:
        limit = pick.randint(0, limit)
    return max(0, limit // width + pick.choice((-1, 0, 0, 0, 1, 1)))


def _draw_messages(
    pick: random.Random,
    number: int,
    kind: str,
    members: int,
    root: int,
    dtype: str,
    count: int,
    weights: Sequence[float],
) -> Iterator[Message]:
    if kind == "any source":  # `root` receives messages of one size, because any sender's may arrive first
        senders = [r for r in range(members) if r != root for _ in range(pick.randint(1, 2))]
        for i, source in enumerate(senders):
            yield Message(i, source, root, ANY_SOURCE_TAGS + number, dtype, min(count, 1 << 18))
        return
    other = pick.choice([r for r in range(members) if r != root])
    for i in range(pick.randint(1, 6)):
        # Blocking sends go in one direction only. Two ranks that send to each other and wait could deadlock.
        source, to = (root, other) if kind == "one way" else pick.sample(range(members), 2)
        dtype = pick.choice(DTYPES)
        yield Message(i, source, to, pick.choice(TAGS), dtype, _draw_count(pick, dtype, weights, 1))


# The data -------------------------------------------------------------------------------------------------------------

_LONGEST, _OFFSETS = (4 << 20) + 64, 60_000


@functools.cache
def _table(most: int, negative: bool) -> Tensor:
    """Return random numbers from 1 to ``most``, some negative if ``negative``. Every tensor is a slice of such a
    table.
    """
    chance = torch.Generator().manual_seed(most)
    numbers = torch.randint(1, most + 1, (_LONGEST + _OFFSETS,), generator=chance, dtype=torch.int8)
    if negative:
        numbers[torch.randint(0, 4, numbers.shape, generator=chance, dtype=torch.int8) == 0] *= -1
    return numbers


def prepare() -> None:
    """Make the tables in the process that forks the ranks."""
    _table(3, True)
    _table(13, False)


def numbers(dtype: str, count: int, salt: int, *, reduced: bool = False) -> Tensor:
    """Return a tensor that depends on ``salt``. For reductions the numbers are -3 to 3: a product of four fits an
    int8.
    """
    table, offset = _table(3, True) if reduced else _table(13, False), salt * 7919 % _OFFSETS
    part = table[offset : offset + count]
    if dtype == "bool":
        return part % 2 == 0
    if dtype in reference.COMPLEX:
        imaginary = table[offset + 1 : offset + 1 + count]
        return torch.complex(part.double(), imaginary.double()).to(getattr(torch, dtype))
    if dtype.startswith("u"):
        part = part.abs()
    return part.to(getattr(torch, dtype), copy=True)


# One rank's part ------------------------------------------------------------------------------------------------------

Pairs = list[tuple[Tensor, Tensor]]  # (received, expected)


@dataclass
class Pending:
    """An operation in progress. ``check`` returns pairs of its tensors and their expected values."""

    step: Step
    works: list[Any]
    check: Callable[[], Pairs]


class Call:
    """A step from the view of one member of its group."""

    def __init__(self, program: Program, step: Step, group: Any, order: random.Random) -> None:
        self.program, self.step, self.group, self.order = program, step, group, order
        self.ranks = program.groups[step.group]
        self.me, self.size = group.rank(), len(self.ranks)
        self.root = self.ranks[step.root]
        self.at_root = self.me == step.root
        # True while the tensors of the operation are made. Tensors for the later comparison are not in shared memory.
        self.placing = step.placed == "all" or (step.placed == "some" and self.me % 2 == 0)

    def of(self, rank: int, count: int | None = None, part: int = 0) -> Tensor:
        """Return the input of a rank of the group. ``part`` is its index if the rank has several."""
        salt = self.step.number * 97 + rank * 17 + part
        many = self.step.count if count is None else count
        return self.place(numbers(self.step.dtype, many, salt, reduced=bool(self.step.op)))

    def inputs_of_all_ranks(self, count: int | None = None, part: int = 0) -> list[Tensor]:
        return [self.of(rank, count, part) for rank in range(self.size)]

    def reduced(self, count: int | None = None, part: int = 0) -> Tensor:
        return reduce(self.step.op, self.inputs_of_all_ranks(count, part))

    def blank(self, count: int | None = None, dtype: str = "") -> Tensor:
        wanted = self.step.count if count is None else count
        if self.step.strided and self.step.kind in ("all_gather", "gather", "all_to_all"):
            return torch.zeros((wanted, 2), dtype=getattr(torch, dtype or self.step.dtype))[:, 0]
        return self.place(torch.zeros(wanted, dtype=getattr(torch, dtype or self.step.dtype)))

    def place(self, x: Tensor) -> Tensor:
        """Move the tensor to shared memory if this rank does so in this step and the arena has room."""
        if not self.placing:
            return x
        try:
            return monarch_backend.empty_shared(x.shape, dtype=x.dtype).copy_(x)
        except MemoryError:
            return x

    def begin(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if self.step.op:
            kwargs["op"] = getattr(dist.ReduceOp, self.step.op)
        work = collective(*args, group=self.group, async_op=self.step.asynchronous, **kwargs)
        assert (work is not None) == self.step.asynchronous
        return [] if work is None else [work]


def reduce(op: str, inputs: list[Tensor]) -> Tensor:
    """Call reference.reduced, which does not support float8_e5m2."""
    if inputs[0].dtype is torch.float8_e5m2:
        return reference.reduced(op, [x.float() for x in inputs]).to(torch.float8_e5m2)
    return reference.reduced(op, inputs)


Started = tuple[list[Any], Callable[[], Pairs]]


def _barrier(call: Call) -> Started:
    work = dist.barrier(call.group, async_op=call.step.asynchronous)
    return ([] if work is None else [work]), list


def _broadcast(call: Call) -> Started:
    x = call.of(call.me)
    return call.begin(dist.broadcast, x, call.root), lambda: [(x, call.of(call.step.root))]


def _all_reduce(call: Call) -> Started:
    x = call.of(call.me)
    return call.begin(dist.all_reduce, x), lambda: [(x, call.reduced())]


def _all_reduce_coalesced(call: Call) -> Started:
    x, y = call.of(call.me), call.of(call.me, 33, 1)
    works = call.begin(dist.all_reduce_coalesced, [x, y])
    return works, lambda: [(x, call.reduced()), (y, call.reduced(33, 1))]


def _coalescing(call: Call) -> Started:
    x, y = call.of(call.me), call.of(call.me, 1000, 1)
    op = getattr(dist.ReduceOp, call.step.op)
    with dist._coalescing_manager(call.group, async_ops=call.step.asynchronous) as manager:
        for tensor in (x, y):
            dist.all_reduce(tensor, op, call.group)
    return ([manager] if call.step.asynchronous else []), lambda: [(x, call.reduced()), (y, call.reduced(1000, 1))]


def _reduce(call: Call) -> Started:
    x = call.of(call.me)
    return call.begin(dist.reduce, x, call.root), lambda: [(x, call.reduced())] if call.at_root else []


def _all_gather(call: Call) -> Started:
    x, outputs = call.of(call.me), [call.blank() for _ in call.ranks]
    works = call.begin(dist.all_gather, outputs, x)
    return works, lambda: [(x, call.of(call.me)), *zip(outputs, call.inputs_of_all_ranks(), strict=True)]


def _all_gather_single(call: Call) -> Started:
    x, output = call.of(call.me), call.blank(call.step.count * call.size)
    if call.step.strided:  # the stacked form of the output
        output = output.view(call.size, call.step.count)
    works = call.begin(ALL_GATHER_SINGLE, output, x)
    return works, lambda: [(x, call.of(call.me)), (output.view(-1), torch.cat(call.inputs_of_all_ranks()))]


def _all_gather_coalesced(call: Call) -> Started:
    x, y = call.of(call.me), call.of(call.me, 33, 1)
    outputs = [[call.blank(), call.blank(33)] for _ in call.ranks]
    works = call.begin(dist.all_gather_coalesced, outputs, [x, y])
    return works, lambda: [
        (x, call.of(call.me)),
        *zip([row[0] for row in outputs], call.inputs_of_all_ranks(), strict=True),
        *zip([row[1] for row in outputs], call.inputs_of_all_ranks(33, 1), strict=True),
    ]


def _gather(call: Call) -> Started:
    x, outputs = call.of(call.me), [call.blank() for _ in call.ranks] if call.at_root else []
    works = call.begin(dist.gather, x, outputs or None, dst=call.root)
    return works, lambda: [(x, call.of(call.me)), *zip(outputs, call.inputs_of_all_ranks(), strict=False)]


def _scatter(call: Call) -> Started:
    rows = call.inputs_of_all_ranks() if call.at_root else []
    output = call.blank()
    works = call.begin(dist.scatter, output, rows or None, src=call.root)
    return works, lambda: [(output, call.of(call.me)), *zip(rows, call.inputs_of_all_ranks(), strict=False)]


def _reduce_scatter(call: Call) -> Started:
    rows, output = [call.of(call.me, part=to) for to in range(call.size)], call.blank()
    works = call.begin(dist.reduce_scatter, output, rows)
    kept = [call.of(call.me, part=to) for to in range(call.size)]
    return works, lambda: [(output, call.reduced(part=call.me)), *zip(rows, kept, strict=True)]


def _reduce_scatter_single(call: Call) -> Started:
    mine = torch.cat([call.of(call.me, part=to) for to in range(call.size)])
    x, output = call.place(mine.clone()), call.blank()
    works = call.begin(REDUCE_SCATTER_SINGLE, output, x.view(call.size, -1) if call.step.strided else x)
    return works, lambda: [(output, call.reduced(part=call.me)), (x, mine)]


def _all_to_all(call: Call) -> Started:
    # The size differs for each pair of ranks if the tensors are large enough.
    def count(sender: int, to: int) -> int:
        return max(0, call.step.count - 5 * ((sender * 3 + to) % 4))

    sent = [call.of(call.me, count(call.me, to), to) for to in range(call.size)]
    outputs = [call.blank(count(sender, call.me)) for sender in range(call.size)]
    works = call.begin(dist.all_to_all, outputs, sent)
    return works, lambda: [
        *zip(outputs, [call.of(r, count(r, call.me), call.me) for r in range(call.size)], strict=True),
        *zip(sent, [call.of(call.me, count(call.me, to), to) for to in range(call.size)], strict=True),
    ]


def _all_to_all_single(call: Call) -> Started:
    rows, width = 3 * call.size, call.step.count // (3 * call.size)
    sizes = [reference.split_sizes(r, call.size) if call.step.root else [3] * call.size for r in range(call.size)]
    given, taken = sizes[call.me], [row[call.me] for row in sizes]

    def whole(rank: int) -> Tensor:
        return call.of(rank, rows * width).view(rows, width)[: sum(sizes[rank])]

    x, output = whole(call.me), call.blank(sum(taken) * width).view(sum(taken), width)
    works = call.begin(dist.all_to_all_single, output, x, *((taken, given) if call.step.root else ()))

    def check() -> Pairs:
        pieces = [list(torch.split(whole(rank), sizes[rank])) for rank in range(call.size)]
        return [(output, torch.cat(reference.exchanged(pieces, call.me))), (x, whole(call.me))]

    return works, check


COLLECTIVES: dict[str, Callable[[Call], Started]] = {
    "barrier": _barrier,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "coalescing": _coalescing,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "all_gather_coalesced": _all_gather_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
}


# Messages -------------------------------------------------------------------------------------------------------------


def _content(call: Call, message: Message) -> Tensor:
    return numbers(message.dtype, message.count, call.step.number * 97 + message.number * 13 + message.source + 5)


def _in_any_order(call: Call, messages: list[Message]) -> list[Message]:
    """Return the messages in a random order of receives. Messages with the same sender and tag keep their order."""
    queues: dict[tuple[int, int], list[Message]] = {}
    for message in messages:
        queues.setdefault((message.source, message.tag), []).append(message)
    keys = [(message.source, message.tag) for message in messages]
    call.order.shuffle(keys)
    return [queues[key].pop(0) for key in keys]


def _mine(call: Call) -> tuple[list[tuple[Message, Tensor]], list[tuple[Message, Tensor]]]:
    """Return (messages that this rank sends, messages that it receives), with their tensors."""
    sent = [(message, _content(call, message)) for message in call.step.messages if message.source == call.me]
    messages = _in_any_order(call, [message for message in call.step.messages if message.to == call.me])
    return sent, [(message, call.blank(message.count, message.dtype)) for message in messages]


def _came(call: Call, *sides: list[tuple[Message, Tensor]]) -> Pairs:
    return [(tensor, _content(call, message)) for message, tensor in itertools.chain(*sides)]


def _burst(call: Call) -> Started:
    sent, received = _mine(call)
    jobs: list[Callable[[], Any]] = []
    sends, receives = list(sent), list(received)
    while sends or receives:
        if sends and (not receives or call.order.random() < 0.5):
            message, x = sends.pop(0)
            jobs.append(functools.partial(dist.isend, x, call.ranks[message.to], call.group, message.tag))
        else:
            message, x = receives.pop(0)
            jobs.append(functools.partial(dist.irecv, x, call.ranks[message.source], call.group, message.tag))
    return [job() for job in jobs], lambda: _came(call, sent, received)


def _batch(call: Call) -> Started:
    sent, received = _mine(call)
    jobs = [dist.P2POp(dist.isend, x, call.ranks[each.to], call.group, each.tag) for each, x in sent]
    jobs += [dist.P2POp(dist.irecv, x, call.ranks[each.source], call.group, each.tag) for each, x in received]
    return (dist.batch_isend_irecv(jobs) if jobs else []), lambda: _came(call, sent, received)


def _one_way(call: Call) -> Started:
    sent, received = _mine(call)
    works = []
    for message, x in sent:
        if call.order.random() < 0.5:
            dist.send(x, call.ranks[message.to], call.group, message.tag)
        else:
            works.append(dist.isend(x, call.ranks[message.to], call.group, message.tag))
    for message, x in received:
        if call.order.random() < 0.5:
            assert dist.recv(x, call.ranks[message.source], call.group, message.tag) == call.ranks[message.source]
        else:
            works.append(dist.irecv(x, call.ranks[message.source], call.group, message.tag))
    return works, lambda: _came(call, sent, received)


def _any_source(call: Call) -> Started:
    messages, tag = call.step.messages, ANY_SOURCE_TAGS + call.step.number
    if not call.at_root:
        sent = [(message, _content(call, message)) for message in messages if message.source == call.me]
        works = [dist.isend(x, call.root, call.group, tag) for _, x in sent]
        return works, lambda: _came(call, sent)
    got = (
        [call.blank() for _ in messages] if not messages else [call.blank(each.count, each.dtype) for each in messages]
    )
    if not call.step.asynchronous:
        sources = [call.ranks.index(dist.recv(x, group=call.group, tag=tag)) for x in got]
        return [], lambda: _by_source(call, sources, got)
    works = [dist.irecv(x, group=call.group, tag=tag) for x in got]
    return works, lambda: _by_source(call, [work._source_rank() for work in works], got)


def _by_source(call: Call, sources: list[int], got: list[Tensor]) -> Pairs:
    waiting: dict[int, list[Message]] = {}
    for message in call.step.messages:
        waiting.setdefault(message.source, []).append(message)
    return [(x, _content(call, waiting[source].pop(0))) for source, x in zip(sources, got, strict=True)]


MESSAGES: dict[str, Callable[[Call], Started]] = {
    "burst": _burst,
    "batch": _batch,
    "one way": _one_way,
    "any source": _any_source,
}


# The player -----------------------------------------------------------------------------------------------------------


class Player:
    """One rank's part of a program: its groups, its order of waits, and its operations in progress."""

    def __init__(self, program: Program, rank: int) -> None:
        # Set for all threads until the process ends, because catch_warnings is not thread-safe.
        for text in (r".*_coalesced.* will be deprecated", r"`torch\.distributed.*is deprecated"):
            warnings.filterwarnings("ignore", text, FutureWarning)
        self.program, self.rank = program, rank
        self.groups = [dist.group.WORLD] + [dist.new_group(list(ranks)) for ranks in program.groups[1:]]

    def order(self, extra: int = -1) -> random.Random:
        """Return the source of this rank's own random choices."""
        return random.Random(f"order {self.program.seed}/{self.rank}/{extra}")

    def plays(self, step: Step) -> bool:
        """Return whether this rank is a member of the step's group."""
        return self.rank in self.program.groups[step.group]

    def start(self, step: Step, order: random.Random) -> Pending:
        """Start a step of this rank. A synchronous step has ended on return."""
        begin = COLLECTIVES.get(step.kind) or MESSAGES[step.kind]
        call = Call(self.program, step, self.groups[step.group], order)
        works, check = begin(call)
        call.placing = False
        return Pending(step, works, check)

    def wait(self, pending: Pending, order: random.Random) -> None:
        """Wait for the operation in a random way."""
        works = list(pending.works)
        order.shuffle(works)
        for work in works:
            way = order.random()
            if way < 0.2 and hasattr(work, "is_completed"):
                while not work.is_completed():
                    time.sleep(0)
            elif way < 0.3 and hasattr(work, "get_future"):
                work.get_future().wait()
            work.wait()

    def check(self, pending: Pending) -> None:
        """Compare the results. Then overwrite the tensors, because no rank may read them any more."""
        pairs = pending.check()
        for i, (got, want) in enumerate(pairs):
            # Not .contiguous(): torch calls one element with a stride contiguous, but cannot view its bytes.
            if not reference.same(got.clone(memory_format=torch.contiguous_format), want):
                raise AssertionError(self._difference(pending.step, i, got, want))
        for got, _ in pairs:
            got.zero_()

    def _difference(self, step: Step, i: int, got: Tensor, want: Tensor) -> str:
        where = f"seed {self.program.seed}, rank {self.rank} of {self.program.size}, {step}, tensor {i}"
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{where}: got {got.dtype}{list(got.shape)}, want {want.dtype}{list(want.shape)}"
        wide = torch.complex128 if got.dtype.is_complex else torch.float64
        wrong = (got.reshape(-1).to(wide) != want.reshape(-1).to(wide)).nonzero().view(-1)
        at = slice(*((int(wrong[0]), int(wrong[0]) + 4) if len(wrong) else (0, 4)))
        return (
            f"{where}: {len(wrong)} of {got.numel()} elements differ, from {wrong[:1].tolist()} to "
            f"{wrong[-1:].tolist()}: got {got.reshape(-1)[at].tolist()}, want {want.reshape(-1)[at].tolist()}"
        )

    def finish(self, pending: Pending, order: random.Random) -> None:
        """Wait for the operation and compare its results."""
        self.wait(pending, order)
        self.check(pending)

    def play(self, steps: Sequence[Step], extra: int = -1) -> int:
        """Run this rank's part of the steps, and return their number."""
        order, under_way, count = self.order(extra), [], 0
        for step in steps:
            if not self.plays(step):
                continue
            count += 1
            under_way.append(self.start(step, order))
            while len(under_way) > 12 or (under_way and order.random() < 0.45):
                self.finish(under_way.pop(order.randrange(len(under_way))), order)
        while under_way:
            self.finish(under_way.pop(order.randrange(len(under_way))), order)
        return count

    def play_in_threads(self) -> int:
        """Run each group's steps in a thread of their own, and return the number of steps. The threads do not
        synchronize.
        """
        counts: list[int] = []
        errors: list[BaseException] = []

        def play(index: int) -> None:
            try:
                counts.append(self.play([step for step in self.program.steps if step.group == index], index))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=play, args=(index,)) for index in range(len(self.groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return sum(counts)
