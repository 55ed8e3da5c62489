"""Registration cache: which memory a registration belongs to, and how long it is kept."""

from __future__ import annotations

import array
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from monarch_backend import _native
from monarch_backend._verbs import VerbsError
from monarch_backend._verbs.registrations.cache import MemoryCache, allocation_of
from tests.rdma.verbs.fabric import Fabric, FakeNic
from tests.rdma.verbs.peers import Memory

KI = 1 << 10


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def nic(fabric: Fabric) -> Any:
    nic = fabric.open_nic("fake0", 16)
    yield nic
    nic.close()


def use(cache: MemoryCache, owner: Any, *, writable: bool = True) -> Any:
    entry = cache.take(allocation_of(owner), writable=writable)
    cache.give(entry)
    return entry


def owners() -> list[Any]:
    return [
        torch.zeros(1000),
        np.zeros(1000),
        memoryview(bytearray(1000)),
        array.array("q", bytes(8000)),
        mmap.mmap(-1, 8192),
    ]


@pytest.mark.parametrize("place", range(5), ids=["tensor", "ndarray", "memoryview", "array", "mmap"])
def test_a_registration_lasts_as_long_as_its_memory(nic: FakeNic, place: int) -> None:
    told: list[int] = []
    cache = MemoryCache(nic, 100, 1 << 40, lambda: told.append(1))
    owner = owners()[place]
    first = use(cache, owner)
    assert use(cache, owner) is first
    assert (nic.opened, nic.closed) == (1, 0)
    del owner
    gc.collect()
    assert told
    cache.sweep()
    assert (nic.opened, nic.closed, len(cache), cache.nbytes) == (1, 1, 0, 0)


def test_freed_message_memory_is_registered_anew_at_the_same_address(nic: FakeNic) -> None:
    """The pages may have been discarded in between, and the first registration still has the old ones."""
    cache, host = MemoryCache(nic, 100, 1 << 40), _native.Host(64 << 20)
    kept = torch.frombuffer(_native.ArenaBuffer(host, 1 << 20), dtype=torch.uint8)
    first, address = use(cache, kept), kept.data_ptr()
    assert use(cache, kept[5:]) is first
    host.return_idle_memory(0.01)
    del kept
    gc.collect()
    assert host.used() < 1 << 20
    again = torch.frombuffer(_native.ArenaBuffer(host, 1 << 20), dtype=torch.uint8)
    assert again.data_ptr() == address
    assert cache.known(allocation_of(again), writable=True) is None
    assert use(cache, again) is not first
    cache.sweep()
    assert (nic.opened, nic.closed, len(cache)) == (2, 1, 1)
    cache.close()


def test_memory_of_a_message_is_not_freed_while_a_view_has_a_registration(nic: FakeNic) -> None:
    cache, host = MemoryCache(nic, 100, 1 << 40), _native.Host(64 << 20)
    tensor = torch.frombuffer(_native.ArenaBuffer(host, 1 << 20), dtype=torch.uint8)
    storage = tensor.untyped_storage()
    entry = cache.take(allocation_of(storage), writable=True)
    del tensor
    gc.collect()
    assert use(cache, storage) is entry
    assert host.used() >= 1 << 20
    del storage
    gc.collect()
    assert host.used() < 1 << 20
    cache.give(entry)
    cache.close()


def test_all_views_of_an_allocation_share_one_registration(nic: FakeNic) -> None:
    cache = MemoryCache(nic, 100, 1 << 40)
    tensor, numbers = torch.zeros(100, 100), np.zeros((100, 100))
    for view in (tensor, tensor[5:7], tensor.t(), tensor.view(-1)[3:], tensor.untyped_storage()):
        use(cache, view)
    assert nic.opened == 1
    for part in (numbers, numbers[5:7], numbers.T, numbers.reshape(-1)[3:]):
        use(cache, part)
    assert nic.opened == 2
    kept = tensor[5:7]
    del tensor, view
    gc.collect()
    cache.sweep()
    assert len(cache) == 2
    del kept
    cache.sweep()
    assert len(cache) == 1
    cache.close()


