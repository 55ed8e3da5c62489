"""Program that records what an installation adds to torch's tables, for test_registrations.py.

``python -m tests.dtensor.patches.registrations_probe PROGRAM`` prints JSON: for each table, the names of its entries
that are new, changed or removed, and the names of all its entries. It compares all containers of torch's modules and
classes before and after, and records the calls of torch's functions that register.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.trace_rules
import torch._inductor
import torch.distributed as dist
import torch.distributed._local_tensor
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
from torch._C._dynamo import eval_frame
from torch._dynamo.variables import builder
from torch.distributed.tensor import DTensor

OURS = "monarch_backend"
BOOKKEEPING = ("torch.library:", "torch._library.", "torch.jit._builtins:", "torch.ops:")
"""Tables that are left out: torch's bookkeeping of its other tables, and an index of operators that fills on use."""
CONTAINERS = (dict, set, list)
FAKES = "shapes of fake tensors"
SETTERS = ("_set_", "_ensure", "_dispatch_tls_set", "_register")
"""Beginnings of names of C++ functions that change a setting of the process or the thread."""

calls: dict[str, set[str]] = {}


def record(table: str, entry: str) -> None:
    calls.setdefault(table, set()).add(entry)


def text(key: Any) -> str:
    """Return a key's name, which is the same in each release."""
    if isinstance(key, str):
        return OURS if f"/{OURS}/" in key else key
    if isinstance(key, torch._ops.OpOverload):
        return str(key)
    if inspect.isclass(key):
        return f"{key.__module__}:{key.__qualname__}"
    name = getattr(key, "__name__", None)
    return name if isinstance(name, str) else f"{type(key).__module__}:{type(key).__qualname__}"


# Calls ----------------------------------------------------------------------------------------------------------


