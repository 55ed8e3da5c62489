"""Graphs that torch_xla (2.9) takes for one another, and how each of them gets an executable of its own.

torch_xla keeps executables by a hash in which a tensor that is there already counts by its shape, and not by which it
is: `(a - b) * a` and `(a - b) * b` have the same hash if a and b have the same shape. What is asked for second is done
by the first one's executable, with wrong values, and without a word. So a graph that is not the first of its hash gets
one more result, which nobody wants, and whose size says which of them it is: a result is part of the hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_texts: dict[bytes, list[bytes]] = {}
"""By torch_xla's hash the texts of the graphs that have it, as digests."""
_said: dict[tuple[bytes, Hashable], int] = {}
"""Which of them it is, by the hash and what a caller has said of the graph."""


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in the host's memory, in one graph with all that has to be done for them."""
    native = _native()
    given = [each.detach() for each in tensors]
    if not any(native._check_tensor_need_materialization(given)):
        return [each.cpu() for each in given]
    found: list[torch.Tensor] = native._xla_get_cpu_tensors([*given, *_mark(given, None)])
    return found[: len(given)]


def is_on_xla(value: Any) -> bool:
    """Whether it is a tensor of an XLA device."""
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def all_on_host(values: Any) -> Any:
    """The tree with such copies in the place of all XLA tensors in it."""
    leaves, spec = pytree.tree_flatten(values)
    copies = iter(on_host([each for each in leaves if is_on_xla(each)]))
    return pytree.tree_unflatten([next(copies) if is_on_xla(each) else each for each in leaves], spec)


def sync(held: Iterable[torch.Tensor], said: Hashable) -> None:
    """Do what was recorded, also of tensors that are not among those ``held``.

    ``said``: equal for two graphs only if in both the same tensors are used in the same places, or None. Who can say
    this saves the graph's text, which takes longer than to record it.
    """
    import torch_xla

    # A view would become a result of its own if it was looked at; what it is a view of is one anyway.
    known = [each for each in held if each._base is None]
    asked = _native()._check_tensor_need_materialization(known)
    pending = [each for each, is_pending in zip(known, asked, strict=True) if is_pending]
    mark = _mark(pending, said) if pending else []
    torch_xla.sync()
    del mark  # it had to be there


def _mark(tensors: list[torch.Tensor], said: Hashable) -> list[torch.Tensor]:
    """Nothing for the first graph of its hash; for another one its mark."""
    native = _native()
    key: bytes = native._get_graph_hash(tensors)
    which = None if said is None else _said.get((key, said))
    if which is None:
        text = hashlib.blake2b(native._get_xla_tensors_text(tensors).encode(), digest_size=16).digest()
        texts = _texts.setdefault(key, [])
        if text not in texts:
            texts.append(text)
        which = texts.index(text)
        if said is not None:
            _said[key, said] = which
    return [torch.zeros(which, device=tensors[0].device)] if which else []


def _native() -> Any:
    import torch_xla

    return torch_xla._XLAC
