"""Application of the manifest with a controller's first mesh, and registration of operators."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed._local_tensor as local_tensor
from torch.distributed.tensor import _api as api

from monarch_backend._core.torch_version import NEWEST, torch_version
from monarch_backend.dtensor._controller.controller_mesh import _mode
from monarch_backend.dtensor._ops import (
    convolution,
    decomposed_losses,
    fused_optimizers,
    grad_scaler,
    normalization,
    sharding_rules,
)
from monarch_backend.dtensor._patches import features
from monarch_backend.dtensor._patches.fixes import composite_ops, grouped_mm, sharding_fixes
from monarch_backend.dtensor._patches.semantics import per_rank_int_operands
from monarch_backend.dtensor._patches.semantics.op_handlers import (
    _equal,
    _item,
    _of_controllers,
    _or_torchs,
    _random_operation,
)
from monarch_backend.dtensor._patches.semantics.rank_functions import _register_shapes
from monarch_backend.dtensor._rng import random_ops
from monarch_backend.dtensor._torch_internals import sharding_tables


def install() -> None:
    """Apply the rows of the manifest that a mesh needs, and register operators; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    features.install()
    modes: list[Any] = local_tensor._PROCESS_LOCAL_TENSOR_MODE
    modes.insert(0, _mode)  # torch looks for its LocalTensorMode there
    handlers: dict[Any, Any] = api.DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _item
    handlers[torch.ops.aten.is_nonzero.default] = lambda func, args, kwargs: bool(_item(func, args, kwargs))
    handlers[torch.ops.aten.equal.default] = _equal
    handlers.update({func: _random_operation(handle) for func, handle in random_ops.handlers.items()})
    for operator, ours in {**convolution.HANDLERS, **grad_scaler.HANDLERS}.items():
        handlers[operator] = _of_controllers(ours, handlers[operator])
    handlers.update(
        {func: _or_torchs(handle) for func, handle in {**normalization.HANDLERS, **fused_optimizers.HANDLERS}.items()}
    )
    handlers.update(decomposed_losses.HANDLERS)
    sharding_tables.register_list_operator(torch.ops.aten._foreach_copy_.default)
    _register_shapes()
    per_rank_int_operands.install()
    _correct_shardings()
    grouped_mm.register()
    composite_ops.register()
    sharding_rules.install()
    # A host's tensor beside distributed ones is the same on all ranks, because only this process has one.
    torch._C._set_dtensor_allow_implicit_replication(True)


_installed = False


def _correct_shardings() -> None:
    """Correct torch's shardings. On a torch that is newer than tested, warn of those that are not found."""
    try:
        sharding_fixes.correct()
    except (AttributeError, KeyError) as error:
        if torch_version() <= NEWEST:
            raise
        warnings.warn(
            f"torch {torch.__version__} is newer than tested; not all of its shardings are corrected: {error!r}",
            stacklevel=2,
        )
