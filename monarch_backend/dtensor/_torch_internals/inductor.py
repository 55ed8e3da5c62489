"""Private parts of torch that captured steps use on a worker: Inductor, and fake tensors for traces."""

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

MAX_ATTEMPTS = 3
"""Attempts to compile. Workers of one host compile concurrently, and may remove a broken file after each other."""


def compiled(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
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
    """Return the path of a library in Inductor's cache that can't be loaded, because a worker was killed while writing.

    Inductor uses existing files, so without its removal no process of this host could ever compile this.
    """
    inner = error.inner_exception
    path = inner.path if isinstance(inner, ImportError) else None
    found = None if path is None else Path(path)
    return found if found is not None and found.is_relative_to(cache_dir()) else None
