"""What _torch_ipc.py leans on is as it was. What is done with it is in test_device.py, and with a GPU in tests/gpu."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from monarch_backend.rdma import RDMAError, _torch_ipc


def test_what_torch_shares() -> None:
    """All but these stands in what `reduce_tensor` returns, so that they must stay the same on both sides."""
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters) == [
        "tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device",
        "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
        "ref_counter_offset", "event_handle", "event_sync_required",
    ]  # fmt: skip
    source = inspect.getsource(reductions.reduce_tensor)
    assert "_share_cuda_()" in source and "rebuild_cuda_tensor," in source
    assert "_new_shared_cuda(" in inspect.getsource(reductions.rebuild_cuda_tensor)
    for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"):
        assert hasattr(torch.UntypedStorage, name)


@pytest.mark.parametrize("keep", [bytearray(8), torch.zeros(2).untyped_storage()], ids=["array", "cpu"])
def test_what_is_not_torch_s(keep: Any) -> None:
    with pytest.raises(RDMAError, match="no tensor's memory"):
        _torch_ipc.share(keep, 0)
