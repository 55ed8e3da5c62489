"""Classes of the compiled core that several threads use at once: no call is lost, and no object is freed too early.

On a build of CPython without a GIL (`PYTHON_GIL=0` there) the threads run Python code at the same time. With a GIL they
take turns every 10 us.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import itertools
import subprocess
import sys
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from monarch_backend import _native

THREADS = 4
TIMEOUT_S = 60.0
MIB = 1 << 20
DONE, CANCELLED = 0, 4  # _native: Outcome
READ, FETCH_ADD = 0, 2  # _native: Access
U8, ALL_REDUCE, SUM = 5, 1, 1  # _native: Dtype, Collective, ReduceOp
IN_PLACE = 0  # _native: Form
LARGE = 100_000  # bytes of a payload in a block that its receiver keeps


pytestmark = pytest.mark.usefixtures("frequent_thread_switches")


class Over:
    """The end of loops: set by a test, when a thread fails, or after TIMEOUT_S."""

    def __init__(self) -> None:
        self._event, self._deadline = threading.Event(), time.monotonic() + TIMEOUT_S

    def __bool__(self) -> bool:
        return self._event.is_set() or time.monotonic() > self._deadline

    def set(self) -> None:
        self._event.set()


def at_once(*works: Callable[[int], Any], each: int = 1, over: Over | None = None) -> list[Any]:
    """Return the results of each function on ``each`` threads. All threads start at the same time.

    The first one that fails sets ``over``.
    """
    calls = [work for work in works for _ in range(each)]
    together = threading.Barrier(len(calls))

    def begin(thread: int) -> Any:
        try:
            together.wait(TIMEOUT_S)
            return calls[thread](thread)
        except BaseException:
            if over is not None:
                over.set()
            raise

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(begin, range(len(calls))))


def beside(work: Callable[[int], Any], *loops: Callable[[int], Any], over: Over) -> list[Any]:
    """Return the results of ``loops``, which run until THREADS threads have run ``work``."""

    def wait(_: int) -> None:
        at_once(work, each=THREADS)
        over.set()

    return at_once(*loops, wait, over=over)[:-1]


# Shared memory --------------------------------------------------------------------------------------------------------


def connected_hosts() -> tuple[_native.Host, _native.Host]:
    one, other = _native.Host(64 * MIB), _native.Host(64 * MIB)
    assert one.connect(other.token)
    assert other.accepted(one.token, TIMEOUT_S)
    return one, other


def groups_of(one: _native.Host, other: _native.Host) -> tuple[_native.ShmGroup, _native.ShmGroup]:
    """Return both ranks of a group that lies in one process."""
    blocks = [one.allocate_control_block(2), other.allocate_control_block(2)]
    return (
        _native.ShmGroup(one, 0, [None, one.connect(other.token)], blocks, 0, ""),
        _native.ShmGroup(other, 1, [other.connect(one.token), None], blocks, 0, ""),
    )


def address_of(values: Any) -> int:
    return _native.View(values).address


def test_connections_of_hosts_are_kept() -> None:
    one, other = _native.Host(MIB), _native.Host(MIB)
    peers = at_once(lambda _: one.connect(other.token), lambda _: other.connect(one.token), each=THREADS)
    assert all(peers)
    again = at_once(lambda _: one.connect(other.token), lambda _: other.connect(one.token), each=THREADS)
    assert len(set(map(id, again[:THREADS]))) == len(set(map(id, again[THREADS:]))) == 1


def test_arena_memory_has_one_user() -> None:
    host = _native.Host(16 * MIB)
    before = host.used()

    def use(thread: int) -> None:
        for size in range(1, 300):
            view = memoryview(_native.ArenaBuffer(host, size * 100)).cast("B")
            view[:100] = bytes([thread]) * 100
            assert host.used() > before
            assert bytes(view[:100]) == bytes([thread]) * 100

    at_once(use, each=THREADS)
    gc.collect()
    assert host.used() == before


class Owned:
    """An object that memory belongs to."""


def test_messages_and_their_owners() -> None:
    one, other = groups_of(*connected_hosts())
    count = 300

    def transfer(group: _native.ShmGroup, sends: bool, tag: int) -> list[int]:
        seen = []
        for i in range(count):
            value, owner = array.array("B", [i % 251 if sends else 0] * 64), Owned()
            alive = weakref.ref(owner)
            operation = group.message(sends, U8, 1 if sends else 0, tag, address_of(value), 64, owner)
            del owner
            assert group.finish(operation, TIMEOUT_S) is None
            assert operation.done
            assert operation.failure is None
            assert sends or operation.source == 0
            operation.forget()
            assert alive() is None
            seen.append(value[63])
        return seen

    sent = lambda thread: transfer(one, True, thread % THREADS)  # noqa: E731
    received = lambda thread: transfer(other, False, thread % THREADS)  # noqa: E731
    for seen in at_once(sent, received, each=THREADS):
        assert seen == [i % 251 for i in range(count)]
    at_once(lambda _: one.close(), lambda _: other.close(), each=2)


def test_owner_of_a_message_is_dropped_once() -> None:
    one, _other = groups_of(*connected_hosts())
    value = array.array("B", bytes(64))
    for _ in range(200):
        owner = Owned()
        alive = weakref.ref(owner)
        operation = one.message(False, U8, 1, 7, address_of(value), 64, owner)
        del owner
        at_once_here = threading.Barrier(THREADS)

        def forget(operation: Any = operation, barrier: Any = at_once_here) -> None:
            barrier.wait(TIMEOUT_S)
            operation.forget()

        threads = [threading.Thread(target=forget) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert alive() is None
    one.close()


def test_engine_runs_each_callback_once() -> None:
    hosts = connected_hosts()
    groups, engines = groups_of(*hosts), [_native.Engine(host) for host in hosts]
    count, each = 100, 2
    called: list[tuple[int, int]] = []
    everything = threading.Semaphore(0)
    values = [[[array.array("B", [1] * 32) for _ in range(count)] for _ in range(each)] for _ in range(2)]

    def start(thread: int) -> None:
        rank, mine = thread // each, thread % each
        for i in range(count):
            span = [(address_of(values[rank][mine][i]), 32)]

            def then(i: int = i) -> None:
                called.append((thread, i))
                everything.release()

            operation, _ = groups[rank].begin(ALL_REDUCE, U8, SUM, -1, 32, span, span, values[rank][mine][i])
            operation.set_time(TIMEOUT_S)
            if i % 4:
                engines[rank].submit_async(groups[rank], operation, then)
                continue
            assert groups[rank].wait(operation, TIMEOUT_S)
            engines[rank].submit_async(groups[rank], operation, then)
            if engines[rank].take_back(operation):
                then()

    at_once(start, each=2 * each)
    for _ in range(2 * each * count):
        assert everything.acquire(timeout=TIMEOUT_S)
    assert Counter(called) == Counter(itertools.product(range(2 * each), range(count)))
    assert all(value.tobytes() == b"\2" * 32 for rank in values for thread in rank for value in thread)
    assert [group.sequence for group in groups] == [each * count] * 2
    at_once(lambda _: engines[0].stop(), lambda _: engines[1].stop(), each=THREADS)


class FakeTensor:
    """What a fast path asks a tensor."""

    is_cpu, layout, dtype, nbytes = True, "strided", "uint8", 16

    def __init__(self) -> None:
        self.values = array.array("B", [1] * 16)

    def is_contiguous(self) -> bool:
        return True

    def is_neg(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return address_of(self.values)


class FakeOptions:
    asyncOp, reduceOp = False, "sum"


class FakeWork:
    _outputs: Any = None


class FakeOwner:
    def all_reduce(self, *_: Any) -> str:
        return "method"


def test_works_of_a_fast_path_have_one_user() -> None:
    """Works of small tensors are used again when no other reference exists. Two threads never get the same one."""
    host = _native.Host(16 * MIB)
    group = _native.ShmGroup(host, 0, [None], [host.allocate_control_block(1)], 0, "")
    owner = FakeOwner()
    watches, profiler = [lambda: False], {"_is_profiler_enabled": False}
    torch: tuple[object, ...] = FakeTensor, FakeTensor, "strided", "sum", {}, {"uint8": U8}, watches, profiler
    method = ALL_REDUCE, IN_PLACE, owner, "all_reduce", FakeOptions
    calls_back = lambda *_: "failed", lambda *_: "pending", lambda _: TIMEOUT_S
    path = group.fast_path(*method, FakeWork, *calls_back, None, _native.Engine(host), torch)
    options, calls = FakeOptions(), 2000

    def call(_: int) -> int:
        kept: list[tuple[Any, Any]] = []
        for i in range(calls):
            tensor = FakeTensor()
            work = path([tensor], options)
            assert work._outputs == [tensor]
            if i % 3 == 0:
                kept.append((work, tensor))
        assert all(work._outputs == [tensor] for work, tensor in kept)
        return len({id(work) for work, _ in kept})

    assert at_once(call, each=THREADS) == [len(range(0, calls, 3))] * THREADS
    assert group.sequence == THREADS * calls
    shared, over = [FakeTensor()], Over()

    def change(_: int) -> None:
        while not over:
            shared.clear()
            shared.append(FakeTensor())

    beside(lambda _: [path(shared, options) for _ in range(calls // 4)], change, over=over)
    at_once(lambda _: path.end(), lambda _: path([FakeTensor()], options), each=2)
    assert path([FakeTensor()], options) == "method"


# Mailboxes ------------------------------------------------------------------------------------------------------------


def connected_mailboxes() -> tuple[_native.Mailbox, _native.Mailbox, int]:
    """Return two mailboxes, and the link from the first one to the second."""
    hosts = _native.Host(64 * MIB), _native.Host(64 * MIB)
    one, other = (_native.Mailbox(host, True) for host in hosts)
    over = Over()
    while (link := one.connect(hosts[1].token)) < 0 and not over:
        time.sleep(0.001)
    return one, other, link


def test_mailbox_delivers_each_frame_once() -> None:
    sender, receiver, link = connected_mailboxes()
    count, readers, over = 200, 2, Over()
    received: list[tuple[int, int, bytes, int]] = []

    def send(thread: int) -> None:
        for i in range(count):
            prefix, size = b"%d" % i, LARGE if i % 10 == 0 else i
            parts = [bytes([thread]) * (size // 2), bytearray([thread]) * (size - size // 2)]
            while not sender.send(link, 1, thread, i, i, 0, 0, prefix, parts, [bytes([thread]) * 100]) and not over:
                time.sleep(0.001)  # until the receiver has read its share
            if i % 20 == 0:
                assert sender.multicast([(link, i, 0, 0)], 2, thread, i, b"", b"many", None)

    def read(_: int) -> None:
        while not over:
            if not receiver.acquire_turn():
                time.sleep(0.0001)
                continue
            try:
                events = receiver.receive(0.01)
            finally:
                receiver.release_turn()
            for _link, kind, target, ref, *_rest, prefix, body, buffers in (e for e in events if e[1] >= 0):
                if kind == 1:
                    assert bytes(buffers[0]) == bytes([target]) * 100
                    assert bytes(body) == bytes([target]) * (LARGE if ref % 10 == 0 else ref)
                received.append((kind, target, bytes(prefix), ref))
                if len(received) == THREADS * (count + count // 20):
                    over.set()

    def disturb(_: int) -> None:
        while not over:
            sender.unread(link), sender.kept_back(), receiver.is_turn_wanted()
            receiver.wake()
            sender.set_oversubscribed(True)
            if sender.acquire_turn():  # a reader also sends what did not fit
                sender.receive(0.0)
                sender.release_turn()
            time.sleep(0.0005)

    at_once(*[send] * THREADS, *[read] * readers, disturb, over=over)
    wanted = [(1, thread, b"%d" % i, i) for thread in range(THREADS) for i in range(count)]
    wanted += [(2, thread, b"", i) for thread in range(THREADS) for i in range(0, count, 20)]
    assert Counter(received) == Counter(wanted)
    at_once(lambda _: sender.close(), lambda _: receiver.close(), lambda _: sender.drop(link), each=2)


def test_items_of_a_body_live_until_they_are_sent() -> None:
    """Another thread removes the parts of a list while they are being copied."""
    sender, _receiver, link = connected_mailboxes()
    parts: list[bytes] = []
    over = Over()

    def change(_: int) -> None:
        while not over:
            parts[:] = [bytes([7]) * 700 for _ in range(8)]
            parts.clear()

    beside(lambda _: [sender.send(link, 1, 0, 0, 0, 0, 0, b"", parts, None) for _ in range(300)], change, over=over)


# Registered memory ----------------------------------------------------------------------------------------------------


def test_registered_memory_of_this_process_and_of_another_host() -> None:
    hosts = connected_hosts()
    owner, reader = _native.Memory(hosts[0]), _native.Memory(hosts[1])
    shared = _native.ArenaBuffer(hosts[0], 4096)
    counter = owner.add(address_of(shared), 4096, True)
    memoryview(shared).cast("B")[:8] = bytes(8)
    token, count = hosts[0].token, 300

    def register(thread: int) -> None:
        for i in range(count):
            here, there = array.array("B", bytes([i % 256]) * 64), array.array("B", bytes(64))
            ticket = owner.add(address_of(here), 64, True)
            scope = _native.CancelScope(TIMEOUT_S)
            assert owner.check(ticket, 0, 64, READ) == 0
            assert owner.move_local(ticket, False, [(0, address_of(there), 64)])[0] == DONE
            assert there == here
            assert reader.move(token, ticket, False, [(0, address_of(there), 64)], scope)[0] == DONE
            assert reader.copy_method(token, ticket) >= 0
            assert owner.drop(ticket, TIMEOUT_S) == 0
            assert owner.check(ticket, 0, 64, READ) != 0
            owner.count(), owner.user_of(ticket), reader.mapped(), reader.take_unused_mappings()
            reader.sweep()

    def add(thread: int) -> None:
        for _ in range(count):
            assert owner.change_local(counter, FETCH_ADD, 0, 1, 0)[0] == DONE
            assert reader.change(token, counter, FETCH_ADD, 0, 1, 0, _native.CancelScope(None))[0] == DONE

    into = array.array("B", bytes(64))
    copies = _native.Copies(reader, [(token, counter, False, 64, address_of(into), 64)])

    def copy(_: int) -> None:
        for _ in range(count):
            assert copies.run()
            assert reader.at_once(token, counter, False, 128, address_of(into), 64)

    at_once(register, add, copy, each=2)
    assert int.from_bytes(memoryview(shared).cast("B")[:8], sys.byteorder) == 2 * 2 * count
    assert owner.count() == 1


def test_cancellation_is_seen_by_all_threads() -> None:
    for _ in range(50):
        scope, cancel = _native.CancelScope(None), _native.Cancel()
        at_once(
            *[lambda _, each=each: each() for each in (scope.cancel, cancel.set, scope.outcome, cancel.is_set)], each=2
        )
        assert scope.outcome() == CANCELLED
        assert cancel.is_set()


@contextlib.contextmanager
def client_and_server(streams: int) -> Iterator[tuple[_native.MemoryClient, _native.MemoryServer, _native.Memory]]:
    host = _native.Host(16 * MIB)
    memory = _native.Memory(host)
    secret = bytes(32)
    server = _native.MemoryServer(memory, _native.MemoryIdentity(host.token, secret))
    port = server.listen("127.0.0.1")
    client = _native.MemoryClient("127.0.0.1", port, _native.MemoryIdentity("0" * 32, secret), host.token, streams)
    try:
        yield client, server, memory
    finally:
        at_once(lambda _: client.close(), lambda _: server.close(), each=2)


def test_client_and_server_of_memory() -> None:
    count = 60
    with client_and_server(THREADS) as (client, server, memory):
        values = array.array("Q", [0] * 512)
        ticket = memory.add(address_of(values), 4096, True)

        def transfer(thread: int) -> None:
            at = 64 * (1 + thread)
            for i in range(count):
                ours, back = array.array("Q", [i + thread] * 8), array.array("Q", [0] * 8)
                assert client.write(ticket, [(at, address_of(ours), 64)], TIMEOUT_S).outcome == "done"
                assert client.read(ticket, [(at, address_of(back), 64)], TIMEOUT_S).outcome == "done"
                assert back == ours
                assert client.fetch_add(ticket, 0, 1, TIMEOUT_S).outcome == "done"
                server.connections()

        def fetch_once(_: int) -> None:
            """Both threads fetch a request: one of them gets the result."""
            for _ in range(count):
                back, scope = array.array("Q", [1] * 8), _native.CancelScope(TIMEOUT_S)
                request = client.begin(ticket, READ, [(2048, address_of(back), 64)], 0, 0, scope)
                if request is None:
                    continue  # no connection is idle
                other: list[Any] = []
                thread = threading.Thread(target=lambda: other.append(request.fetch(TIMEOUT_S)))  # noqa: B023
                thread.start()
                mine = request.fetch(TIMEOUT_S)
                thread.join()
                results = [result for result in (mine, *other) if result is not None]
                assert [result[0] for result in results] == [DONE]
                assert request.is_over
                assert back == array.array("Q", [0] * 8)

        at_once(transfer, fetch_once, each=2)
        assert values[0] == 2 * count


# Commands -------------------------------------------------------------------------------------------------------------


def set_up() -> None:
    """Set the functions that the core calls."""
    importlib.import_module("monarch_backend.dtensor._controller.call_sites")
    importlib.import_module("monarch_backend.dtensor._dispatch.dispatch")


class Workers:
    """A worker set whose words the test takes."""

    def __init__(self) -> None:
        self.words: list[Any] = []
        self.unreachable: list[int] = []
        self.woken = 0
        self.wakes = threading.Semaphore(0)
        self.sink = _native.Sink(
            self.words, self.unreachable, itertools.count(1), self.wakes.release, lambda: None, sys.maxsize
        )


def entry_of(workers: Workers, number: int) -> _native.Entry:
    made = _native.Entry()
    made.workers, made.number, made.outs, made.kind = workers, number, (), 0
    return made


def test_records_of_several_threads_stay_whole() -> None:
    set_up()
    workers = Workers()
    plan = _native.Plan("add", None, 0b111, frozenset())
    plan.entries[int, int, int] = entry_of(workers, 1 << 40)
    count, over = 2000, Over()
    batches: list[list[Any]] = []

    def issue(thread: int) -> None:
        for i in range(count):
            _native.issue(plan, [thread, i, thread * i], None, None)

    def take(_: int) -> None:
        while not over:
            if workers.wakes.acquire(timeout=0.01):  # otherwise nothing is there
                batches.append(_native.take_all(workers.words))
        assert not workers.words or workers.wakes.acquire(blocking=False), "no wake was called for these"
        batches.append(_native.take_all(workers.words))

    beside(issue, take, over=over)
    found: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        assert len(batch) % 5 == 0
        for number, _site, thread, i, product in zip(*[iter(batch)] * 5, strict=True):
            assert (number, product) == (1 << 40, thread * i)
            found[thread, i] += 1
    assert found == Counter(itertools.product(range(THREADS), range(count)))
    assert workers.sink.records == THREADS * count


def test_forgotten_signatures_have_no_later_records() -> None:
    set_up()
    workers, forgotten = Workers(), -1
    plan = _native.Plan("add", None, 0b1, frozenset())
    over = Over()

    def issue(_: int) -> None:
        while not over:
            with contextlib.suppress(Exception):  # between `forget` and the new entry there is none
                _native.issue(plan, (3,), None, None)

    def forget(_: int) -> None:
        for number in range(100, 600):
            plan.entries[int,] = entry_of(workers, number)
            for _ in range(20):
                _native.issue(plan, (3,), None, None)
            plan.forget((int,))
            workers.words += (forgotten, number, number)
        over.set()

    at_once(forget, *[issue] * THREADS, over=over)
    ended = 0
    for number, which, _ in zip(*[iter(workers.words)] * 3, strict=True):
        if number == forgotten:
            ended = which
        else:
            assert number > ended
    assert ended == 599


def test_calls_of_a_worker_whose_function_is_replaced() -> None:
    def new_function() -> Any:
        return types.FunctionType((lambda x: x + 1).__code__, {})  # nothing else refers to it

    call = _native.Call(new_function(), [("tensor", 0)], (), 1, 1, 1, False)
    calls, over = {7: call}, Over()

    def run(_: int) -> None:
        tensors: dict[int, Any] = {1: 0}
        for i in range(1, 3000):
            assert _native.execute([7, 0, i, i + 1, 0, 1, i], 0, calls, tensors, {}, [0]) == 7
        assert tensors == {3000: 2999}

    def replace(_: int) -> None:
        while not over:
            call.function = new_function()

    beside(run, replace, over=over)


def test_call_sites_have_one_number() -> None:
    set_up()
    places: list[Callable[[], int]] = []
    for i in range(100):
        code = compile("def place():\n    return current()\n", f"/place/{i}.py", "exec")
        scope: dict[str, Any] = {"current": _native.current_call_site}
        exec(code, scope)
        places.append(scope["place"])
    numbers = at_once(lambda _: [place() for place in places], each=THREADS)
    assert len(set(numbers[0])) == 100
    assert all(each == numbers[0] for each in numbers)


def test_lists_are_taken_in_one_step() -> None:
    items: list[int] = []
    over = Over()

    def write(thread: int) -> None:
        for i in range(5000):
            items.append(5000 * thread + i)

    def take(_: int) -> list[int]:
        taken = []
        while not over:
            taken += _native.take_all(items)
        return taken + _native.take_all(items)

    taken = beside(write, take, take, over=over)
    assert Counter(itertools.chain(*taken)) == Counter(range(5000 * THREADS))


# The process ----------------------------------------------------------------------------------------------------------


def test_facts_and_random_numbers() -> None:
    def ask(_: int) -> Any:
        words = bytearray(i * 41 % 256 if i % 8 < 4 else 0 for i in range(624 * 8))
        left = [_native.skip_mt19937(words, 1, 1000 + i) for i in range(20)]
        facts = _native.boot_id(), _native.ipc_namespace(), _native.cpu_features(), _native.kernel_features()
        return left, bytes(words), facts, _native.collectives()

    first, *others = at_once(ask, each=THREADS)
    assert all(other == first for other in others)


def test_handlers_are_installed_once() -> None:
    program = """if True:
        import sys, threading
        from monarch_backend import _native
        together = threading.Barrier(8)
        def install():
            together.wait()
            for _ in range(100):
                _native.park_threads_at_exit()
                _native.explain_absent_memory(": a note")
        threads = [threading.Thread(target=install) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        import ctypes
        ctypes.string_at(16)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == -11
    assert done.stderr.count("a note") == 1