def test_a_storage_that_got_other_memory_is_registered_anew(nic: FakeNic) -> None:
    cache = MemoryCache(nic, 100, 1 << 40)
    tensor = torch.zeros(10)
    use(cache, tensor)
    tensor.resize_(1 << 20)
    entry = use(cache, tensor)
    assert (entry.address, entry.nbytes) == (tensor.data_ptr(), 4 << 20)
    assert (nic.opened, nic.closed, len(cache)) == (2, 1, 1)
    cache.close()


def test_cache_entry_belongs_to_one_object(nic: FakeNic) -> None:
    """Another object may get the same id, address and length. It must not get the first object's registration."""
    cache = MemoryCache(nic, 2, 1 << 40)
    memory = Memory(KI)
    whole = allocation_of(memory.view)
    use(cache, memory.view)
    entry = cache.known(whole, writable=True)
    assert entry is not None
    cache.give(entry)
    kept, entry.anchor = entry.anchor, weakref.ref(cache)
    assert cache.known(whole, writable=True) is None
    assert not entry.users
    entry.anchor = kept
    cache.close()
    assert nic.opened == nic.closed


@pytest.mark.parametrize("seen", [False, True])
def test_registration_evicted_during_take_is_not_used(nic: FakeNic, seen: bool) -> None:
    """Without a lock, the cache may close just before or just after it adds a user. It closes the registration once."""
    cache = MemoryCache(nic, 2, 1 << 40)
    memory = Memory(KI)
    entry = use(cache, memory.view)

    class Users(list[None]):
        def append(self, _: None) -> None:
            if seen:
                super().append(None)
            cache.close()
            assert nic.opened - nic.closed == seen, "who gives it up has seen the user, or not"
            if not seen:
                super().append(None)

    entry.users = Users()
    assert cache.known(allocation_of(memory.view), writable=True) is None
    assert not entry.users
    assert nic.opened == nic.closed
    use(cache, memory.view)
    assert nic.opened - nic.closed == 1
    cache.close()


def test_memory_under_way_is_not_given_up(nic: FakeNic) -> None:
    cache = MemoryCache(nic, 2, 1 << 40)
    busy = Memory(KI)
    entry = cache.take(allocation_of(busy.view), writable=True)
    others = [Memory(KI) for _ in range(5)]
    for other in others:
        use(cache, other.view)
    assert nic.opened - nic.closed == 2
    assert entry.registration.rkey in nic.registered
    cache.close()
    assert nic.opened - nic.closed == 1
    cache.give(entry)
    assert nic.opened == nic.closed


@pytest.mark.parametrize(("entries", "nbytes"), [(3, 1 << 40), (1 << 10, 3 * KI)])
def test_the_one_not_used_for_longest_goes_first(nic: FakeNic, entries: int, nbytes: int) -> None:
    cache = MemoryCache(nic, entries, nbytes)
    memories = [Memory(KI) for _ in range(4)]
    for memory in memories[:3]:
        use(cache, memory.view)
    use(cache, memories[0].view)
    use(cache, memories[3].view)
    assert (nic.opened, nic.closed) == (4, 1)
    use(cache, memories[0].view)
    assert nic.opened == 4
    use(cache, memories[1].view)
    assert nic.opened == 5
    cache.close()


def test_unused_entries_are_evicted(fabric: Fabric, nic: FakeNic) -> None:
    nic.memory = 3 * KI
    cache = MemoryCache(nic, 100, 1 << 40)
    memories = [Memory(KI) for _ in range(10)]
    for memory in memories:
        use(cache, memory.view)
    assert nic.opened == 10
    large = Memory(4 * KI)
    with pytest.raises(VerbsError, match="cannot register 4096 bytes with fake0"):
        use(cache, large.view)
    assert not nic.registered


def test_a_bytearray_is_held_for_one_transfer(nic: FakeNic) -> None:
    cache = MemoryCache(nic, 100, 1 << 40)
    owner = bytearray(100)
    allocation = allocation_of(owner)
    entry = cache.take(allocation, writable=True)
    with pytest.raises(BufferError):
        owner.extend(b"more")
    cache.give(entry)
    del allocation
    cache.sweep()
    owner.extend(b"more")
    assert nic.opened == nic.closed


def test_objects_without_memory_are_refused() -> None:
    with pytest.raises(TypeError, match="dict owns no memory"):
        allocation_of({})
    with pytest.raises(TypeError, match="not contiguous"):
        allocation_of(memoryview(bytearray(10))[::2])
