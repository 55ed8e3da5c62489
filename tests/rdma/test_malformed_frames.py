"""Truncated and corrupted frames on the data port of registered memory, from a peer that has proved the secret.

The tests cover requests that an owner reads, and replies that a client reads. Neither side may crash, hang, or access
memory that the valid frame does not name.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from monarch_backend import _native
from tests.rdma.tcp_owners import Background, Memory, Owner, owner
from tests.rdma.test_tcp_route import ANSWER, HELLO, REQUEST, client_of, fetched, proof, proved, take

SIZE, OFFSET, CHUNK = 4096, 100, 24
WRITE = 1
REQUEST_MAGIC, REPLY_MAGIC, TAIL_MAGIC = 0x526D6E6D, 0x506D6E6D, 0x546D6E6D
REPLY, TAIL, RANGE = struct.Struct("<IIQQQ"), struct.Struct("<IIQ"), struct.Struct("<QQ")
BEFORE, DATA = bytes(range(256)) * (SIZE // 256), b"\xee" * CHUNK
HEAD_BYTES = REQUEST.size + 2 * RANGE.size


def flips(frame: bytes, fields: Iterator[tuple[int, int]]) -> Iterator[bytes]:
    """Yield ``frame`` with one bit changed, for each bit of the bytes from ``start`` to ``stop`` of each field."""
    for start, stop in fields:
        for bit in range(8 * start, 8 * stop):
            changed = bytearray(frame)
            changed[bit // 8] ^= 1 << bit % 8
            yield bytes(changed)


def send_to_owner(it: Owner, frame: bytes) -> bytes:
    """Send ``frame`` on a new connection, end the stream, and return the owner's reply."""
    with proved(it) as connection:
        connection.settimeout(20)
        connection.sendall(frame)
        connection.shutdown(socket.SHUT_WR)
        return take(connection, 1 << 20)


def write_request(ticket: tuple[int, int, int]) -> bytes:
    """Return a request that writes CHUNK bytes at OFFSET, as two ranges of half the size."""
    slot, epoch, key = ticket
    half = CHUNK // 2
    head = REQUEST.pack(REQUEST_MAGIC, WRITE, slot, 2, epoch, key, 9, CHUNK, 0, 0)
    return head + RANGE.pack(OFFSET, half) + RANGE.pack(OFFSET + half, half) + DATA


def test_truncated_request_of_authenticated_peer_writes_at_most_its_own_bytes() -> None:
    with owner() as it, client_of(it) as client:
        ticket = it.ask("add", BEFORE)
        whole = write_request(ticket)
        for length in range(len(whole)):
            assert send_to_owner(it, whole[:length]) == b"", length
            found = it.ask("content", ticket)
            arrived = max(0, length - HEAD_BYTES)
            expected = b"".join((BEFORE[:OFFSET], DATA[:arrived], BEFORE[OFFSET + arrived :]))
            assert found in (BEFORE, expected), length
        assert len(send_to_owner(it, whole)) == REPLY.size
        assert fetched(client, ticket, 0, SIZE) == BEFORE[:OFFSET] + DATA + BEFORE[OFFSET + CHUNK :]


def test_corrupted_request_of_authenticated_peer_writes_nothing() -> None:
    with owner() as it, client_of(it) as client:
        ticket = it.ask("add", BEFORE)
        whole = write_request(ticket)
        # The number, operand, expected value and offsets are left out: with other values the request is still valid.
        fields = [
            (0, 32),
            (40, 48),
            (HEAD_BYTES - 2 * RANGE.size + 8, HEAD_BYTES - RANGE.size),
            (HEAD_BYTES - 8, HEAD_BYTES),
        ]
        for changed in flips(whole, iter(fields)):
            answer = send_to_owner(it, changed)
            assert not answer.startswith(struct.pack("<IIQ", REPLY_MAGIC, 0, 9)) or changed[4] == 0, changed[
                :HEAD_BYTES
            ]
        assert fetched(client, ticket, 0, SIZE) == BEFORE


class FakeOwner:
    """An owner that has the secret and answers one request of one client with the given bytes."""

    def __init__(self) -> None:
        self.secret, self.token = os.urandom(32), os.urandom(16).hex()
        self.listener = socket.create_server(("127.0.0.1", 0))

    def read_from(self, reply: bytes) -> tuple[_native.TransferResult, bytes]:
        """Make a client read CHUNK bytes. Return the result and the client's memory."""
        server = Background(self._serve, reply)
        mine = _native.MemoryIdentity(os.urandom(16).hex(), self.secret)
        client = _native.MemoryClient("127.0.0.1", self.listener.getsockname()[1], mine, self.token, 1)
        memory = Memory(3 * CHUNK, BEFORE[: 3 * CHUNK])
        result = client.read((1, 2, 3), [(0, memory.address + CHUNK, CHUNK)], 20.0)
        client.close()
        server.wait()
        return result, memory[: 3 * CHUNK]

    def _serve(self, reply: bytes) -> None:
        with self.listener.accept()[0] as connection:
            connection.settimeout(20)
            hello = take(connection, HELLO.size)
            answer = ANSWER.pack(0x416D6E6D, 1, 0, bytes.fromhex(self.token), os.urandom(32))
            connection.sendall(answer + proof(self.secret, b"owner", hello, answer))
            assert take(connection, 32) == proof(self.secret, b"caller", hello, answer)
            connection.sendall(struct.pack("<II", 0x576D6E6D, 0))
            request = take(connection, REQUEST.size + RANGE.size)
            self.number = REQUEST.unpack(request[: REQUEST.size])[6]
            connection.sendall(reply)


@pytest.fixture
def fake_owner() -> Iterator[FakeOwner]:
    made = FakeOwner()
    yield made
    made.listener.close()


def reply_to(number: int) -> bytes:
    return REPLY.pack(REPLY_MAGIC, 0, number, CHUNK, 0) + DATA + TAIL.pack(TAIL_MAGIC, 0, number)


def first_number(fake: FakeOwner) -> int:
    """Return the number of each client's first request."""
    fake.read_from(b"")
    return fake.number


def test_truncated_reply_of_authenticated_owner_is_an_error(fake_owner: FakeOwner) -> None:
    whole = reply_to(first_number(fake_owner))
    for length in range(len(whole)):
        result, memory = fake_owner.read_from(whole[:length])
        assert result.outcome == "lost", (length, result.outcome)
        assert (memory[:CHUNK], memory[2 * CHUNK :]) == (BEFORE[:CHUNK], BEFORE[2 * CHUNK : 3 * CHUNK])
    result, memory = fake_owner.read_from(whole)
    assert (result.outcome, memory[CHUNK : 2 * CHUNK]) == ("done", DATA)


def test_corrupted_reply_of_authenticated_owner_is_an_error(fake_owner: FakeOwner) -> None:
    whole = reply_to(first_number(fake_owner))
    tail = REPLY.size + CHUNK
    # without the atomic's value, which may be any number
    for changed in flips(whole, iter([(0, 24), (tail, tail + TAIL.size)])):
        result, memory = fake_owner.read_from(changed)
        assert result.outcome != "done", (changed[: REPLY.size], changed[tail:])
        assert result.refusal or result.text, result.outcome
        assert (memory[:CHUNK], memory[2 * CHUNK :]) == (BEFORE[:CHUNK], BEFORE[2 * CHUNK : 3 * CHUNK])
