"""Profiles of the processes of a mesh that are on this host, for `ProcMesh.profile`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from monarch_backend._actor.calls.future import Future, LabelledFuture
from monarch_backend._core import platform
from monarch_backend._mesh.proc_mesh import ProcMesh
from monarch_backend._telemetry import profile_result, profiles
from monarch_backend._telemetry.profile_result import ProfileResult
from monarch_backend._telemetry.profiles import Profile
from monarch_backend._transport.tokens import host_of

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

START_TIMEOUT_S = 60.0
"""Seconds for which a profile waits for processes that start."""


def profile(
    program: Runtime, procs: ProcMesh, seconds: float | None, steps: int | None, ranks: Iterable[int] | None
) -> Future[ProfileResult]:
    """Return a future of the profiles of a mesh or slice, or of some of its ranks. Raises as `ProcMesh.profile`."""
    if not platform.HAS_MEMFD:
        raise NotImplementedError("profiles of running processes need Linux")
    profiles.check(seconds, steps, profiles.STEP_LIMIT_S)
    members = procs._shape.ranks
    chosen = list(members) if ranks is None else [members[_index(rank, len(members))] for rank in ranks]
    if not chosen:
        raise ValueError("give at least one rank to profile")
    done: Future[ProfileResult] = LabelledFuture(program.wait, f"the profile of {procs._core.name}")

    def take() -> None:
        try:
            done._set(_take(program, procs, chosen, seconds, steps))
        except BaseException as error:
            done._fail(error)

    program.run_in_thread(take)
    return done


def _index(rank: int, size: int) -> int:
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not one of the {size} ranks of this mesh or slice")
    return rank


def _take(
    program: Runtime, procs: ProcMesh, ranks: list[int], seconds: float | None, steps: int | None
) -> ProfileResult:
    core, here = procs._core, host_of(program.router.me.token)
    with contextlib.suppress(Exception):  # a rank that has not started is a problem of the result
        program.ready(core).get(START_TIMEOUT_S)
    near: list[tuple[int, str]] = []
    far: list[Profile] = []
    for rank in ranks:
        peer, label = core.peer(rank), f"{core.where(rank)} of {core.name}"
        if host_of(peer.token) != here:
            host = program.hosts.name_of(peer.token)
            far.append(Profile(0, label, f"it is on host {host}: run 'monarch-backend profile JOB', with its job"))
        elif peer.gone is not None:
            far.append(Profile(0, label, f"it has ended: {peer.gone}"))
        else:
            near.append((program.pid if peer is program.router.me else peer.pid, label))
    return profile_result.take(near, seconds=seconds, steps=steps, further=far)
