"""Split of bytes into lines: any read boundaries, progress bars, long lines, records of logging."""

from __future__ import annotations

import random

import pytest

from monarch_backend._logs.line_splitter import MAX_LINE_BYTES, LineSplitter, read_records

NOTE = b" ... [cut: longer than 65536 bytes]"


@pytest.mark.parametrize("seed", range(30))
def test_the_cuts_between_reads_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    lines = [rng.randbytes(rng.choice((0, 1, 5, 300))).replace(b"\n", b"").replace(b"\r", b"") for _ in range(50)]
    data = b"".join(line + rng.choice((b"\n", b"\r\n")) for line in lines) + b"rest"
    splitter, found = LineSplitter(), []
    while data:
        size = rng.choice((1, 2, 7, 1000))
        found += splitter.feed(data[:size])
        data = data[size:]
    assert found == lines
    assert splitter.has_partial
    assert splitter.take_partial(final=True) == b"rest"
    assert not splitter.has_partial


def test_a_partial_line_that_was_shown_ends_without_an_empty_one() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"name? ") == []
    assert splitter.take_partial(final=False) == b"name? "
    assert splitter.take_partial(final=False) is None
    assert splitter.feed(b"\n\nnext\n") == [b"", b"next"]
    assert splitter.feed(b"0") == []
    assert splitter.take_partial(final=False) == b"0"
    assert splitter.feed(b"1\n\n") == [b"1", b""]


def test_progress_bar_yields_its_last_state() -> None:
    splitter = LineSplitter()
    for percent in range(0, 100, 10):
        assert splitter.feed(b"\r%d%%" % percent) == []
    assert splitter.has_partial
    assert splitter.take_partial(final=False) == b"90%"
    assert splitter.feed(b"\r95%\r") == []  # some programs write the carriage return after the progress
    assert splitter.take_partial(final=False) == b"95%"
    assert splitter.feed(b"\r100%\nafter") == [b"100%"]


def test_a_progress_bar_that_was_wiped_away_is_not_shown() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r50%\r       \r") == []
    assert splitter.take_partial(final=True) is None
    assert splitter.feed(b"\r50%\r       \rdone\n") == [b"done"]


def test_a_line_end_of_two_bytes_may_be_cut_in_between() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\r") == []
    assert splitter.feed(b"\ntwo\r\n") == [b"one", b"two"]


def test_a_long_line_is_cut_with_a_note_and_the_next_one_is_whole() -> None:
    splitter = LineSplitter()
    found = splitter.feed(b"x" * 60_000)
    found += splitter.feed(b"x" * 60_000)
    assert found == [b"x" * MAX_LINE_BYTES + NOTE]
    assert splitter.feed(b"x" * 60_000) == []
    assert not splitter.has_partial
    assert splitter.feed(b"xxx\nnext\n") == [b"next"]
    assert splitter.feed(b"y" * MAX_LINE_BYTES + b"\n") == [b"y" * MAX_LINE_BYTES]
    assert splitter.feed(b"z" * (MAX_LINE_BYTES + 1) + b"\nw\n") == [b"z" * MAX_LINE_BYTES + NOTE, b"w"]


def test_partial_line_has_whole_characters() -> None:
    for character in ("é", "€", "😀"):
        data = character.encode()
        for size in range(1, len(data)):
            splitter = LineSplitter()
            assert splitter.feed(b"caf" + data[:size]) == []
            assert splitter.take_partial(final=False) == b"caf"
            assert splitter.take_partial(final=False) is None
            assert splitter.feed(data[size:] + b"\n") == [data]
            splitter.feed(b"caf" + data[:size])
            assert splitter.take_partial(final=True) == b"caf" + data[:size]
        cut = LineSplitter().feed(b"x" * (MAX_LINE_BYTES - 1) + data + b"\n")
        assert cut == [b"x" * (MAX_LINE_BYTES - 1) + NOTE]
    splitter = LineSplitter()
    splitter.feed(b"ok\x80\x80\x80\x80")  # not a character
    assert splitter.take_partial(final=False) == b"ok\x80\x80\x80\x80"


def test_records_have_levels_and_inner_line_ends() -> None:
    lines = [
        b"\x1e20\x1finfo",
        b"plain",
        b"abc\x1e40\x1fboom\x1dat x\x1dat y",
        b"\x1eno level",
        b"\x1e\x1f",
        b"\x1e-1\x1f",
    ]
    assert read_records(lines) == [
        (20, b"info"),
        (None, b"plain"),
        (None, b"abc"),
        (40, b"boom\nat x\nat y"),
        (None, b"\x1eno level"),
        (None, b"\x1e\x1f"),
        (None, b"\x1e-1\x1f"),
    ]


def test_splitter_reports_whether_it_has_records() -> None:
    splitter = LineSplitter()
    splitter.feed(b"plain\n")
    assert not splitter.has_records
    splitter.feed(b"\x1e20")
    assert splitter.has_records
