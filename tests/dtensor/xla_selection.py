"""Selection of DTensor tests for workers with XLA devices (`make test-xla`), and a list of tests that cannot pass.

conftest.py applies it if MONARCH_TEST_XLA_PYTHON names a Python with torch_xla. If a test in CANNOT passes, the run
fails, so the list stays correct.
"""

from __future__ import annotations

import os

import pytest

PER_TEST = int(os.environ.get("MONARCH_TEST_XLA_PER_TEST", "1"))
"""Number of parametrizations of each test. XLA compiles each graph, so the default is low.

`make test-xla PER_TEST=99` runs all.
"""
ALWAYS = {
    "test_training_steps.py::test_optimizers[AdamW3-foreach]",
    "test_training_steps.py::test_optimizers[AdamW3-fused]",
    "test_training_steps.py::test_gradients_are_clipped[2-True-2.0]",
}
"""Parametrizations that are always selected."""
_FIXTURES = {"mesh", "line", "cube", "mesh_of"}
"""A test uses the workers if it has one of these fixtures or requests `all_procs` itself."""
_ELSEWHERE = {"test_gpu_meshes.py", "test_torch_internals.py", "test_op_db.py"}
"""Files that are left out.

They test other devices, or the private attributes of torch. test_op_db.py has thousands of operators, and XLA would
compile a graph for each.
"""
_TOO_LONG = {"test_worker_memory.py::test_a_thousand_steps_hold_no_more_than_three_and_learn_no_signature"}
_NO_FUSED = "torch has fused=True of optimizers for no XLA tensor"
_NO_FOREACH = "torch has foreach=True of clip_grad_norm_ for no XLA tensor"
_NOT_CHECKED = "XLA takes the last row for an index that is out of range"
_NO_MEMORY = "XLA's tensors have no memory that could be freed or measured: whole parameters stay"
_ROUNDED = "XLA rounds numbers of 16 bits in other places than the CPU does: by 1 % of a gradient"
_NEEDS_MODULE = "what the worker is given is of a module that needs a controller's torch, and says so"
CANNOT: dict[str, str] = {
    "test_deferred_checks.py::test_a_label_that_is_out_of_range_of_a_parallel_loss": _NOT_CHECKED,
    "test_deferred_checks.py::test_results_of_an_index_out_of_range_have_failed": _NOT_CHECKED,
    "test_compile.py::test_a_rank_of_another_class_that_fails": _NOT_CHECKED,
    "test_compile.py::test_failure_on_a_rank_is_raised_with_the_programs_line": _NOT_CHECKED,
    "test_compile.py::test_other_dtypes_and_devices_are_captured": "ways between devices are left to eager code",
    "test_compile.py::test_bernoulli_of_a_tensor_is_that_of_a_single_process": "left to eager code, as on GPUs",
    "test_fsdp.py::test_values_are_those_of_a_single_process[adamw-fused]": _NO_FUSED,
    "test_fsdp.py::test_a_fused_optimizer_sends_no_message_for_a_parameter": _NO_FUSED,
    "test_fsdp.py::test_mixed_precision": _ROUNDED,
    "test_fsdp.py::test_workers_have_the_memory_of_one_layer": _NO_MEMORY,
    "test_fsdp.py::test_freed_parameters_cannot_be_read": _NO_MEMORY,
    "test_fsdp.py::test_the_memory_is_freed_with_the_model": _NO_MEMORY,
    "test_module_placement.py::test_parameters_outside_the_plan_train_on_workers[{'fused': True}]": _NO_FUSED,
    "test_module_placement.py::test_remote_calls_accept_a_placed_module": _NEEDS_MODULE,
    "test_module_placement.py::test_remote_calls_accept_a_module_before_its_first_call": _NEEDS_MODULE,
    **{
        f"test_random_numbers.py::test_random_numbers_of_other_dtypes_match_a_single_process[{mesh}-{dtype}]": (
            "torch 2.9 draws other numbers of 16 bits than 2.13"
        )
        for mesh in ("2", "3")
        for dtype in ("dtype1", "dtype2")
    },
    "test_random_numbers.py::test_gumbel_softmax": "XLA's softmax of the same numbers rounds otherwise",
    "test_remote_call.py::test_module_trains_on_workers_and_controller": (
        "the module has hooks of a torch that the worker has not"
    ),
    "test_remote_call.py::test_function_on_workers_cannot_be_a_controller": (
        "torch 2.9 has no part of a controller at all"
    ),
    "test_remote_call.py::test_pipeline_schedule_runs_in_a_function": (
        "the ranks' messages of torch 2.9's PipelineStage do not match"
    ),
    "test_remote_call.py::test_custom_autograd_function_works": _NEEDS_MODULE,
    "test_remote_call.py::test_data_loader_on_the_workers": _NEEDS_MODULE,
    "test_remote_call.py::test_a_sharded_sampler_on_a_mesh_of_two_dimensions": _NEEDS_MODULE,
    **{
        f"test_training_steps.py::test_optimizers[{kind}-fused]": _NO_FUSED
        for kind in ("SGD0", "SGD1", "Adam2", "AdamW3", "Adagrad4")
    },
    "test_training_steps.py::test_fused_step_changes_state_in_place": _NO_FUSED,
    "test_training_steps.py::test_fused_step_with_padded_gradients": _NO_FUSED,
    **{
        f"test_training_steps.py::test_overflow_in_one_shard_skips_the_step_on_all[{mesh}-fused]": _NO_FUSED
        for mesh in ("2", "3", "2x2")
    },
    **{
        f"test_training_steps.py::test_gradients_are_clipped[{mesh}-True-{norm}]": _NO_FOREACH
        for mesh in ("2", "3", "2x2")
        for norm in ("2.0", "1.0", "inf")
    },
    **{
        f"test_training_steps.py::test_gradients_on_several_meshes_are_clipped_by_one_norm[True-{norm}]": _NO_FOREACH
        for norm in ("2.0", "1.0", "inf")
    },
    "test_replicate_fallback.py::test_write_into_a_gathered_view_changes_the_tensor": ("zeros where unfold() has gaps"),
}
"""Tests that fail on XLA, with the reason. A key names a whole test or one of its parametrizations.

The reason says what torch_xla, or the torch release that it needs, does differently.
"""


