"""Registration of the corrected shape of `F.grouped_mm` on a controller: see _worker/grouped_mm.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import _meta_registrations

from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor._worker.grouped_mm import FIXED_IN, corrected


def register() -> None:
    if torch_version() < FIXED_IN:
        torch.library.register_fake("aten::_grouped_mm", _shape, allow_override=True)


def _shape(mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    return corrected(_meta_registrations._meta_grouped_mm_common)(
        mat_a, mat_b, None, None, offs=offs, bias=bias, out_dtype=out_dtype
    )
