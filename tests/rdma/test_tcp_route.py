"""Memory of another process over TCP: reads, writes and atomics without the owner's Python, refusal of strangers."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import random
import re
import signal
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from monarch_backend import _native
from monarch_backend._transport.network.tls import Ders, Tls
from tests.rdma.tcp_owners import MIB, Background, Memory, Owner, Ticket, descriptors, owner, threads

SIZES = [0, 1, 7, 4096, 16 * 1024, 64 * 1024 + 1, MIB - 1, MIB, MIB + 1, 5 * MIB + 3, 16 * MIB]
BOTH = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


@pytest.fixture(scope="module")
def content() -> bytes:
    """Content for all tests, made once because that takes long."""
    return random.Random(7).randbytes(16 * MIB)


@contextlib.contextmanager
def client_of(it: Owner, streams: int = 4, **other: object) -> Iterator[_native.MemoryClient]:
    """Connect a client, and close it at the end."""
    made = it.client(streams, **other)
    try:
        yield made
    finally:
        made.close()


def done(result: _native.TransferResult) -> _native.TransferResult:
    assert (result.outcome, result.refusal, result.text) == ("done", "", "")
    return result


def fetched(client: _native.MemoryClient, ticket: Ticket, offset: int, size: int) -> bytes:
    memory = Memory(size)
    done(client.read(ticket, [(offset, memory.address, size)], 20.0))
    return memory[:size]


def read_once(client: _native.MemoryClient, ticket: Ticket = (3, 5, 7)) -> _native.TransferResult:
    """Read one byte of the registration."""
    memory = Memory(1)
    return client.read(ticket, memory.all(), 20.0)


# Transfers ------------------------------------------------------------------------------------------------------------


@BOTH
def test_all_sizes_while_the_owner_keeps_its_gil(tls: bool, content: bytes) -> None:
    with owner(tls) as it:
        fixed, free = it.ask("add", content, False), it.ask("add", bytes(16 * MIB))
        it.tell("freeze")
        with client_of(it) as client:
            for size in SIZES:
                offset = min(size % 977, 16 * MIB - size)
                assert fetched(client, fixed, offset, size) == content[offset : offset + size], size
                mine = Memory(size, content[:size])
                done(client.write(free, [(offset, mine.address, size)], 20.0))
                assert fetched(client, free, offset, size) == content[:size], size


@BOTH
def test_scattered_segments_arrive_at_their_offsets(tls: bool, content: bytes) -> None:
    choose = random.Random(11)
    with owner(tls) as it, client_of(it) as client:
        ticket, free = it.ask("add", content[: 8 * MIB], False), it.ask("add", bytes(8 * MIB))
        for count, largest in ((1, 10), (256, 64), (257, 64), (1500, 300), (40, 200_000)):
            memory = Memory(count * largest)
            sizes = [choose.choice((0, choose.randrange(largest), largest)) for _ in range(count)]
            places = [i * largest for i in range(count)]
            choose.shuffle(places)
            segments = [
                (place, memory.address + i * largest, size)
                for i, (place, size) in enumerate(zip(places, sizes, strict=True))
            ]
            done(client.read(ticket, segments, 20.0))
            done(client.write(free, segments, 20.0))
            there = it.ask("content", free)
            for i, (place, _, size) in enumerate(segments):
                expected = content[place : place + size]
                assert memory[i * largest : i * largest + size] == expected
                assert there[place : place + size] == expected
    with client_of(it) as client:
        done(client.read((0, 1, 2), [], 20.0))  # empty, so no request is sent: the owner has ended


@BOTH
def test_atomics_of_many_threads(tls: bool) -> None:
    with owner(tls) as it, client_of(it, 3) as client:
        ticket = it.ask("add", struct.pack("<QQ", 5, 7))

        def add() -> set[int]:
            return {done(client.fetch_add(ticket, 0, 3, 20.0)).value for _ in range(50)}

        found = [adder.wait() for adder in [Background(add) for _ in range(6)]]
        assert sorted(set.union(*found)) == list(range(5, 5 + 900, 3)), "each found another value"
        assert done(client.compare_and_swap(ticket, 8, 7, 2**64 - 1, 20.0)).value == 7
        assert done(client.compare_and_swap(ticket, 8, 7, 1, 20.0)).value == 2**64 - 1
        assert done(client.fetch_add(ticket, 8, 2, 20.0)).value == 2**64 - 1
        assert it.ask("content", ticket) == struct.pack("<QQ", 905, 1)
        assert client.fetch_add(ticket, 4, 1, 20.0).refusal == "misaligned"


def test_ipv6(content: bytes) -> None:
    with owner(True, address="::1") as it, client_of(it) as client:
        ticket = it.ask("add", content[: 3 * MIB])
        assert fetched(client, ticket, 0, 3 * MIB) == content[: 3 * MIB]


@BOTH
def test_many_threads_share_two_streams(tls: bool, content: bytes) -> None:
    with owner(tls) as it, client_of(it, 2) as client:
        ticket = it.ask("add", content[: 16 * MIB], False)

        def work(seed: int) -> bool:
            choose = random.Random(seed)
            for _ in range(12):
                size = choose.choice((10, 5000, 300_000, 6 * MIB))
                offset = choose.randrange(16 * MIB - size)
                if fetched(client, ticket, offset, size) != content[offset : offset + size]:
                    return False
            return True

        assert all(worker.wait(60) for worker in [Background(work, seed) for seed in range(8)])
        assert it.ask("connections") <= 2


# Refusals -------------------------------------------------------------------------------------------------------------


@BOTH
def test_a_refusal_is_an_answer_and_the_connection_lives_on(tls: bool, content: bytes) -> None:
    with owner(tls) as it, client_of(it, 1) as client:
        slot, epoch, key = ticket = it.ask("add", content[: 4 * MIB], False)
        small = it.ask("add", bytes(10))
        gone = it.ask("add", bytes(10))
        assert it.ask("drop", gone) == 0
        memory = Memory(4 * MIB)

        def why(result: _native.TransferResult) -> str:
            assert result.outcome == "refused"
            assert result.text
            return result.refusal

        assert why(client.read((slot, epoch, key ^ 1), memory.all(), 20.0)) == "wrong_key"
        assert why(client.read((slot, epoch + 2, key), memory.all(), 20.0)) == "dropped"
        assert why(client.read((2**32 - 1, 1, key), memory.all(), 20.0)) == "wrong_key"
        assert why(client.read(gone, [(0, memory.address, 10)], 20.0)) == "dropped"
        assert why(client.read(ticket, [(1, memory.address, 4 * MIB)], 20.0)) == "out_of_range"
        assert why(client.read(ticket, [(2**64 - 1, memory.address, 2)], 20.0)) == "out_of_range"
        assert why(client.read(ticket, [(4 * MIB + 1, memory.address, 0)], 20.0)) == "out_of_range"
        assert why(client.write(ticket, memory.all(), 20.0)) == "read_only"
        assert why(client.fetch_add(ticket, 0, 1, 20.0)) == "read_only"
        assert why(client.fetch_add(small, 8, 1, 20.0)) == "out_of_range"
        # A request runs completely or not at all.
        segments = [(0, memory.address, 5), (8, memory.address, 5)]
        memory[:5] = b"12345"
        assert why(client.write(small, segments, 20.0)) == "out_of_range"
        assert it.ask("content", small) == bytes(10)
        assert fetched(client, ticket, 0, 4 * MIB) == content[: 4 * MIB]
        assert it.ask("connections") == 1


@BOTH
def test_drop_during_a_transfer_refuses_it_without_blocking(tls: bool, content: bytes) -> None:
    with owner(tls) as it, client_of(it) as client:
        for kind in (client.read, client.write):
            ticket = it.ask("add", content)
            memory = Memory(len(content))

            def until_refused(kind=kind, ticket=ticket, memory=memory) -> _native.TransferResult:
                while (result := kind(ticket, memory.all(), 20.0)).outcome == "done":
                    pass
                return result

            waiter = Background(until_refused)
            time.sleep(0.05)
            assert it.ask("drop", ticket, 1.0) == 0
            result = waiter.wait()
            assert (result.outcome, result.refusal) == ("refused", "dropped")
        assert fetched(client, it.ask("add", content[:100]), 0, 100) == content[:100]


@BOTH
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_peer_that_stands_still_holds_up_no_drop(tls: bool, kind: str, content: bytes) -> None:
    with owner(tls) as it:
        ticket = it.ask("add", content)
        pid = os.fork()
        if pid == 0:
            client, memory = it.client(), Memory(len(content))
            while getattr(client, kind)(ticket, memory.all(), 60.0).outcome == "done":
                pass
            os._exit(0)
        try:
            while it.ask("connections") < 2:
                time.sleep(0.01)
            time.sleep(0.05)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.1)
            start = time.monotonic()
            assert it.ask("drop", ticket, 5.0) == 0
            assert time.monotonic() - start < 1.0
            os.kill(pid, signal.SIGCONT)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            pid = 0
        finally:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


# Owners that have ended or are stopped --------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("kind", ["read", "write"])
def test_owner_death_during_a_transfer_is_reported_at_once(tls: bool, kind: str, content: bytes) -> None:
    with owner(tls) as it, client_of(it) as client:
        ticket, memory = it.ask("add", content), Memory(len(content))

        def until_over() -> _native.TransferResult:
            while (result := getattr(client, kind)(ticket, memory.all(), 20.0)).outcome == "done":
                pass
            return result

        waiter = Background(until_over)
        time.sleep(0.1)
        it.signal(signal.SIGKILL)
        start = time.monotonic()
        result = waiter.wait()
        assert time.monotonic() - start < 1.0
        assert result.outcome in ("lost", "unreachable"), result.text
        assert f"127.0.0.1 port {it.port}" in result.text
        while (again := client.read(ticket, memory.all(), 20.0)).outcome == "lost":
            assert time.monotonic() - start < 2.0  # the kernel closes a dead process's connections one by one
        assert again.outcome == "unreachable"


@BOTH
def test_transfer_with_a_stopped_owner_times_out_or_is_cancelled(tls: bool, content: bytes) -> None:
    with owner(tls) as it, client_of(it, 2) as client:
        ticket, memory = it.ask("add", content), Memory(len(content))
        done(client.read(ticket, memory.all(), 20.0))
        it.stop()
        for kind in (client.read, client.write):
            start = time.monotonic()
            assert kind(ticket, memory.all(), 0.2).outcome == "timed_out"
            assert 0.2 <= time.monotonic() - start < 1.0
            cancel = _native.Cancel()
            # one more than there are streams
            waiters = [Background(kind, ticket, memory.all(), None, cancel) for _ in range(3)]
            time.sleep(0.1)
            assert not any(waiter.over for waiter in waiters)
            cancel.set()
            assert cancel.is_set()
            assert [waiter.wait(1.0).outcome for waiter in waiters] == ["cancelled"] * 3
            assert kind(ticket, memory.all(), None, cancel).outcome == "cancelled"
        it.signal(signal.SIGCONT)
        assert fetched(client, ticket, 0, 3 * MIB) == content[: 3 * MIB]


def test_close_ends_waiting_transfers(content: bytes) -> None:
    with owner() as it:
        client = it.client()
        ticket, memory = it.ask("add", content), Memory(len(content))
        it.stop()
        waiters = [Background(client.read, ticket, memory.all()) for _ in range(6)]
        time.sleep(0.1)
        client.close()
        assert {waiter.wait(1.0).outcome for waiter in waiters} == {"cancelled"}
        client.close()
        assert client.read(ticket, memory.all()).outcome == "cancelled"


@BOTH
def test_close_leaves_no_threads_or_descriptors(tls: bool, content: bytes) -> None:
    before = descriptors(), threads()
    with owner(tls) as it:
        ticket, memory = it.ask("add", content), Memory(len(content))
        clients = [it.client() for _ in range(3)]
        for client in clients:
            done(client.read(ticket, memory.all(), 20.0))
        assert it.ask("connections") >= 3
        assert "monarch_stream" in threads()
        assert it.ask("threads").count("monarch_serve") >= 3
        clients.pop().close()
        assert it.ask("close") == ([], 0), "in the owner"
        outcomes = {client.read(ticket, memory.all(), 20.0).outcome for client in clients}
        assert outcomes <= {"lost", "unreachable"}
        for client in clients:
            client.close()
        del clients, client
    assert (descriptors(), threads()) == before


def test_closed_connection_frees_its_slot(content: bytes) -> None:
    with owner(most=2) as it:
        ticket = it.ask("add", content[: 8 * MIB])
        first, second = it.client(1), it.client(1)
        for client in (first, second):
            assert fetched(client, ticket, 0, 10) == content[:10]
        with client_of(it, 1) as third:
            result = read_once(third, ticket)
            assert result.outcome == "unreachable"
            assert "as many connections as it can" in result.text
            first.close()
            while it.ask("connections") == 2:
                time.sleep(0.01)
            assert fetched(third, ticket, 0, 10) == content[:10]
            # A client can have fewer streams than it asks for. The transfer uses those that it has.
            second.close()
            while it.ask("connections") == 2:
                time.sleep(0.01)
            with client_of(it, 4) as greedy:
                for _ in range(3):
                    assert fetched(greedy, ticket, 0, 8 * MIB) == content[: 8 * MIB]


def test_forked_child_closes_inherited_connections(content: bytes) -> None:
    with owner() as it:
        client = it.client()
        ticket = it.ask("add", content[: 8 * MIB])
        assert fetched(client, ticket, 0, 8 * MIB) == content[: 8 * MIB]
        before = descriptors()
        pid = os.fork()
        if pid == 0:
            client.abandon()
            fewer = descriptors() < before
            client.close()
            del client
            os._exit(0 if fewer else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert fetched(client, ticket, 0, 8 * MIB) == content[: 8 * MIB]
        client.close()


def test_a_connection_that_was_closed_while_idle_is_made_anew(content: bytes) -> None:
    with owner() as it, client_of(it, 1) as client:
        ticket = it.ask("add", content[:MIB])
        for _ in range(3):
            assert fetched(client, ticket, 0, MIB) == content[:MIB]
            it.ask("restart")


# Strangers ------------------------------------------------------------------------------------------------------------

HELLO, ANSWER, REQUEST = struct.Struct("<IHH16s16s32s"), struct.Struct("<IHH16s32s"), struct.Struct("<IIIIQQQQQQ")


def hello(whom: str, magic: int = 0x486D6E6D, version: int = 1) -> bytes:
    return HELLO.pack(magic, version, 0, b"w" * 16, bytes.fromhex(whom), os.urandom(32))


def take(connection: socket.socket, size: int) -> bytes:
    """Read this number of bytes, or fewer if the stream ends."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while len(got) < size and (more := connection.recv(size - len(got))):
            got += more
    return got


