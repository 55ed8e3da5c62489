"""Fix of `F.grouped_mm` of float32 and float16: torch's meta function before 2.15 refuses what its kernels accept.

Workers install it for Inductor. A controller registers it for shapes of results: see _patches/fixes/grouped_mm.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _meta_registrations

from monarch_backend._core.torch_version import torch_version

FIXED_IN = (2, 15)
NAME = "_meta_grouped_mm_common"


def corrected(own: Any) -> Callable[..., Any]:
    """Replacement for torch's meta function of this name."""

    def _meta_grouped_mm_common(
        mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any, offs: Any = None, bias: Any = None,
        scale_result: Any = None, out_dtype: Any = None, use_fast_accum: bool = False,
    ) -> Any:  # fmt: skip
        if scale_a is not None or mat_a.dtype != mat_b.dtype or mat_a.dtype not in (torch.float32, torch.float16):
            return own(mat_a, mat_b, scale_a, scale_b, offs, bias, scale_result, out_dtype, use_fast_accum)
        if out_dtype not in (None, mat_a.dtype):
            raise RuntimeError(f"grouped_mm of {mat_a.dtype} has results of this dtype, not of {out_dtype}")
        own(_as_bfloat16(mat_a), _as_bfloat16(mat_b), None, None, offs, bias)
        return _meta_registrations._create_grouped_mm_output_tensor(mat_a, mat_b, offs, out_dtype)

    return _meta_grouped_mm_common


def _as_bfloat16(matrix: Any) -> Any:
    """Return the matrix with as many bytes from row to row, which must be a multiple of 16."""
    width = matrix.element_size() // 2
    strides = [each if each == 1 else each * width for each in matrix.stride()]
    return torch.empty_strided(matrix.shape, strides, dtype=torch.bfloat16, device=matrix.device)


def install() -> None:
    """Install it for Inductor on a worker. A second call does nothing; an older torch has no such function."""
    own = getattr(_meta_registrations, NAME, None)
    if torch_version() < FIXED_IN and own is not None and not hasattr(own, "__wrapped__"):
        setattr(_meta_registrations, NAME, functools.wraps(own)(corrected(own)))
