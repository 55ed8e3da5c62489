"""Search of a process for secrets: its environment and every page of its memory.

The search compares patterns, so that it does not find its own copies. The pattern of some data has its bytes without
their lowest bit. A pattern of a pattern is another text: memory that the search has freed, and reads again, matches
nothing.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator

from monarch_backend.actor import Actor, endpoint

_HALVES = bytes(byte >> 1 for byte in range(256))
_CHUNK = 4 << 20
_PAGE = 4096


def pattern(data: bytes) -> bytes:
    """Return the data with each byte shifted right by one bit."""
    return data.translate(_HALVES)


def needles(secret: bytes) -> list[bytes]:
    """Return the patterns of a secret: of its bytes and of its usual texts."""
    texts = (secret, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret))
    return [pattern(text) for text in texts]


def found_in(patterns: list[bytes]) -> list[str]:
    """Return the places of this process whose pattern contains one of the patterns."""
    places = [("environ", _environment()), *_memory()]
    return sorted({place for place, data in places if any(needle in data for needle in patterns)})


def _environment() -> bytes:
    with open("/proc/self/environ", "rb") as file:
        initial = file.read()
    return pattern(initial + b"\0".join(name + b"=" + value for name, value in os.environb.items()))


def _memory() -> Iterator[tuple[str, bytes]]:
    """Yield names and patterns of the present pages.

    Chunks overlap by a page, because a needle may cross a border.
    """
    with open("/proc/self/maps") as file:
        regions = [line.split(maxsplit=5) for line in file]
    with open("/proc/self/mem", "rb", buffering=0) as memory, open("/proc/self/pagemap", "rb", buffering=0) as pages:
        for span, rights, *_, name in (region if len(region) == 6 else [*region, "anonymous"] for region in regions):
            start, end = (int(part, 16) for part in span.split("-"))
            if "w" not in rights and name.startswith("/"):
                continue  # a program file or library, unchanged from disk
            if "r" not in rights or name.startswith("[v"):
                continue
            for at in range(start, end, _CHUNK):
                size = min(_CHUNK, end - at)
                pages.seek(at // _PAGE * 8)
                if any(pages.read(size // _PAGE * 8)[7::8]):  # a page is there, or swapped out: bits 62 and 63
                    begin = max(start, at - _PAGE)
                    memory.seek(begin)
                    yield name.strip(), pattern(memory.read(at + size - begin))


class Scanner(Actor):
    """Actor that searches its own process."""

    @endpoint
    def keep(self, reversed_control: bytes) -> None:
        self.control = reversed_control[::-1]

    @endpoint
    def scan(self, patterns: list[bytes]) -> list[str]:
        return found_in(patterns)
