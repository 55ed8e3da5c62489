"""Reported route of a process to other hosts, before the first transfer."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from monarch_backend._rdma.routes import selection
from monarch_backend._rdma.routes import verbs as verbs_module
from monarch_backend.rdma import get_rdma_backend, is_rdma_available


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
def test_best_route_is_reported(
    monkeypatch: pytest.MonkeyPatch, forced: str, why_not: str | None, backend: str
) -> None:
    monkeypatch.setenv("MONARCH_RDMA_TRANSPORT", forced)
    monkeypatch.setattr(selection, "available", lambda: why_not)
    assert is_rdma_available() == (why_not is None)
    assert get_rdma_backend() == backend


def test_unknown_route_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_RDMA_TRANSPORT", "ibverbs")
    with pytest.raises(ValueError, match="MONARCH_RDMA_TRANSPORT='ibverbs': one of 'tcp', 'verbs'"):
        get_rdma_backend()


def test_query_starts_no_thread_or_device() -> None:
    code = (
        "import sys, threading; from monarch_backend import rdma; from monarch_backend._actor import current_runtime; "
        "rdma.is_rdma_available(); rdma.get_rdma_backend(); "
        "assert current_runtime._program is None; assert threading.active_count() == 1; "
        "assert not {'pyverbs', 'ibverbs', 'torch.distributed.tensor'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_owner_checks_again_for_an_active_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner whose port becomes active later sends handles for NICs from then on."""
    now, up, asked = [100.0], [False], []

    def available(*, up_now: bool) -> str | None:
        asked.append(up_now)
        return "no port is both ACTIVE and permitted" if up_now and not up[0] else None

    monkeypatch.setattr(verbs_module, "available", lambda up: available(up_now=up))
    monkeypatch.setattr(verbs_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    verbs = verbs_module.Verbs(None, None)  # type: ignore[arg-type]
    assert verbs.unusable() is not None
    assert verbs.unusable(up=False) is None
    up[0] = True
    asked.clear()
    assert verbs.unusable() is not None
    assert not asked
    now[0] += verbs_module.PORT_CHECK_INTERVAL_S
    assert verbs.unusable() is None
    now[0] += verbs_module.PORT_CHECK_INTERVAL_S
    assert verbs.unusable() is None
    assert asked == [True]


def test_machine_without_nics_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(verbs_module, "available", lambda up: asked.append(up) or "no verbs device")
    monkeypatch.setattr(verbs_module, "PORT_CHECK_INTERVAL_S", 0.0)
    verbs = verbs_module.Verbs(None, None)  # type: ignore[arg-type]
    assert [verbs.unusable() for _ in range(3)] == ["no verbs device"] * 3
    assert asked == [True, False]
