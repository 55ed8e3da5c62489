"""Import of torch's own test modules without their warnings, as far as torch's wheel has them."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.distributed._tensor import common_dtensor

__all__ = ["common_dtensor", "op_db"]
