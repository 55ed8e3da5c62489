"""Checks of values that a single process would refuse; workers check their shards, and the next read raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor, Replicate

from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import dispatch
from monarch_backend.dtensor._dispatch.fake_tensors import stands_in
from monarch_backend.dtensor._torch_internals import tracing_state
from monarch_backend.dtensor._worker import value_checks


def require(check: Callable[..., None], x: Any, *others: Any) -> None:
    """Check the values of a tensor on workers, or of its stand-in in a trace; nothing for other tensors."""
    local = x
    if isinstance(x, DTensor):
        whole = [Replicate() if each.is_partial() else each for each in x.placements]
        local = x.redistribute(placements=whole)._local_tensor
    local = local.detach()
    if isinstance(local, RemoteTensor):
        dispatch.call(check, f"{check.__module__}:{check.__name__}", (local, *others), {})
    elif tracing_state.is_traced(local):
        check(local, *others)


stands_in.update(dict.fromkeys((value_checks.probabilities, value_checks.classes), lambda *_: None))
