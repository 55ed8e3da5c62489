"""Adapter of torch_xla's group: it is found here, and errors explain what it can't do.

torch_xla's ProcessGroupXla was made to be the default group. As an inner group it must be given the group's ranks. It
silently computes wrong results for some collectives of a group that is not the whole world. This module has the checks.
It may not import torch_xla before the first XLA tensor, because the import takes seconds and starts threads.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from monarch_backend.process_group import _c10d_internals, _c10d_patches
from monarch_backend.process_group._collective_specs import BY_METHOD
from monarch_backend.process_group._errors import NoRouteError, bad_argument, where
from monarch_backend.process_group._xla.host_staged import NothingToEnd, StagedGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from monarch_backend.process_group._process_group import MonarchProcessGroup

_BACKEND = "torch_xla.distributed.xla_backend"

REDUCE_OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR")


def missing() -> str:
    """Return why there is no XLA route in this process, or ""; does not import torch_xla."""
    if "torch_xla" not in sys.modules and importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed; pip install 'monarch_backend[xla]' (it needs the torch it was built for)"
    runtime = sys.modules.get("torch_xla.runtime")
    if runtime is not None and runtime.is_spmd():
        return "torch_xla is in SPMD mode, where XLA itself moves the data; use its sharding, or leave out use_spmd()"
    try:
        version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return ""
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        return f"torch_xla {version} was built for another torch than {torch.__version__}; install the matching one"
    return ""


def make(
    group: MonarchProcessGroup, inner: Callable[[], Any], ranks: list[int], options: Any
) -> XlaGroup | StagedGroup:
    """Return the inner group of the XLA route; ``inner`` makes torch_xla's group once its package is imported."""
    try:
        importlib.import_module(_BACKEND)
    except Exception as error:  # a torch_xla for another torch may fail with any error of the loader
        raise NoRouteError(
            f"torch_xla is installed and can't be imported with torch {torch.__version__}: {error} [{where(group)}]"
        ) from error
    _c10d_patches.restore_new_group()
    if _is_alone():
        return StagedGroup(group)
    _check_world(group)
    return XlaGroup(inner(), group, ranks, options)


def _is_alone() -> bool:
    """True if this process's XLA client can never reach another process: PJRT's CPU client."""
    from torch_xla import runtime

    devices = runtime.global_runtime_device_count()
    return runtime.device_type() == "CPU" and devices == 1 and dist.get_world_size() > 1


def _check_world(group: MonarchProcessGroup) -> None:
    """Check that XLA numbers its devices as ranks; results would be wrong otherwise."""
    from torch_xla import runtime

    devices, ordinal = runtime.world_size(), runtime.global_ordinal()
    if (devices, ordinal) != (dist.get_world_size(), dist.get_rank()):
        raise NoRouteError(
            f"torch_xla counts {devices} devices and this one is number {ordinal}; torch.distributed counts "
            f"{dist.get_world_size()} ranks and this is rank {dist.get_rank()}. Start one process per device with "
            f'torch_xla.launch, or init_process_group("monarch", init_method="xla://") under torchrun. [{where(group)}]'
        )


class XlaGroup(NothingToEnd):
    """torch_xla's group behind a route; refuses calls that it can't do, with the reason."""

    def __init__(self, inner: Any, group: MonarchProcessGroup, ranks: list[int], options: Any) -> None:
        world = dist.get_world_size()
        if not ranks and group.size() != world:
            raise NoRouteError(
                f"a group made by split_group has no route for XLA tensors; use new_group. [{where(group)}]"
            )
        self._inner, self._group = inner, group
        self._ranks = ranks or list(range(world))
        self._whole_world = self._ranks == list(range(world))
        # As torch_xla's own new_group does. Without a mesh every collective would run over all devices.
        mesh = [[rank] for rank in range(world)] if len(self._ranks) == 1 else [self._ranks]
        inner._mesh = (options or {}).get("mesh", mesh)

    def __getattr__(self, name: str) -> Any:
        spec = BY_METHOD.get(name)
        if spec is None:
            raise AttributeError(f"the XLA route has no {name}")
        if spec.xla_remedy:
            raise self._refusal(name, "torch_xla's group lacks it", spec.xla_remedy)
        if spec.xla_world_only and not self._whole_world:
            raise self._refusal(
                name, "torch_xla's group does it for all ranks only, not for a subgroup", "Use the default group."
            )
        if name != spec.key:
            raise AttributeError(f"the XLA route has no {name}")
        method = getattr(self._inner, name)
        return functools.partial(self._reduced, spec.name, method) if spec.reduces else method

    def _refusal(self, name: str, reason: str, remedy: str) -> NoRouteError:
        return NoRouteError(f"{name} on route xla -> xla: {reason}. {remedy} [{where(self._group)}]")

    def _reduced(self, collective: str, method: Callable[..., Any], *args: Any) -> Any:
        """Call torch_xla's method if it has the reduce op of the options, the last argument."""
        op = args[-1].reduceOp
        kind = getattr(op, "op", op)
        name = str(getattr(kind, "name", kind))
        if name not in REDUCE_OPS:
            remedy = f"Use one of {', '.join(REDUCE_OPS)}."
            raise bad_argument(self._group, collective, f"torch_xla has no reduce op {name}", remedy)
        return method(*args)

    def alltoall_base(self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any) -> Any:
        if output_splits or input_splits:
            what = "torch_xla has no split sizes"
            raise bad_argument(self._group, "all_to_all_single", what, "Exchange equal slices.")
        return self.__getattr__("alltoall_base")(output, input, output_splits, input_splits, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Broadcast in place. torch_xla's own method needs its group in torch's list of groups, where it is missing."""
        from torch_xla.core import xla_model

        xla_model.collective_broadcast(tensors, self._ranks[opts.rootRank], groups=self._inner._mesh, pin_layout=False)
        return _c10d_internals.finished_work(tensors)
