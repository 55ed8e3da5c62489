"""Manifest of the changes of torch for ``backend="monarch"``: replaced names, see _c10d_patches.py, and registrations.

`import torch` runs _autoload.py, which installs them and imports no other module of the package. So docs and tests read
the rows and compare them with torch; `_core.patches.apply` does not.
"""

from __future__ import annotations

from monarch_backend._core.patches import Moment, Patch, Registration, Release

_C10D = "torch.distributed.distributed_c10d"
_MAKERS = "monarch_backend.process_group._c10d_patches"
_TESTS = "tests/test_torch_patches.py"
_HOOKS = "tests/process_group/test_c10d_hooks.py"

C10D = (
    Patch(
        f"{_C10D}:rendezvous", "fix", (f"{_MAKERS}:rendezvous",),
        "The store is connected to before the backend is called, and a missing rank is not named.",
        f"{_TESTS}::test_rendezvous_is_watched_by_the_name_that_init_process_group_calls", (2, 9),
        upstream="not reported",
    ),
    *(
        Patch(
            f"{module}:batch_isend_irecv", "fix", (f"{_MAKERS}:batch_isend_irecv",),
            "Operations are started one by one, so that a group cannot see that they share memory.",
            f"{_TESTS}::test_batch_isend_irecv_of_every_torch_has_a_stand_in", (2, 9),
            upstream="pytorch/pytorch#178906",
        )
        for module in (_C10D, "torch.distributed")
    ),
    *(
        Patch(
            f"{module}:monitored_barrier", "fix", (f"{_MAKERS}:monitored_barrier",),
            "Raises ValueError for a backend that is not called gloo.",
            f"{_TESTS}::test_monitored_barrier", (2, 9), (2, 14), "pytorch/pytorch#189070",
        )
        for module in (_C10D, "torch.distributed")
    ),
    *(
        Patch(
            f"torch._C._distributed_c10d:{hook}.attach", "fix", (f"{_MAKERS}:see_attached_hooks",),
            "A hook registers itself in C++, which Python does not see.",
            f"{_HOOKS}::test_flight_recorder_has_collectives", (2, 14), upstream="not reported",
        )
        for hook in ("NanCheckHook", "FlightRecorderHook")
    ),
    Patch(
        "torch.distributed:new_group", "fix", (f"{_MAKERS}:restore_new_group",),
        "torch_xla, when it is imported, replaces it for the groups of all backends.",
        "tests/xla/test_xla_backend.py::test_subgroups_and_torch_s_own_new_group", (2, 9), (2, 10), "not reported",
    ),
)  # fmt: skip
"""At most 6 are replaced in one release."""

NAMED_AS = (
    Patch(
        f"{_C10D}:_new_process_group_helper", "semantics", (f"{_MAKERS}:new_process_group_helper",),
        "Makes groups of torch's own backends without asking the registered ones.",
        "tests/process_group/test_backend_names.py::test_groups_for_a_name_of_torch_are_ours", (2, 9),
    ),
)  # fmt: skip
"""Only in programs with MONARCH_AS."""

_BACKEND = tuple(
    f"{_C10D}:Backend.{table}" for table in ("_plugins", "backend_list", "backend_capability", "backend_type_map")
)
_RANGES: tuple[tuple[Moment, Release, Release | None], ...] = (
    ("import of torch", (2, 9), (2, 14)), ("first group", (2, 14), None),
)  # fmt: skip
_ENTRY_POINTS: tuple[tuple[str, Moment, str], ...] = (
    ("torch.backends", "import of torch", "`import torch` makes the replacements that programs may import."),
    ("torch.distributed.backends", "first group", "torch 2.14 and later load a backend at its first use."),
)  # fmt: skip

REGISTRATIONS = (
    *(
        Registration(
            _BACKEND, ("monarch", "MONARCH"), "monarch_backend._autoload", at, "process", "semantics",
            "torch's `register_backend` makes the name known. It is the default of no device.",
            "tests/test_package.py::test_second_registration_has_no_effect", since, before,
        )
        for at, since, before in _RANGES
    ),
    *(
        Registration(
            (f"entry points {group}",), ("monarch",), "monarch_backend._autoload", at, "process", "semantics",
            why, "tests/test_package.py::test_entry_points_are_ours", (2, 9),
        )
        for group, at, why in _ENTRY_POINTS
    ),
    Registration(
        ("dispatch key XLA",), ("_c10d_functional::*",), "monarch_backend.process_group._xla.host_staged",
        "first group", "process", "fix",
        "torch_xla's functional collectives reduce over all devices, whatever the group is. For groups of XLA tensors.",
        "tests/xla/test_xla_backend.py::test_collective", (2, 9),
    ),
)  # fmt: skip