def proof(secret: bytes, role: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, b"monarch memory " + role + b"\0" + b"".join(said), "sha256")


def proved(it: Owner) -> socket.socket:
    """Return a connection that has passed the handshake as a client of the program. The handshake is written out
    here.
    """
    connection = it.connect()
    said = hello(it.token)
    connection.sendall(said)
    answer = take(connection, ANSWER.size)
    assert take(connection, 32) == proof(it.secret, b"owner", said, answer)
    connection.sendall(proof(it.secret, b"caller", said, answer))
    assert take(connection, 8) == struct.pack("<II", 0x576D6E6D, 0)
    return connection


@BOTH
def test_unauthenticated_bytes_are_refused(tls: bool, content: bytes) -> None:
    with owner(tls) as it, client_of(it) as client:
        ticket = it.ask("add", content[: 2 * MIB])
        said = hello(it.token)
        for bytes_of_a_stranger in (
            os.urandom(5000),
            b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 10,
            bytes(200),
            hello(it.token, magic=1),
            *([said + bytes(32)] if tls else []),
        ):
            with it.connect() as stranger:
                stranger.sendall(bytes_of_a_stranger)
                assert len(take(stranger, 1000)) <= 7, "at most an alert of TLS"
        if not tls:
            for proof_of_a_stranger in (bytes(32), proof(os.urandom(32), b"caller", said)):
                with it.connect() as stranger:
                    stranger.sendall(said)
                    answer = take(stranger, ANSWER.size + 32)
                    assert len(answer) == ANSWER.size + 32
                    stranger.sendall(proof_of_a_stranger)
                    assert take(stranger, 1000) == b""
                with it.connect() as mirror:
                    mirror.sendall(said)
                    mirror.sendall(take(mirror, ANSWER.size + 32)[-32:])
                    assert take(mirror, 1000) == b"", "the owner's own proof is none of a caller"
        assert it.ask("connections") == 0
        assert fetched(client, ticket, 0, 2 * MIB) == content[: 2 * MIB]


