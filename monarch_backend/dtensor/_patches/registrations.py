"""Manifest of the entries that a controller of DTensors and its workers make in torch's tables.

manifest.py has the replaced names. The rows here describe what the named modules register; they are not applied.
``CONTROLLER`` is for the process with the meshes, ``WORKER`` for the processes with the shards.
"""

from __future__ import annotations

import functools

from monarch_backend._core.patches import Kind, Moment, Registration, Release, Scope
from monarch_backend.dtensor._patches import releases

_HERE = "monarch_backend.dtensor._patches"
_SEMANTICS, _FIXES = f"{_HERE}.semantics", f"{_HERE}.fixes"
_OPS = "monarch_backend.dtensor._ops"
_SHARDINGS = f"{_FIXES}.sharding_fixes"

_DISPATCHER = "torch.distributed.tensor:DTensor._op_dispatcher"
_HANDLERS = (f"{_DISPATCHER}._custom_op_handlers",)
_STRATEGIES = f"{_DISPATCHER}.sharding_propagator.op_strategy_funcs"
_RULES = f"{_DISPATCHER}.sharding_propagator.op_single_dim_strategy_funcs"
_OLD_RULES = f"{_DISPATCHER}.sharding_propagator.op_to_rules"
_SCHEMAS = f"{_DISPATCHER}.sharding_propagator.op_to_schema_info"
_SCHEMAS_OF_RULES = f"{_DISPATCHER}.sharding_propagator.op_to_schema_info_for_single_dim_strategy"
_C10D = "torch.distributed.distributed_c10d"
_BUILDER = "torch._dynamo.variables.builder"


def _row(
    kind: Kind, scope: Scope, tables: tuple[str, ...], entries: tuple[str, ...] | str, by: str, why: str, test: str,
    *, at: Moment = "first mesh", since: Release = releases.CONTROLLER,
    before: Release | None = None, like: tuple[str, ...] = (),
) -> Registration:  # fmt: skip
    return Registration(tables, entries, by, at, scope, kind, why, f"tests/dtensor/{test}", since, before, like)


_of_meshes = functools.partial(_row, "semantics", "controller mesh")
_of_process = functools.partial(_row, "semantics", "process")
_fix = functools.partial(_row, "fix", "process")

_GPU = "devices/test_gpu_meshes.py"
_XLA = "devices/test_xla_meshes.py"
_FACTORY_TEST = f"{_GPU}::test_a_program_makes_tensors_by_their_device"

_KERNELS = (
    _fix(
        ("dispatch key AutogradCPU",), f"{_FIXES}.composite_ops:KERNELS", f"{_FIXES}.composite_ops",
        "Operators made of others need a check of values, or other parts. Plain tensors get torch's own decomposition.",
        "dispatch/test_deferred_checks.py::test_one_hot_of_negative_numbers",
    ),
    _of_process(
        ("dispatch key Negative",), f"{_SEMANTICS}.per_rank_int_operands:OPERATORS",
        f"{_SEMANTICS}.per_rank_int_operands",
        "A number that differs by rank has the key of a negation. Negated tensors are resolved, as by torch.",
        "controller/test_per_rank_int.py::test_numbers_of_each_rank_are_calculated_with_on_workers_only",
    ),
    _of_process(
        ("dispatch key CUDA", "dispatch key XLA"), f"{_SEMANTICS}.device_queries:FACTORIES",
        f"{_SEMANTICS}.device_queries",
        "A factory with a device that only workers have makes the tensor there. Not if this process has such a device.",
        _FACTORY_TEST, at="first mesh of GPUs or XLA",
    ),
    _fix(
        ("dispatch key Meta",),
        (
            "aten::_fused_sgd_", "aten::_fused_sgd_.tensor_lr", "aten::_fused_adagrad_",
            "aten::_fused_adagrad_.tensor_lr",
        ),
        f"{_SEMANTICS}.device_queries",
        "torch has no shapes for fused optimizers, which only change values.",
        f"{_XLA}::test_shapes_that_torch_finds_on_the_device_only", at="first mesh of GPUs or XLA",
    ),
    _of_process(
        ("dispatch key AutocastCUDA",), f"{_SEMANTICS}.autocast:operators(cuda)", f"{_SEMANTICS}.autocast",
        "C++ decides by where it has a tensor, which for a remote one is the CPU. They replace torch's kernels.",
        f"{_GPU}::test_autocast_casts_for_each_operator", at="first autocast",
    ),
    _of_process(
        ("dispatch key AutocastXLA",), f"{_SEMANTICS}.autocast:operators(xla)", f"{_SEMANTICS}.autocast",
        "torch_xla has the rules, which a controller without it needs, too.",
        f"{_XLA}::test_autocast_matches_torch_xla", at="first autocast",
    ),
    _of_process(
        ("dispatch key AutocastXLA",), ("fallback",), f"{_SEMANTICS}.autocast",
        "Operators without a rule pass. Not if this process has torch_xla.",
        f"{_XLA}::test_autocast_matches_torch_xla", at="first autocast",
    ),
)  # fmt: skip

