"""Replacement of `parallelize_module`: its first call puts parameters outside all plans on the workers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.tensor import _api as api

from monarch_backend.dtensor._controller.controller_mesh import Replacement, _mode, workers_of
from monarch_backend.dtensor._placement import module_placement


def _parallelize(own: Any) -> Replacement:
    def parallelize_module(module: Any, device_mesh: Any = None, parallelize_plan: Any = None, **options: Any) -> Any:
        outermost, _mode.parallelizing = not _mode.parallelizing, True  # torch's own calls itself for each style
        try:
            done = own(module, device_mesh, parallelize_plan, **options)
        finally:
            _mode.parallelizing = not outermost
        if outermost and parallelize_plan is not None:
            mesh = device_mesh or api._mesh_resources.get_current_mesh()
            hooked = any(isinstance(each, _AtFirstCall) for each in done._forward_pre_hooks.values())
            if not hooked and workers_of(mesh) is not None:
                done.register_forward_pre_hook(_AtFirstCall(mesh))
        return done

    return parallelize_module


class _AtFirstCall:
    """Hook of a parallelized module: its first call puts what no style has taken on the workers.

    Not earlier, since a style or `fully_shard` may follow, which send each worker its shard only. Dynamo traces it.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __deepcopy__(self, _memo: Any) -> _AtFirstCall:
        return self

    def __call__(self, module: Any, _inputs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_put_in_a_trace)
            return
        if torch.compiler.is_compiling():
            return  # a trace of other kinds could not do it; an eager call still can
        self.put(module)

    def put(self, module: Any) -> None:
        """Put what no style has taken on the workers, and remove the hook."""
        for key in [key for key, each in module._forward_pre_hooks.items() if each is self]:  # of a copy, too
            del module._forward_pre_hooks[key]
        if workers_of(self.mesh) is not None:  # else it was sent to a worker, which has everything
            module_placement.put_module(module, self.mesh)


def _put_in_a_trace(context: Any) -> None:
    """Put tensors on the workers in a trace of the hook, and restart the trace with them.

    Dynamo calls this with the hook's names. It is done once for all hooks of the modules in the traced function.
    """
    from torch._dynamo.exc import UnspecializeRestartAnalysis

    root = context._ComptimeContext__tx.output.root_tx
    known = [*root.f_locals.values(), context.get_local("module")._ComptimeVar__variable.value]
    known += [root.f_globals.get(name) for name in root.f_code.co_names]
    with contextlib.suppress(ValueError):  # one that is empty
        known += [each.cell_contents for each in root.closure or ()]
    modules = {each for found in known if isinstance(found, torch.nn.Module) for each in found.modules()}
    for module in modules:
        for hook in [each for each in module._forward_pre_hooks.values() if isinstance(each, _AtFirstCall)]:
            hook.put(module)
    raise UnspecializeRestartAnalysis(restart_reason="parameters outside all plans were put on the workers")