@pytest.mark.parametrize(
    ("tls", "other", "told"),
    [
        (False, {"secret": b"x" * 32}, "could not prove that it knows this program's secret"),
        (True, {"secret": b"x" * 32}, "it broke off before both had proved who they are .TLS: certificate verify"),
        (True, {"secret": b"x" * 32, "ders_of": "same"}, "could not prove that it knows this program's secret"),
        (True, {"ders_of": b"x" * 32}, "certificate verify failed"),
        (True, {"tls": False}, "do both sides have the same secret, and TLS on or off alike"),
        (False, {"tls": True}, "do both sides have the same secret, and TLS on or off alike"),
        (False, {"whom": "ab" * 16}, "another process listens there now"),
        (True, {"whom": "ab" * 16}, "another process listens there now"),
    ],
)
def test_client_of_another_program_gets_the_reason(tls: bool, other: dict[str, object], told: str) -> None:
    with owner(tls) as it:
        if other.get("ders_of") == "same":
            other = other | {"ders_of": it.secret}
        with client_of(it, 1, **other) as client:
            result = read_once(client)
            assert result.outcome == "unreachable"
            assert re.search(told, result.text), result.text
            assert it.secret.hex() not in result.text
        assert it.ask("connections") == 0


def test_the_owner_refuses_certificates_of_others_itself() -> None:
    """The owner refuses a foreign certificate even if the client accepts the owner's certificate."""
    with owner(True) as it:
        for mine in (Tls.of_secret(os.urandom(32)).client, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)):
            mine.check_hostname = False
            mine.verify_mode = ssl.CERT_NONE
            with contextlib.suppress(OSError), mine.wrap_socket(it.connect()) as stranger:
                stranger.sendall(hello(it.token))
                assert take(stranger, 1000) == b""
        old = Tls.of_secret(it.secret).client
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError, match=r"version|alert|reset|EOF"):
            old.wrap_socket(it.connect())