_FAKES = (
    _of_meshes(
        ("shapes of fake tensors",), ("_dtensor::shard_dim_alltoall",), f"{_SEMANTICS}.rank_functions",
        "torch asks for this process's rank to find the result's shape.",
        "ops/test_operations.py::test_redistribution_from_any_placement_to_any",
    ),
    _fix(
        ("shapes of fake tensors",), ("aten::_grouped_mm",), f"{_FIXES}.grouped_mm",
        "torch's meta function refuses float32 and float16, which its kernels accept.",
        "ops/test_sharding_fixes.py::test_grouped_mm_of_float32_has_a_single_process_values", before=(2, 15),
    ),
    _of_meshes(
        ("operators", "shapes of fake tensors", "dispatch key CPU"), ("monarch_backend::by_rank",),
        "monarch_backend.dtensor._per_rank.per_rank_op",
        "A new operator: a traced function whose result differs by rank.",
        "compile/test_compile.py::test_each_rank_has_its_own_numbers",
    ),
    _of_meshes(
        ("operators", "shapes of fake tensors"), ("monarch_backend::draw",),
        "monarch_backend.dtensor._rng.traced_random_op",
        "Draws random numbers in a trace. Each worker draws those of its shard.",
        "compile/test_compile.py::test_random_numbers_are_those_of_a_single_process",
    ),
)  # fmt: skip

_SETTINGS = (
    _of_process(
        ("torch._C",), ("_set_dtensor_allow_implicit_replication",), f"{_HERE}.installation",
        "A tensor of this process beside DTensors is the same on all ranks. DTensors of other meshes accept one, too.",
        "controller/test_host_tensors.py::test_running_values_of_a_norm_that_stays_here",
    ),
    _of_process(
        ("torch._C",), ("_set_only_lift_cpu_tensors",), f"{_SEMANTICS}.device_queries",
        "`torch.tensor(1.0, device=...)` makes the tensor here; then it is sent.",
        _FACTORY_TEST, at="first mesh of GPUs or XLA",
    ),
    _of_process(
        ("torch._C",), ("_ensureCUDADeviceGuardSet",), f"{_SEMANTICS}.device_queries",
        "A program may name a GPU as the current device, although there is none here to switch to.",
        f"{_GPU}::test_streams_and_events_have_nothing_to_wait_for", at="first mesh of GPUs or XLA",
    ),
    _of_process(
        ("torch._C",), ("_dispatch_tls_set_dispatch_key_included",), f"{_SEMANTICS}.autocast",
        "The autocast keys are included for the rest of the thread; torch excludes them where an autocast ends.",
        f"{_GPU}::test_autocast_casts_for_each_operator", at="first autocast",
    ),
    _of_process(
        ("device modules",), ("xla",), f"{_SEMANTICS}.device_queries",
        "torch.xla is a module of a controller, for programs that ask for it by a device's name. Not beside torch_xla.",
        f"{_XLA}::test_a_captured_step_leaves_ways_between_devices_to_eager_code", at="first mesh of GPUs or XLA",
    ),
)  # fmt: skip

