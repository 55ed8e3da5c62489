"""Operators that XLA's tensors can't take, said in others that they can.

torch_xla makes operations that write into memory functional, which torch knows how to do for its own operators only:
those of FSDP write into views, or return some. What they do is torch's, see fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_HERE = "monarch_backend.dtensor.worker._xla_ops:"
REPLACED = {
    "fsdp.all_gather_copy_in.default": _HERE + "all_gather_copy_in",
    "fsdp.split_with_sizes_copy.default": _HERE + "split_with_sizes_copy",
    "fsdp.chunk_cat.default": _HERE + "chunk_cat",
    "monarch_backend.dtensor.worker._storage:resize": _HERE + "resize",
}
"""By what a record names, what is called in a worker of XLA devices."""


def all_gather_copy_in(
    inputs: list[torch.Tensor], output: torch.Tensor, split_sizes: Sequence[int], numel: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the output, with the inputs in it; and the output."""
    mine = output.narrow(0, numel * rank, numel)
    for part, each in zip(torch.split(mine, list(split_sizes)), inputs, strict=True):
        part.copy_(each)
    return mine, output


def split_with_sizes_copy(
    gathered: torch.Tensor, split_sizes: Sequence[int], dim: int = 0, *, out: list[torch.Tensor]
) -> None:
    """Each part into its tensor."""
    for mine, part in zip(out, torch.split(gathered, list(split_sizes), dim), strict=True):
        mine.copy_(part)


def chunk_cat(tensors: list[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor) -> None:
    """Chunks of all, padded to one size, beside each other."""
    rows = [_padded(each, dim, num_chunks).reshape(num_chunks, -1) for each in tensors]
    out.copy_(torch.cat(rows, 1).view(out.shape))


def _padded(tensor: torch.Tensor, dim: int, num_chunks: int) -> torch.Tensor:
    size = tensor.size(dim)
    missing = -(-size // num_chunks) * num_chunks - size
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def resize(_tensor: torch.Tensor, _nbytes: int) -> None:
    """Nothing: XLA's tensors have no memory that anybody could take away and give back."""
