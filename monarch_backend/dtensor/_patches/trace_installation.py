"""Application of the manifest with the first trace by torch.compile, and code that dynamo leaves alone."""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import trace_rules
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types
from torch.distributed.tensor import _api as api
from torch.distributed.tensor import _collective_utils as collective_utils
from torch.distributed.tensor import _dispatch as dispatch
from torch.distributed.tensor import _redistribute as redistribute
from torch.distributed.tensor import _utils as utils

import monarch_backend
from monarch_backend import dtensor
from monarch_backend._core import patches
from monarch_backend._core.extension_points import extension
from monarch_backend.dtensor._controller import controller_mesh, device_methods
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._patches import installation, manifest
from monarch_backend.dtensor._patches.semantics import (
    checkpoints,
    device_modules,
    dtensor_api,
    dtensor_methods,
    gradient_lists,
    op_handlers,
    parallel_modules,
    rank_functions,
)
from monarch_backend.dtensor._patches.semantics.graph_inputs import _wrap_by_type, before_to_local
from monarch_backend.dtensor._torch_internals import tracing_state

_TRACED = (
    controller_mesh, rank_functions, device_modules, dtensor_api, op_handlers, parallel_modules, gradient_lists,
    checkpoints, installation, device_methods,
)  # fmt: skip
"""Modules with replacements of torch's functions, which a trace may call."""

_installed = False


def install() -> None:
    """Apply the rows of the manifest that a trace needs, after those that a mesh needs; a second call does nothing."""
    global _installed
    installation.install()
    if _installed:
        return
    _installed = True
    patches.apply(manifest.CAPTURED.rows)
    dtensor_api.before_to_local = before_to_local
    _leave_alone()
    _have_nothing_captured()
    _wrap_by_type()
    # Dynamo looks functions of torch up by name, once. It must find the replacements.
    trace_rules.clear_lru_cache()


def _have_nothing_captured() -> None:
    """Exclude our functions from capture, except replacements of torch's functions, which may be traced.

    Programs with meshes of their own may also call these, in processes that have been controllers.
    """
    traced = [each.__name__ for each in _TRACED]
    for module in pkgutil.iter_modules(monarch_backend.__path__, f"{monarch_backend.__name__}."):
        if module.name != dtensor.__name__:
            trace_rules.add(module.name)
    for module in pkgutil.walk_packages(dtensor.__path__, f"{dtensor.__name__}."):
        if not module.ispkg and module.name not in traced:
            trace_rules.add(module.name)


def _leave_alone() -> None:
    """Exclude the code of DTensors and its callees from compilation where it runs eagerly.

    It runs after a graph break, and in the backward pass. There dynamo would check each called function, and compile
    some with ints that differ by rank as single ints. In a trace all of it is traced as before.
    """
    alone = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(RemoteTensor.__torch_dispatch__.__func__.__code__, alone)  # type: ignore[attr-defined]
    # A hook of a compiled module is called by code that dynamo excludes, so it arrives alone.
    set_code_exec_strategy(parallel_modules._AtFirstCall.__call__.__code__, alone)
    ours_of_operators = (op_handlers.__file__, installation.__file__)
    for handler in api.DTensor._op_dispatcher._custom_op_handlers.values():
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType) and code.co_filename in ours_of_operators:  # without a handler in torch
            set_code_exec_strategy(code, alone)
    files = (*(each.__file__ for each in _TRACED), dtensor_methods.__file__)
    ours = [*DTensor.__mro__, *type(DTensor._op_dispatcher).__mro__, controller_mesh.ControllerMesh]
    for module in (api, collective_utils, dispatch, redistribute, utils, placement_types, device_mesh):
        functions = [*vars(module).values(), *ours]
        functions += [each for found in functions if inspect.isclass(found) for each in vars(found).values()]
        for found in functions:
            function = getattr(found, "__func__", found)
            while function is not None:
                code = getattr(function, "__code__", None)
                if isinstance(code, CodeType) and code.co_filename in (module.__file__, *files):
                    set_code_exec_strategy(code, alone)
                function = getattr(function, "__wrapped__", None)


def _on_workers(own: Any) -> Any:
    """Compile on the workers in place of Inductor here, whose code reads memory, as backend="monarch" does."""

    def __call__(self: Any, model: Any, inputs: Any, **options: Any) -> Any:
        if type(self) is not torch._TorchCompileInductorWrapper or not any(map(_is_of_workers, inputs)):
            return own(self, model, inputs, **options)
        if self.config:
            warnings.warn(
                f"torch.compile() of DTensors on workers, which compile with Inductor's defaults: {self.config} is "
                'not sent there. backend="monarch" has the options that there are',
                UserWarning,
                stacklevel=2,
            )
        return extension("compile backend").monarch(model, inputs)

    return __call__


def _is_of_workers(value: Any) -> bool:
    real = tracing_state.real(value)
    local = real._local_tensor if isinstance(real, DTensor) else real
    return type(local) is RemoteTensor or (
        isinstance(real, DeviceMesh) and controller_mesh.workers_of(real) is not None
    )