_GROUPS = (
    _of_process(
        tuple(
            f"{_C10D}:{table}"
            for table in ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag", "_tags_to_pg")
        ),
        ("monarch_backend.dtensor._controller.controller_process_group:*", "ptd:*"),
        "monarch_backend.dtensor._torch_internals.c10d_registry",
        "Meshes of a controller have groups of their ranks. All workers are the default group of torch.distributed.",
        "controller/test_device_mesh.py::test_each_process_has_its_part_of_three_dimensions",
    ),
    _of_meshes(
        ("torch.distributed._local_tensor:_PROCESS_LOCAL_TENSOR_MODE",),
        ("monarch_backend.dtensor._controller.controller_mesh:_Mode",),
        f"{_HERE}.installation",
        "torch looks there for the mode with which it runs a function once for each rank.",
        "ops/test_operations.py::test_shards_of_unequal_sizes_are_of_one_tensor",
    ),
)  # fmt: skip

_OPERATOR_HANDLERS = (
    _of_process(
        _HANDLERS, ("aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.equal.default"),
        f"{_HERE}.installation",
        "A value is that of the whole tensor, not of a rank's shard. On other meshes it is the local tensor's.",
        "ops/test_operations.py::test_values_read_by_the_controller_match_torch",
    ),
    _of_meshes(
        _HANDLERS, "monarch_backend.dtensor._rng.random_ops:handlers", f"{_HERE}.installation",
        "Each worker draws its part of a single process' random numbers.",
        "ops/test_random_numbers.py::test_inplace_random_fills_match_a_single_process",
    ),
    _of_meshes(
        _HANDLERS, f"{_OPS}.convolution:HANDLERS", f"{_HERE}.installation",
        "torch sends rows to neighbours from this rank; the workers have any placement.",
        "ops/test_convolution.py::test_convolution_of_any_placement_matches_torch",
    ),
    _of_meshes(
        _HANDLERS, f"{_OPS}.grad_scaler:HANDLERS", f"{_HERE}.installation",
        "Whether gradients are finite is decided by all ranks.",
        f"{_GPU}::test_the_loss_is_scaled_and_what_overflows_is_not_done",
    ),
    _of_meshes(
        _HANDLERS, f"{_OPS}.normalization:HANDLERS", f"{_HERE}.installation",
        "torch has no shardings for batches and groups that are normalised.",
        "ops/test_normalization.py::test_norm_layers_of_a_sharded_batch_match_a_single_process",
    ),
    _of_meshes(
        _HANDLERS, f"{_OPS}.fused_optimizers:HANDLERS", f"{_HERE}.installation",
        "A fused step of an optimizer runs on each worker's shards.", f"{_GPU}::test_optimizers",
    ),
    _fix(
        _HANDLERS, f"{_OPS}.decomposed_losses:HANDLERS", f"{_HERE}.installation",
        "torch runs losses on shards with a shard's count, and has no shardings for shifts and index_add_.",
        "ops/test_losses.py::test_losses_match_a_single_process",
    ),
    _fix(
        _HANDLERS, ("aten.argmin.default", "aten.argmax.default"), _SHARDINGS,
        "torch compares a negative dimension with sharded ones, and asks ranks without elements.",
        "ops/test_sharding_fixes.py::test_dimensions_are_counted_from_the_end",
    ),
    _of_meshes(
        _HANDLERS, ("aten.as_strided.default",), _SHARDINGS,
        "torch has views by strides of whole tensors only.",
        "ops/test_replicate_fallback.py::test_values",
    ),
    _fix(
        _HANDLERS, f"{_SHARDINGS}:BY_INDICES", _SHARDINGS,
        "torch finds no mesh where only the indices of a host tensor are DTensors.",
        "controller/test_host_tensors.py::test_sums_of_a_programs_own", before=(2, 12),
    ),
    _fix(
        _HANDLERS, f"{_SHARDINGS}:BY_ONE_NUMBER", _SHARDINGS,
        "torch decides by the first tensor of a list whether the number may be a sum over ranks.",
        "ops/test_replicate_fallback.py::test_a_list_by_one_number_that_is_a_sum_over_ranks",
    ),
    _of_process(
        _HANDLERS, f"{_FIXES}.embedding_mask:MASKED", _SHARDINGS,
        "Rows that a rank lacks are 0 at once on a controller's mesh. torch's way has one mask for all dimensions.",
        "ops/test_sharding_fixes.py::test_rows_of_a_sharded_table_by_an_index_of_any_dimensions",
    ),
    _fix(
        ("torch.distributed.tensor.parallel.loss:customized_loss_ops",),
        (
            "aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default", "aten.nll_loss_forward.default",
            "aten.nll_loss2d_forward.default",
        ),
        _SHARDINGS,
        "`loss_parallel` looks up weights of ignored labels, and its exit would remove our handlers.",
        "ops/test_losses.py::test_loss_parallel_with_weights_and_ignored_labels",
    ),
)  # fmt: skip