def watch(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Call ``note`` with the arguments of each call of a function."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return own(*args, **kwargs)

    setattr(owner, name, call)


def operator_name(library: Any, operator: Any) -> str:
    if isinstance(operator, torch._ops.OpOverload):
        operator = operator.name()
    return operator if "::" in operator else f"{library.ns}::{operator}"


def watch_library() -> None:
    def impl(library: Any, operator: Any, kernel: Any, dispatch_key: str = "", **_: Any) -> None:
        if not is_of_fake():
            record(f"dispatch key {dispatch_key or library.dispatch_key}", operator_name(library, operator))

    def fallback(_library: Any, _kernel: Any, dispatch_key: str = "", **_: Any) -> None:
        record(f"dispatch key {dispatch_key}", "fallback")

    def define(library: Any, schema: str, *_: Any, **__: Any) -> None:
        record("operators", operator_name(library, schema.partition("(")[0]))

    def fake(library: Any, operator: Any, *_: Any, **__: Any) -> None:
        record(FAKES, operator_name(library, operator))

    own = torch.library.Library
    for name, note in (("impl", impl), ("fallback", fallback), ("define", define), ("_register_fake", fake)):
        watch(own, name, note)


def is_of_fake() -> bool:
    """Return whether torch itself is registering a fake as a kernel of the key Meta."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        if frame.f_code.co_name == "_register_fake":
            return True
        frame = frame.f_back
    return False


def watch_settings() -> None:
    def setter(name: str) -> Callable[..., None]:
        def note(*args: Any, **_: Any) -> None:
            is_of_a_tensor = bool(args) and isinstance(args[0], torch.Tensor)
            if sys._getframe(2).f_globals.get("__name__", "").startswith(OURS) and not is_of_a_tensor:
                record("torch._C", name)

        return note

    for name in dir(torch._C):
        if name.startswith(SETTERS) and inspect.isbuiltin(getattr(torch._C, name)):
            watch(torch._C, name, setter(name))
    watch(torch, "_register_device_module", lambda device_type, _module: record("device modules", device_type))

    def skip(code: types.CodeType, _strategy: Any) -> None:
        module = next(
            (name for name, each in sys.modules.items() if vars(each).get("__file__") == code.co_filename), ""
        )
        if not module.startswith(OURS):
            record("code that dynamo skips", module)

    watch(eval_frame, "set_code_exec_strategy", skip)


# Tables ---------------------------------------------------------------------------------------------------------


def tables() -> dict[int, tuple[Any, list[str]]]:
    """Return the containers of torch's modules and classes: each with its names."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for name, container in named_tables():
        if isinstance(container, CONTAINERS) and not name.startswith(BOOKKEEPING):
            found.setdefault(id(container), (container, []))[1].append(name)
    return found


def named_tables() -> Iterator[tuple[str, Any]]:
    dispatcher = DTensor._op_dispatcher
    for path, owner in (("", dispatcher), (".sharding_propagator", dispatcher.sharding_propagator)):
        for name, value in vars(owner).items():
            yield f"torch.distributed.tensor:DTensor._op_dispatcher{path}.{name}", value
    for flag in (False, True):
        name = "torch._dynamo.variables.builder:VariableBuilder._type_dispatch_impl"
        yield name, builder.VariableBuilder._type_dispatch_impl(flag)
    config = torch._dynamo.config.traceable_tensor_subclasses
    yield "torch._dynamo.config:traceable_tensor_subclasses", config
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if not name.startswith("__"):
                    yield f"{module_name}:{name}", value
                if inspect.isclass(value) and (value.__module__ or "").partition(".")[0] == "torch":
                    for of_class, each in list(vars(value).items()):
                        if not of_class.startswith("__"):
                            yield f"{value.__module__}:{value.__qualname__}.{of_class}", each


def entries(container: Any) -> dict[Any, Any]:
    """Return a container's values by key; those of a set or a list are their own keys."""
    if isinstance(container, dict):
        return dict(container)
    return {each if isinstance(each, (str, type)) else Id(each): None for each in container}


class Id:
    """A key for an object that may have no hash."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Id) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def kernels() -> dict[str, set[str]]:
    """Return the operators with a kernel, by dispatch key."""
    found = {}
    for key in torch._C.DispatchKey.__members__:
        with contextlib.suppress(RuntimeError):  # not a key, but the start of a range of keys
            found[key] = set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    return found


def name_of(key: Any) -> str:
    return text(key.value if isinstance(key, Id) else key)


def function_id(value: Any) -> int:
    """Return the id of a rule's function. A rule for one dimension of a mesh is a record with the function."""
    return id(getattr(value, "func", value))


# Programs -------------------------------------------------------------------------------------------------------


def import_torch() -> None:
    from monarch_backend import _autoload

    _autoload.torch_backends_entry()
    _autoload.register()


def plain() -> None:
    import_torch()
    dist.init_process_group("monarch", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    dist.destroy_process_group()


def controller() -> None:
    import_torch()
    from monarch_backend.dtensor import RemoteTensorError, simulated_mesh
    from monarch_backend.dtensor._patches import features

    simulated_mesh((2,), ("x",))
    for device_type in ("cuda", "xla"):
        simulated_mesh((2,), ("x",), device_type)
        with torch.autocast(device_type, dtype=torch.bfloat16):
            pass
    with contextlib.suppress(RemoteTensorError):  # before torch 2.13
        features.require_traces()
        from monarch_backend.dtensor._patches import trace_installation

        trace_installation.install()


def worker() -> None:
    from monarch_backend.dtensor._worker import attention
    from monarch_backend.process_group._xla import host_staged

    attention.install("XLA")
    host_staged.functional_by_groups()


def made_up() -> None:
    """Make an entry of each kind that no row names."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("aten::sigmoid", lambda x: x, "Negative")
    library.m.impl("sinh", "Negative", lambda x: x, False)  # without Library.impl
    torch.serialization._package_registry.append((0, made_up, made_up))
    torch.library.register_fake("aten::sigmoid", lambda x: x, allow_override=True)
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten.sigmoid.default] = made_up
    torch._register_device_module("maia", types.SimpleNamespace())
    eval_frame.set_code_exec_strategy(
        json.JSONDecoder.decode.__code__,
        eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP),
    )
    exec("import torch; torch._C._set_deterministic_algorithms(False)", {"__name__": f"{OURS}.made_up"})
    kept.append(library)


kept: list[Any] = []
"""Libraries of kernels. A library that is collected removes its kernels."""


def main(program: str) -> None:
    warnings.simplefilter("ignore")
    if hasattr(dist.Backend, "_ensure_backend_registered"):  # torch 2.14 and later register Gloo at its first use
        dist.Backend._ensure_backend_registered("gloo")
    watch_library()
    watch_settings()
    containers = tables()
    before = {key: entries(container) for key, (container, _) in containers.items()}
    registered = kernels()
    globals()[program]()
    found = []
    for key, (container, names) in containers.items():
        old, new = before[key], entries(container)
        changed = {each for each in {**old, **new} if (each in old) != (each in new) or old[each] is not new[each]}
        if changed:
            own = {name_of(each): function_id(value) for each, value in old.items()}
            found.append(table(names, map(name_of, changed), map(name_of, {**old, **new}), own))
    for name, made in calls.items():
        found.append(table([name], made, made))
    for dispatch_key, known in kernels().items():
        name = f"dispatch key {dispatch_key}"
        recorded = calls.get(name, set()) | (calls.get(FAKES, set()) if dispatch_key == "Meta" else set())
        left = known - registered.get(dispatch_key, set()) - {each.removesuffix(".default") for each in recorded}
        if left:
            found.append(table([name], left, left))
    print(json.dumps(found))


def table(
    names: list[str], changed: Iterable[str], every: Iterable[str], own: dict[str, int] | None = None
) -> dict[str, Any]:
    return {"names": names, "changed": sorted(set(changed)), "all": sorted(set(every)), "own": own or {}}


if __name__ == "__main__":
    main(sys.argv[1])
