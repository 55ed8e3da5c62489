"""Workaround for different graphs with equal hashes in torch_xla (2.9): each gets an executable of its own.

torch_xla keeps executables by a graph's hash. An existing tensor counts in the hash by its shape only. So `(a - b) * a`
and `(a - b) * b` have the same hash if a and b have the same shape. The first one's executable then computes the
second, with wrong values and no error.

Here a graph that is not the first of its hash gets one more result. Its size is the graph's number. It changes the
hash, because results are part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_texts: dict[bytes, list[bytes]] = {}
"""Digests of the texts of the graphs that have a hash of torch_xla's."""
_said: dict[tuple[bytes, Hashable], int] = {}
"""Number of a graph among those of its hash, by the hash and the caller's key."""


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies in host memory, made in one graph with all computations that they need."""
    native = _native()
    given = [each.detach() for each in tensors]
    if not any(native._check_tensor_need_materialization(given)):
        return [each.cpu() for each in given]
    found: list[torch.Tensor] = native._xla_get_cpu_tensors([*given, *_mark(given, None)])
    return found[: len(given)]


def is_on_xla(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def all_on_host(values: Any) -> Any:
    """Return the tree with host copies in place of its XLA tensors."""
    leaves, spec = pytree.tree_flatten(values)
    copies = iter(on_host([each for each in leaves if is_on_xla(each)]))
    return pytree.tree_unflatten([next(copies) if is_on_xla(each) else each for each in leaves], spec)


def sync(held: Iterable[torch.Tensor], said: Hashable) -> None:
    """Run the recorded operations, also those of tensors outside ``held``.

    ``said``: a key that is equal for two graphs only if both use the same tensors in the same places, or None. With a
    key, the graph's text is not needed, which takes longer than recording the graph.
    """
    import torch_xla

    # Using a view would make it a result of its own. The tensor that it views is a result anyway.
    known = [each for each in held if each._base is None]
    asked = _native()._check_tensor_need_materialization(known)
    pending = [each for each, is_pending in zip(known, asked, strict=True) if is_pending]
    mark = _mark(pending, said) if pending else []
    torch_xla.sync()
    del mark  # it had to exist until now


def _mark(tensors: list[torch.Tensor], said: Hashable) -> list[torch.Tensor]:
    """Return an extra result for a graph that is not the first of its hash, else no tensor."""
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
