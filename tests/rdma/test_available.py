"""What a process says of its way to other hosts, before it takes it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from monarch_backend.rdma import _available, get_rdma_backend, is_rdma_available


@pytest.mark.parametrize(
    ("forced", "why_not", "backend"),
    [
        ("", None, "verbs"),
        ("", "no verbs device", "tcp"),
        ("tcp", None, "tcp"),
        ("verbs", None, "verbs"),
        ("verbs", "no verbs device", "tcp"),
    ],
)
def test_the_best_route(monkeypatch: pytest.MonkeyPatch, forced: str, why_not: str | None, backend: str) -> None:
    monkeypatch.setenv("MONARCH_RDMA", forced)
    monkeypatch.setattr(_available, "available", lambda: why_not)
    assert is_rdma_available() == (why_not is None)
    assert get_rdma_backend() == backend


def test_what_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_RDMA", "ibverbs")
    with pytest.raises(ValueError, match="MONARCH_RDMA='ibverbs': one of 'tcp', 'verbs'"):
        get_rdma_backend()


def test_nothing_is_started_to_find_out() -> None:
    code = (
        "import sys, threading; from monarch_backend import rdma; from monarch_backend.actor import _program; "
        "rdma.is_rdma_available(); rdma.get_rdma_backend(); "
        "assert _program._program is None; assert threading.active_count() == 1; "
        "assert not {'pyverbs', 'ibverbs', 'torch.distributed.tensor'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