def choose(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that run on XLA devices, and mark those in CANNOT as expected failures."""
    by_test: dict[tuple[str, str], list[pytest.Item]] = {}
    for each in items:
        if _uses_workers(each):
            by_test.setdefault((str(each.path), names_of(each)[0]), []).append(each)
    chosen = {id(each) for kinds in by_test.values() for each in _some(kinds)}
    for each in items:
        reason = next((CANNOT[name] for name in names_of(each) if name in CANNOT), None)
        if reason is not None and id(each) in chosen:
            each.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    return [each for each in items if id(each) in chosen]


def _some(kinds: list[pytest.Item]) -> list[pytest.Item]:
    """Return the first PER_TEST parametrizations in the order last, first, second and so on, and those in ALWAYS."""
    ordered = [*kinds[-1:], *kinds[:-1]]
    return [each for i, each in enumerate(ordered) if i < PER_TEST or names_of(each)[1] in ALWAYS]


def names_of(item: pytest.Item) -> tuple[str, str]:
    """Return the name of the test without and with its parameters."""
    name = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
    return name.partition("[")[0], name


def _uses_workers(item: pytest.Item) -> bool:
    if item.get_closest_marker("xla") is not None:
        return True
    if item.path.name in _ELSEWHERE or names_of(item)[0] in _TOO_LONG or not isinstance(item, pytest.Function):
        return False
    return bool(_FIXTURES & set(item.fixturenames)) or "all_procs" in item._fixtureinfo.argnames
