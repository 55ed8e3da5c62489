"""What captured steps need of torch's private parts on a worker: Inductor, and tensors without values to trace with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor import compile as inductor
from torch._inductor.exc import InductorError
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from monarch_backend.dtensor._patches.fixes import grouped_mm

MAX_ATTEMPTS = 3
"""Workers of one host compile the same at the same time, and may remove a broken file after each other."""

grouped_mm.install_on_worker()


def compiled(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The function, which takes and returns tensors like these, as Inductor compiles it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad():
        fakes = [mode.from_tensor(each, static_shapes=True) for each in tensors]
        graph = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return inductor(graph, list[Any](fakes))  # type: ignore[no-any-return]
            except InductorError as error:
                broken = _broken(error)
                if broken is None:
                    raise
                broken.unlink(missing_ok=True)
        return inductor(graph, list[Any](fakes))  # type: ignore[no-any-return]


def _broken(error: InductorError) -> Path | None:
    """A library in Inductor's cache that can't be loaded: a worker was killed while it was written.

    Inductor takes what is there, so that nobody on this host could compile this ever again.
    """
    inner = error.inner_exception
    path = inner.path if isinstance(inner, ImportError) else None
    found = None if path is None else Path(path)
    return found if found is not None and found.is_relative_to(cache_dir()) else None