def _fake_owner(listener: socket.socket, serve: Callable[[socket.socket], None]) -> Background:
    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(10)
            serve(connection)

    return Background(run)


def test_client_sends_no_proof_to_an_impostor() -> None:
    secret, whom = os.urandom(32), os.urandom(16).hex()
    heard = []

    def pretend(connection: socket.socket) -> None:
        heard.append(take(connection, HELLO.size))
        connection.sendall(ANSWER.pack(0x416D6E6D, 1, 0, bytes.fromhex(whom), os.urandom(32)) + os.urandom(32))
        heard.append(take(connection, 1000))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        impostor = _fake_owner(listener, pretend)
        mine = _native.MemoryIdentity(os.urandom(16).hex(), secret)
        client = _native.MemoryClient("127.0.0.1", listener.getsockname()[1], mine, whom, 1)
        result = read_once(client)
        client.close()
        impostor.wait()
    assert result.outcome == "unreachable"
    assert "could not prove" in result.text
    assert len(heard[0]) == HELLO.size
    assert heard[1] == b"", "neither its proof nor a ticket"


def test_man_in_the_middle_with_a_program_certificate_is_refused() -> None:
    with owner(True) as it, socket.create_server(("127.0.0.1", 0)) as listener:
        middle = Tls.of_secret(it.secret)
        passed = []

        def pass_on(connection: socket.socket) -> None:
            with (
                middle.server.wrap_socket(connection, server_side=True) as left,
                middle.client.wrap_socket(it.connect()) as right,
            ):
                right.sendall(take(left, HELLO.size))
                left.sendall(take(right, ANSWER.size + 32))
                with contextlib.suppress(OSError):
                    passed.append(take(left, 1000))

        between = _fake_owner(listener, pass_on)
        ders = Ders.of_secret(it.secret)
        mine = _native.MemoryIdentity(os.urandom(16).hex(), it.secret, ders.certificate, ders.key, ders.ca)
        client = _native.MemoryClient("127.0.0.1", listener.getsockname()[1], mine, it.token, 1)
        result = read_once(client)
        client.close()
        between.wait()
        assert result.outcome == "unreachable"
        assert "could not prove" in result.text
        assert passed in ([], [b""])


