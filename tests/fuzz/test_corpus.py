"""Replay of the fuzzer's corpus: errors that it found stay fixed, and the seeds decode as expected."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from monarch_backend._transport.local import frames as frames_module
from monarch_backend._transport.local.frames import FrameError
from tests.fuzz import frames, handshake

CORPUS = Path(__file__).resolve().parent / "corpus"
TARGETS: dict[str, ModuleType] = {"frames": frames, "handshake": handshake}
MOST = 16 << 10
"""Maximum bytes of a corpus, small enough for a person to read."""


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_passes(target: str) -> None:
    paths = sorted((CORPUS / target).iterdir())
    assert len(paths) >= len(TARGETS[target].SEEDS)
    assert sum(path.stat().st_size for path in paths) <= MOST
    for path in paths:
        try:
            TARGETS[target].one(path.read_bytes())
        except BaseException:
            print(f"with {path}")
            raise


@pytest.mark.parametrize("target", TARGETS)
def test_the_seeds_are_of_this_version(target: str) -> None:
    for name, data in TARGETS[target].SEEDS.items():
        kept = (CORPUS / target / name).read_bytes()
        assert kept == data, f"write {name} anew: python -m tests.fuzz seeds"


def test_the_seeds_of_frames_are_frames() -> None:
    for data in frames.SEEDS.values():
        frames._TARGETS[data[0]](data[1:])  # must not raise FrameError


def test_nesting_deeper_than_the_stack_is_a_frame_error() -> None:
    """This frame is larger than the corpus may be, and larger than the fuzzer's inputs."""
    with pytest.raises(FrameError, match="not a control message"):
        frames_module.decode_control(b"\x93\xa7setting\xa5level" + b"\x91" * 200_000 + b"\xc0")


def test_targets_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets find a decoder that raises another exception, an unchecked proof, and a session that loses its state."""
    with monkeypatch.context() as patch:
        patch.setattr(frames_module, "FrameError", KeyError)
        with pytest.raises(KeyError):
            frames.one(b"\0\xc1")
    with monkeypatch.context() as patch:
        patch.setattr(handshake.HandshakeServer, "check", lambda *_: None)
        with pytest.raises(AssertionError, match="got through"):
            handshake.one(handshake.SEEDS["hello"])
    with monkeypatch.context() as patch:
        patch.setattr(handshake.Session, "hear", lambda *_: None)
        with pytest.raises(AssertionError):
            handshake.one(handshake.SEEDS["small-heads"])
