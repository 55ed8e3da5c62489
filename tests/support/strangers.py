"""Programs in the network of a job's hosts that do not know its secret.

`python -m tests.support.strangers ADDRESS SECRET` prints how a host refuses another secret and garbage, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest

from monarch_backend._hosts.connection_settings import parse_address
from monarch_backend.hosts import attach_to_workers

MAX_ANSWER_BYTES = 200


class Stranger(NamedTuple):
    """How a program was refused, and what it has received for garbage."""

    refusal: str
    answers: list[bytes]


def refusal(address: str, secret: bytes) -> str:
    with pytest.raises(ConnectionError) as caught:
        attach_to_workers([address], secret=secret, timeout=10)
    return str(caught.value)


def answers(address: str) -> list[bytes]:
    """Return what a host sends to a client that speaks something else."""
    found = []
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        with socket.create_connection(parse_address(address), 10) as client:
            client.settimeout(20)
            received = b""
            with contextlib.suppress(OSError):  # the host may have closed the connection
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while data := client.recv(4096):
                    received += data
            found.append(received)
    return found


def ask_as_stranger(
    words: Sequence[str], address: str, secret: bytes, environment: Mapping[str, str] | None = None
) -> Stranger:
    """Return what a program with another secret gets. ``words`` begin a command that runs where the stranger is."""
    command = [*words, sys.executable, "-m", "tests.support.strangers", address, secret.hex()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    refused, received = json.loads(done.stdout)
    return Stranger(refused, [bytes.fromhex(each) for each in received])


def check_stranger(found: Stranger, secret: bytes) -> None:
    """Check that the stranger got nothing of a job with this secret."""
    assert "secret" in found.refusal
    for answer in found.answers:
        assert len(answer) < MAX_ANSWER_BYTES, answer
        assert secret not in answer and secret.hex().encode() not in answer


if __name__ == "__main__":
    where, known = sys.argv[1:]
    print(json.dumps([refusal(where, bytes.fromhex(known)), [each.hex() for each in answers(where)]]))