def test_invalid_request_ends_the_connection(content: bytes) -> None:
    with owner() as it, client_of(it) as client:
        slot, epoch, key = it.ask("add", content[:MIB])
        magic, most = 0x526D6E6D, 2**64 - 1

        def request(access: int = 0, ranges: int = 1, size: int = 10, sign: int = magic) -> bytes:
            return REQUEST.pack(sign, access, slot, ranges, epoch, key, 1, size, 0, 0)

        ranges = struct.Struct("<QQ").pack
        for absurd in (
            os.urandom(300),
            request(sign=1) + ranges(0, 10),
            request(access=6) + ranges(0, 10),
            request(access=2**32 - 1) + ranges(0, 10),
            request(ranges=0),
            request(ranges=257),
            request(ranges=2**32 - 1) + bytes(100),
            request(size=most) + ranges(0, most),
            request(size=(64 << 20) + 1) + ranges(0, (64 << 20) + 1),
            request(size=10) + ranges(0, 11),
            request(size=10) + ranges(0, 9),
            request(size=10, ranges=2) + ranges(0, most) + ranges(0, 11),
            request(access=1, size=10) + ranges(0, most),
            request(access=2, size=4) + ranges(0, 4),
            request(access=3, size=8, ranges=2) + ranges(0, 8) + ranges(0, 0),
        ):
            with proved(it) as connection:
                connection.sendall(absurd)
                assert take(connection, 1000) == b"", absurd[:64]
        with proved(it) as connection:
            connection.sendall(request() + ranges(0, 10))
            assert take(connection, 32 + 10 + 16)[32:42] == content[:10], "what a client says is answered"
        assert fetched(client, (slot, epoch, key), 0, MIB) == content[:MIB]