_NO_DIMENSIONS = "An empty list of dimensions means all of them, and a rank without elements has no largest value."
_NO_DIMENSIONS_TEST = "ops/test_sharding_fixes.py::test_reductions_of_no_dimensions"
_NORMS = (
    "aten.linalg_vector_norm.default", "aten.norm.Scalar", "aten.linalg__powsum.default", "aten._foreach_norm.Scalar",
)  # fmt: skip
_NORM = "Norms of the ranks' parts, and largest values of parts of a sum, cannot be reduced as torch does."
_NORM_TEST = "ops/test_normalization.py::test_norms_over_sharded_dimensions_match_torch"

_STRATEGIES_OF_OPERATORS = (
    _fix(
        (_STRATEGIES, _RULES, _SCHEMAS), f"{_OPS}.sharding_rules:OPERATORS", f"{_OPS}.sharding_rules",
        "Sharding strategies of operators that torch lacks or has wrong, by its `register_sharding`.",
        "ops/test_sharding_fixes.py::test_attention_with_a_mask",
    ),
    _fix(
        (_STRATEGIES, _RULES, _SCHEMAS, _SCHEMAS_OF_RULES), ("aten._foreach_copy_.default",),
        "monarch_backend.dtensor._torch_internals.sharding_tables",
        "torch has no sharding for the copy of a list.",
        "ops/test_replicate_fallback.py::test_foreach_changes_of_rows_of_one_tensor",
    ),
    _fix(
        (_STRATEGIES,), (), _SHARDINGS, _NO_DIMENSIONS, _NO_DIMENSIONS_TEST,
        like=("aten.sum.dim_IntList", "aten.var.correction"), before=(2, 14),
    ),
    _fix(
        (_RULES,), ("aten.logsumexp.default",), f"{_FIXES}.sharding_rule_fixes", _NO_DIMENSIONS, _NO_DIMENSIONS_TEST,
        like=("aten.sum.dim_IntList", "aten.var.correction", "aten.mean.dim"), since=(2, 14),
    ),
    _fix(
        (_STRATEGIES,), (*_NORMS, "aten._foreach_max.default", "aten._foreach_powsum.Scalar"), _SHARDINGS, _NORM,
        _NORM_TEST, before=(2, 14),
    ),
    _fix((_RULES,), _NORMS, f"{_FIXES}.sharding_rule_fixes", _NORM, _NORM_TEST, since=(2, 14)),
    _fix(
        (_STRATEGIES,), ("aten.logsumexp.default",), _SHARDINGS,
        "torch gets the dimensions of a number wrong.", "ops/test_sharding_fixes.py::test_dimensions_of_a_number",
        before=(2, 14),
    ),
    _fix(
        ("torch.distributed.tensor._ops._math_ops:LINEAR_REDUCTION_OP_MAP", _STRATEGIES),
        ("aten.any.default", "aten.any.dim", "aten.any.dims"), _SHARDINGS,
        "torch takes the sum of bools, which as a float is 2 where two ranks have one.",
        "ops/test_operations.py::test_any_and_all_over_ranks", before=(2, 14),
    ),
    _fix(
        (_STRATEGIES, _RULES), ("aten.empty_like.default",), _SHARDINGS,
        "A tensor without values cannot be a part of a sum.", "ops/test_losses.py::test_fill_into_a_partial_sum",
    ),
    _fix(
        (_STRATEGIES, _RULES), ("aten.gather.default",), _SHARDINGS,
        "Rows of an index belong to the same rows of the input, which may be more.",
        "ops/test_sharding_fixes.py::test_gathering_fewer_rows_than_there_are",
    ),
    _fix(
        (_STRATEGIES,), ("aten.cat.default",), _SHARDINGS,
        "An empty tensor of one dimension beside others has no dimension to shard alike.",
        "compile/test_compile.py::test_an_empty_tensor_of_the_step_begins_a_cat", before=(2, 14),
    ),
    _fix(
        (_STRATEGIES,), ("aten.select_backward.default", "aten.slice_backward.default"), _SHARDINGS,
        "torch compares a negative dimension with sharded ones.",
        "ops/test_sharding_fixes.py::test_gradients_of_dimensions_counted_from_the_end", before=(2, 14),
    ),
    _fix(
        (_STRATEGIES,),
        ("aten.div.Tensor", "aten.div_.Tensor", "aten.div.Tensor_mode", "aten.div_.Tensor_mode"), _SHARDINGS,
        "Quotients of parts of a sum are not parts of the quotient.",
        "ops/test_operations.py::test_pointwise_reduced_and_normalised", before=(2, 12),
    ),
    _fix(
        (_STRATEGIES,), ("aten._to_copy.default",), _SHARDINGS,
        "The integers of parts of a sum have another sum, and bools none.",
        "ops/test_sharding_fixes.py::test_parts_of_a_sum_are_reduced_before_a_cast_to_integers", before=(2, 12),
    ),
    _fix(
        (_STRATEGIES,), ("aten.index_put.default", "aten._index_put_impl_.default"), _SHARDINGS,
        "torch shards dimensions that have an index, and refuses None among the indices.",
        "ops/test_sharding_fixes.py::test_rows_written_by_an_index_match_torch", before=(2, 12),
    ),
    _fix(
        (_OLD_RULES,), ("aten.index.Tensor", "aten.index_select.default"), _SHARDINGS,
        "torch loses the sum of values that are parts of a sum where the result is sharded.",
        "ops/test_sharding_fixes.py::test_rows_of_a_sum_over_ranks_match_torch", before=(2, 12),
    ),
    _fix(
        (_STRATEGIES,), ("aten.detach_.default",), _SHARDINGS,
        "torch has no sharding for `detach_`.", "ops/test_replicate_fallback.py::test_values", before=(2, 13),
    ),
    _fix(
        (_STRATEGIES, _RULES), ("aten.embedding_dense_backward.default",), _SHARDINGS,
        "A rank cannot count the lookups of a row alone, by which the gradient may be divided.",
        "ops/test_sharding_fixes.py::test_the_gradient_of_rows_that_were_looked_up",
    ),
    _fix(
        (_RULES,), ("aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default"), _SHARDINGS,
        "torch takes a mask of several dimensions for one dimension.",
        "ops/test_sharding_fixes.py::test_write_into_rows_of_several_ranks", since=(2, 12),
    ),
    _fix(
        (_STRATEGIES, _SCHEMAS),
        (
            "aten.view.default", "aten.view_copy.default", "aten._unsafe_view.default", "aten.reshape.default",
            "aten.transpose.int",
        ),
        _SHARDINGS,
        "torch's map of dimensions does not end for a tensor of size 0, and raises for the transpose of a number.",
        "ops/test_replicate_fallback.py::test_views_of_nothing",
    ),
    _fix(
        ("torch.distributed.tensor._ops._view_ops:dim_maps",), ("view", "reshape", "transpose"), _SHARDINGS,
        "torch's map of dimensions does not end for a tensor of size 0, and raises for the transpose of a number.",
        "ops/test_replicate_fallback.py::test_views_of_nothing",
    ),
    _fix(
        (_SCHEMAS,), ("aten.view.dtype",), _SHARDINGS,
        "torch's cache of shardings has one result for all dtypes.",
        "ops/test_replicate_fallback.py::test_the_same_bytes_in_several_dtypes",
    ),
)  # fmt: skip

