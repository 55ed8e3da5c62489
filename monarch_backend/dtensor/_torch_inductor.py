"""What captured steps need of torch's private parts on a worker: Inductor, and tensors without values to trace with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import compile as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def compiled(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The function, which takes and returns tensors like these, as Inductor compiles it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad():
        fakes = [mode.from_tensor(each, static_shapes=True) for each in tensors]
        graph = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
        return inductor(graph, list[Any](fakes))  # type: ignore[no-any-return]