@pytest.mark.slow
def test_idle_unauthenticated_connections_do_not_block_a_client(content: bytes) -> None:
    with owner() as it, contextlib.ExitStack() as stack:
        ticket = it.ask("add", content[: 4 * MIB])
        client = stack.enter_context(client_of(it))
        start = time.monotonic()
        strangers = [stack.enter_context(it.connect()) for _ in range(300)]
        strangers[-1].sendall(hello(it.token)[:40])
        assert fetched(client, ticket, 0, 4 * MIB) == content[: 4 * MIB]
        assert take(strangers[0], 1) == b"", "the oldest has made room"
        assert time.monotonic() - start < 4.0
        while it.ask("threads").count("monarch_serve") > 256 + 4:
            time.sleep(0.01)
        assert take(strangers[-1], 1) == b"", "half a hello is none"
        assert 4.0 < time.monotonic() - start < 8.0
        assert fetched(client, ticket, 0, 4 * MIB) == content[: 4 * MIB]


# Arguments ------------------------------------------------------------------------------------------------------------


def test_an_identity_is_checked() -> None:
    token, secret = "0" * 32, bytes(32)
    ders, others = Ders.of_secret(secret), Ders.of_secret(secret)
    assert _native.MemoryIdentity(token, secret, ders.certificate, ders.key, ders.ca).encrypted
    assert not _native.MemoryIdentity(token, secret).encrypted
    for words, told in [
        (("0" * 31, secret), "32 hexadecimal digits"),
        (("G" * 32, secret), "32 hexadecimal digits"),
        ((token, bytes(31)), "secret has 32 bytes"),
        ((token, secret, ders.certificate), "go together"),
        ((token, secret, b"junk", ders.key, ders.ca), "certificate is no certificate in DER"),
        ((token, secret, ders.certificate, b"junk", ders.ca), "no private key in DER"),
        ((token, secret, ders.certificate, others.key, ders.ca), "does not belong to its certificate"),
        ((token, secret, ders.certificate, ders.key, b"junk"), "the CA is no certificate in DER"),
    ]:
        with pytest.raises(ValueError, match=told):
            _native.MemoryIdentity(*words)


def test_addresses_and_streams_are_checked() -> None:
    mine = _native.MemoryIdentity("0" * 32, bytes(32))
    table = _native.Memory(_native.Host(16 * MIB))
    server = _native.MemoryServer(table, mine)
    with pytest.raises(ValueError, match="no numeric address"):
        server.listen("somewhere")
    with pytest.raises(OSError, match=r"bind to 203\.0\.113\.1"):
        server.listen("203.0.113.1")
    ports = {server.listen("127.0.0.1"), server.listen("::1")}
    assert len(ports) == 2
    server.close()
    with pytest.raises(ValueError, match="was closed"):
        server.listen("127.0.0.1")
    for streams in (0, 65):
        with pytest.raises(ValueError, match="1 to 64 streams"):
            _native.MemoryClient("127.0.0.1", 1, mine, "0" * 32, streams)
    client = _native.MemoryClient("no.such.host.invalid", 1, mine, "0" * 32)
    assert read_once(client).outcome == "unreachable"
    client.close()


def test_the_proof_covers_both_certificates_as_sha256() -> None:
    """The layout of the proof over TLS, written out by a client in Python."""
    with owner(True) as it:
        tls = Tls.of_secret(it.secret)
        with tls.client.wrap_socket(it.connect()) as channel:
            theirs = channel.getpeercert(binary_form=True)
            assert theirs is not None
            binding = hashlib.sha256(theirs).digest() + hashlib.sha256(tls.certificate).digest()
            said = hello(it.token)
            channel.sendall(said)
            answer = take(channel, ANSWER.size)
            assert take(channel, 32) == proof(it.secret, b"owner", said, answer, binding)
            channel.sendall(proof(it.secret, b"caller", said, answer, binding))
            assert take(channel, 8) == struct.pack("<II", 0x576D6E6D, 0)