_REMOTE = "monarch_backend.dtensor._controller.remote_tensor:RemoteTensor"
_TRACES = (
    _of_process(
        (f"{_BUILDER}:VariableBuilder._type_dispatch_impl",), (_REMOTE, "torch.distributed.tensor:DTensor"),
        f"{_SEMANTICS}.graph_inputs",
        "A graph breaks at an input whose sizes differ by rank. Other DTensors are taken as tensors, as by torch.",
        "compile/test_compile.py::test_shards_of_unequal_sizes", at="first trace", since=releases.CAPTURED,
    ),
    _of_meshes(
        (f"{_BUILDER}:VariableBuilder._type_dispatch_impl", f"{_BUILDER}:SourcelessBuilder._type_handlers"),
        ("torch:SymInt",), f"{_SEMANTICS}.graph_inputs",
        "A number that differs by rank is no input of a graph.",
        "compile/test_compile.py::test_the_number_of_the_rank", at="first trace", since=releases.CAPTURED,
    ),
    _of_meshes(
        ("torch._dynamo.config:traceable_tensor_subclasses",), (_REMOTE,), f"{_SEMANTICS}.graph_inputs",
        "Dynamo asks a class with a `__torch_dispatch__` for inner tensors, which a remote tensor lacks.",
        "controller/test_module_placement.py::test_captured_steps_accept_a_placed_module",
        at="first trace", since=releases.CAPTURED,
    ),
    _of_meshes(
        ("torch._dynamo.trace_rules:SKIP_DIRS",), ("monarch_backend",), f"{_HERE}.trace_installation",
        "Our modules are not captured, except replacements of torch's functions.",
        "compile/test_compile.py::test_a_trace_for_another_backend_installs_what_it_needs",
        at="first trace", since=releases.CAPTURED,
    ),
    _of_process(
        ("code that dynamo skips",),
        (
            "torch.distributed.device_mesh", "torch.distributed.tensor._api",
            "torch.distributed.tensor._collective_utils", "torch.distributed.tensor._dispatch",
            "torch.distributed.tensor._redistribute", "torch.distributed.tensor._utils",
            "torch.distributed.tensor.placement_types",
        ),
        f"{_HERE}.trace_installation",
        "Code of DTensors is not compiled where it runs eagerly, after a graph break. In a trace it is traced.",
        "compile/test_compile.py::test_shards_of_unequal_sizes", at="first trace", since=releases.CAPTURED,
    ),
    _of_meshes(
        ("entry points torch_dynamo_backends",), ("monarch",), "monarch_backend.dtensor._compile.compile_backend",
        '`torch.compile(backend="monarch")` compiles on the workers.',
        "compile/test_compile.py::test_inductor_compiles_on_the_workers", at="first trace", since=releases.CAPTURED,
    ),
)  # fmt: skip

CONTROLLER = (
    *_KERNELS, *_FAKES, *_SETTINGS, *_GROUPS, *_OPERATOR_HANDLERS, *_STRATEGIES_OF_OPERATORS, *_TRACES,
)  # fmt: skip

WORKER = (
    _of_process(
        ("dispatch key CUDA", "dispatch key XLA"),
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        "monarch_backend.dtensor._worker.attention",
        "Commands have the CPU's operator for attention, because C++ has remote tensors on the CPU.",
        f"{_GPU}::test_a_gpus_worker_knows_the_operators", at="start of a worker", since=releases.WORKER,
    ),
)  # fmt: skip
