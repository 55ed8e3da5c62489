"""Manifest of the names of torch that are replaced for DTensors of a controller.

``MESH`` is applied with the first mesh of a process, ``COMPILE`` with the first trace by torch.compile. A replacement
calls torch's own object for meshes that are not a controller's. ``WORKER_XLA`` is for workers with XLA devices,
``WORKER_INDUCTOR`` for workers that compile. registrations.py has the entries in torch's tables.

docs/reference/torch-patches.md is generated from these rows: ``python -m monarch_backend.dtensor._patches.manifest``.
With ``--check`` it prints the rows that the running torch does not match.
"""

from __future__ import annotations

import functools
import sys

from monarch_backend._core.patches import Feature, Kind, Patch, Release, unmatched
from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor._patches import releases

_HERE = "monarch_backend.dtensor._patches"
_SEMANTICS, _FIXES, _CACHES = f"{_HERE}.semantics", f"{_HERE}.fixes", f"{_HERE}.caches"
_DISPATCHER = f"{_HERE}.op_dispatcher"
_DEVICES = f"{_SEMANTICS}.device_queries"
_SEEDS = f"{_SEMANTICS}.device_modules"
_FSDP_MAKERS = f"{_SEMANTICS}.fsdp"
_SHARDINGS = f"{_FIXES}.sharding_fixes"
_XLA_MAKERS = "monarch_backend.dtensor._worker.xla"
_CONTROLLER = "monarch_backend.dtensor._controller"

_TENSOR = "torch.distributed.tensor"
_MESH = "torch.distributed.device_mesh:DeviceMesh"
_DTENSOR = f"{_TENSOR}._api:DTensor"
_FSDP = "torch.distributed.fsdp._fully_shard"
_DYNAMO = "torch._dynamo.variables"
_AOT = "torch._functorch._aot_autograd.runtime_wrappers"


def _row(
    kind: Kind, target: str, maker: str, why: str, test: str,
    *, swaps_code: bool = False, since: Release = releases.CONTROLLER,
    before: Release | None = None, upstream: str = "none",
) -> Patch:  # fmt: skip
    return Patch(target, kind, (maker,), why, f"tests/dtensor/{test}", since, before, upstream, swaps_code)


_semantics = functools.partial(_row, "semantics")
_fix = functools.partial(_row, "fix", upstream="not reported")
_cache = functools.partial(_row, "cache")


_MESHES = (
    _semantics(
        f"{_MESH}.__new__", f"{_CONTROLLER}.controller_mesh:make_mesh",
        "A mesh of a controller's ranks is of a subclass, which has ranks and coordinates of all processes.",
        "controller/test_device_mesh.py::test_each_process_has_its_part_of_three_dimensions",
    ),
    _semantics(
        "torch.distributed.device_mesh:_get_device_handle", f"{_SEEDS}:_handle",
        "FSDP's streams and events are those of a device that is not here; and there is no module torch.xla.",
        "training/test_fsdp.py::test_a_mesh_of_gpus_needs_none_here", swaps_code=True,
    ),
)  # fmt: skip

_RANKS = (
    _semantics(
        "torch.distributed.distributed_c10d:_new_group_with_tag", f"{_SEMANTICS}.rank_functions:_no_new_group",
        "A new group waits in the store for other ranks, which are not here.",
        "controller/test_usage_errors.py::test_new_group_names_the_release_that_has_it", before=(2, 13),
    ),
    _semantics(
        "torch.distributed._local_tensor:_for_each_rank_run_func", f"{_SEMANTICS}.rank_functions:_for_each_rank",
        "A function that torch runs once for each rank runs on the workers, or once if all ranks are alike.",
        "ops/test_operations.py::test_shards_of_unequal_sizes_are_of_one_tensor",
    ),
    _semantics(
        f"{_TENSOR}._utils:_compute_local_shape_and_global_offset", f"{_SEMANTICS}.rank_functions:_local_shape",
        "The shard of each rank has its own shape and offset.",
        "controller/test_checkpoint.py::test_each_worker_writes_its_shard_and_no_other",
    ),
    _semantics(
        "torch.distributed.distributed_c10d:get_rank", f"{_SEMANTICS}.rank_functions:_rank_in",
        "A group of a controller has a rank for each process.",
        "patches/test_torch_internals.py::test_the_controllers_tensor_is_each_ranks", swaps_code=True,
    ),
    _semantics(
        "torch.distributed.distributed_c10d:broadcast_object_list", f"{_SEMANTICS}.rank_functions:_broadcast_objects",
        "The controller's objects are those of all ranks.",
        "controller/test_host_collectives.py::test_objects_of_the_controller_are_each_ranks", swaps_code=True,
    ),
    _semantics(
        "torch.distributed._functional_collectives:_maybe_wrap_tensor", f"{_SEMANTICS}.rank_functions:_wrap",
        "Workers wait for a collective when its result is used.",
        "dispatch/test_collectives.py::test_functional_collective_of_workers_tensors_has_wait",
    ),
)  # fmt: skip

_DTENSORS = (
    _semantics(
        f"{_DTENSOR}.__bases__", f"{_SEMANTICS}.dtensor_methods:with_methods",
        "A base class with the methods that act on a tensor's device, values or memory, or on rows of it.",
        "ops/test_regressions.py::test_copies_are_on_the_same_processes_and_pickles_are_refused",
    ),
    _semantics(
        f"{_DTENSOR}._op_dispatcher.__class__", f"{_DISPATCHER}:dispatcher",
        "A subclass of OpDispatcher: operators without a sharding, views that are copies, repeated plans.",
        "ops/test_replicate_fallback.py::test_values",
    ),
    _semantics(
        f"{_DTENSOR}._op_dispatcher.sharding_propagator.__class__", f"{_DISPATCHER}:propagator",
        "A subclass of ShardingPropagator: sizes that differ by slice are propagated for each slice.",
        "dispatch/test_shapes_per_slice.py::test_operations",
    ),
    _semantics(
        f"{_DTENSOR}.__init__", f"{_SEMANTICS}.dtensor_api:_made",
        "C++ that asks a controller's DTensor for its memory gets an error.",
        "patches/test_torch_internals.py::test_a_dtensor_is_made_by_new_alone",
    ),
    _semantics(
        f"{_DTENSOR}.from_local", f"{_SEMANTICS}.dtensor_api:_from_local",
        "The local tensor is each worker's; a tensor of the controller is sent.",
        "controller/test_rank0_helpers.py::test_error_for_a_plain_loss_with_a_dtensor_has_a_remedy",
    ),
    _semantics(
        f"{_TENSOR}._api:_ToTorchTensor.backward", f"{_SEMANTICS}.dtensor_api:_of_a_plain_gradient",
        "A DTensor as the gradient of a plain tensor is an error; later releases call from_local.",
        "controller/test_rank0_helpers.py::test_error_for_a_plain_loss_with_a_dtensor_has_a_remedy", before=(2, 12),
    ),
    _semantics(
        f"{_DTENSOR}.to_local", f"{_SEMANTICS}.dtensor_api:_to_local",
        "Notes the shard on the local tensor, because random operations draw the shard's part.",
        "ops/test_random_numbers.py::test_plain_shards_draw_their_part_of_a_single_process_numbers",
    ),
    _semantics(
        f"{_DTENSOR}.redistribute", f"{_SEMANTICS}.dtensor_api:_on_its_mesh",
        "Another mesh is an error, which torch finds only where placements differ.",
        "controller/test_device_mesh.py::test_tensors_of_other_meshes_are_refused",
    ),
    _semantics(
        f"{_DTENSOR}.__repr__", f"{_SEMANTICS}.dtensor_api:_repr",
        "The text has the values of the whole tensor.",
        "controller/test_repr.py::test_values_are_printed_as_torch_prints_them",
    ),
    _semantics(
        f"{_TENSOR}._api:distribute_tensor", f"{_SEMANTICS}.dtensor_api:_distribute",
        "Each worker is sent its shard; torch broadcasts from a rank.",
        "controller/test_host_tensors.py::test_each_worker_is_sent_its_shard_and_no_other", swaps_code=True,
    ),
    _semantics(
        f"{_TENSOR}._api:distribute_module", f"{_SEMANTICS}.dtensor_api:_distribute_module",
        "Tied parameters stay tied.",
        "controller/test_module_placement.py::test_tied_weights_stay_tied", swaps_code=True,
    ),
    _semantics(
        f"{_TENSOR}.parallel.api:parallelize_module", f"{_SEMANTICS}.parallel_modules:_parallelize",
        "Parameters that no plan names go to the workers at the first call.",
        "controller/test_module_placement.py::test_parameters_outside_the_plan_train_on_workers", swaps_code=True,
    ),
    _semantics(
        f"{_TENSOR}._api:compute_global_tensor_info", f"{_SEMANTICS}.dtensor_api:_whole_of_shards",
        "A whole has the sizes of all ranks' shards; torch multiplies one rank's.",
        "ops/test_operations.py::test_shards_of_no_tensor_are_refused",
    ),
    _semantics(
        f"{_TENSOR}._api:_dtensor_init_helper", f"{_SEMANTICS}.dtensor_api:_init_helper",
        "Factories make shards on the workers, with a single process' random numbers.",
        "ops/test_random_numbers.py::test_factories",
    ),
    _cache(
        f"{_TENSOR}._redistribute:redistribute_local_tensor", f"{_CACHES}.redistribute_cache:_redistribute",
        "torch plans a redistribution anew in 60 us each time; and has no way between kinds of partial values.",
        "dispatch/test_redistribute_cache.py::test_repeated_redistribution_gives_the_values_of_torch", swaps_code=True,
    ),
    _cache(
        f"{_TENSOR}._dtensor_spec:DTensorSpec.__init__", f"{_CACHES}.scalar_spec_cache:_made",
        "torch checks the spec of a number beside a DTensor in 12 us each time.",
        "dispatch/test_redispatch_cache.py::test_a_spec_of_a_number_has_what_torch_gives_it",
    ),
    _cache(
        f"{_TENSOR}._dtensor_spec:DTensorSpec.__eq__", f"{_CACHES}.scalar_spec_cache:_equal",
        "Specs with the same fields are equal without seven calls of functions.",
        "dispatch/test_redispatch_cache.py::test_specs_of_other_things_are_torchs_own",
    ),
    _semantics(
        "torch:SymInt.__hash__", f"{_SEMANTICS}.submesh_shapes:_hash",
        "Sizes that differ by slice are keys of torch's caches.",
        "dispatch/test_shapes_per_slice.py::test_operations",
    ),
    _semantics(
        "torch:Tensor.__getitem__", f"{_SEMANTICS}.per_rank_int_operands:_get",
        "C++ makes an IndexError of an index that differs by rank.",
        "controller/test_per_rank_int.py::test_plain_tensors_of_workers_are_indexed_by_each_rank",
    ),
    _semantics(
        "torch:Tensor.__setitem__", f"{_SEMANTICS}.per_rank_int_operands:_set",
        "C++ makes an IndexError of an index that differs by rank.",
        "controller/test_per_rank_int.py::test_plain_tensors_of_workers_are_changed_where_each_rank_is",
    ),
    *(
        _semantics(
            f"{module}:to_dlpack", f"{_SEMANTICS}.dtensor_methods:to_dlpack",
            "C++ reads the memory, which is in other processes.",
            "ops/test_regressions.py::test_memory_can_not_be_shared",
        )
        for module in ("torch", "torch.utils.dlpack")
    ),
)  # fmt: skip

_NUMBER_OPERANDS = (
    Patch(
        "torch:Tensor._wrapped_number", "semantics", (f"{_SEMANTICS}.per_rank_int_operands:wrapped_number",),
        "C++ calculates with a wrong number where one differs by rank, and notes the number here.",
        "tests/dtensor/controller/test_per_rank_int.py::test_numbers_of_each_rank_are_calculated_with_on_workers_only",
        releases.CONTROLLER, adds=True,
    ),
)  # fmt: skip

_FIXES_OF_SHARDINGS = (
    _fix(
        f"{_TENSOR}.placement_types:_MaskPartial._partition_value", f"{_FIXES}.embedding_mask:_partition",
        "A row that no rank has must fail, and rows may be shared unevenly.",
        "ops/test_sharding_fixes.py::test_rows_of_a_table_that_a_rank_has_not",
    ),
    _fix(
        "torch.nn.utils.clip_grad:_get_total_norm", f"{_SEMANTICS}.gradient_lists:_total_norm",
        "Norms of gradients on several meshes cannot be stacked.",
        "training/test_training_steps.py::test_gradients_on_several_meshes_are_clipped_by_one_norm", swaps_code=True,
        upstream="pytorch/pytorch#180346",
    ),
    _fix(
        "torch.nn.utils.clip_grad:_clip_grads_with_norm_", f"{_SEMANTICS}.gradient_lists:_clip_by_norm",
        "Gradients on several meshes cannot be scaled by one call.",
        "training/test_training_steps.py::test_gradients_on_several_meshes_are_clipped_by_one_norm", swaps_code=True,
        upstream="pytorch/pytorch#180501",
    ),
)  # fmt: skip

_CHECKPOINTS = (
    _semantics(
        "torch.distributed.checkpoint.state_dict_saver:_save_state_dict", f"{_SEMANTICS}.checkpoints:_save",
        "Each worker writes its shard.",
        "controller/test_checkpoint.py::test_saved_from_one_mesh_and_loaded_into_any_other_bit_for_bit",
    ),
    _semantics(
        "torch.distributed.checkpoint.state_dict_saver:async_save", f"{_SEMANTICS}.checkpoints:_async_save",
        "Workers write while the controller goes on.",
        "controller/test_checkpoint.py::test_saved_while_the_controller_goes_on", swaps_code=True,
    ),
    _semantics(
        "torch.distributed.checkpoint.state_dict_loader:_load_state_dict", f"{_SEMANTICS}.checkpoints:_load",
        "Each worker reads its shard.",
        "controller/test_checkpoint.py::test_saved_from_one_mesh_and_loaded_into_any_other_bit_for_bit",
    ),
    _semantics(
        "torch.distributed._state_dict_utils:_broadcast_state_dict", f"{_SEMANTICS}.rank0_helpers:_broadcast",
        "A whole state dict is the controller's, which sends each worker its part.",
        "controller/test_rank0_helpers.py::test_a_whole_state_dict_is_the_controllers", swaps_code=True,
    ),
    _semantics(
        "torch.distributed.distributed_c10d:_get_pg_default_device", f"{_SEMANTICS}.rank0_helpers:_device_of_all",
        "Values for a module on meta go to the workers' device.",
        "controller/test_state_dict.py::test_a_module_on_meta_gets_a_whole_state_dict",
    ),
    _semantics(
        "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
        f"{_SEMANTICS}.rank0_helpers:_of_one_rank",
        "DistributedDataParallel is for a program on each rank: an error says so.",
        "controller/test_rank0_helpers.py::test_distributed_data_parallel_error_has_a_remedy",
    ),
)  # fmt: skip

_GPU = "devices/test_gpu_meshes.py"
_STREAMS = "A controller without GPUs has nothing to wait for; workers keep their own streams."
_STREAMS_TEST = f"{_GPU}::test_streams_and_events_have_nothing_to_wait_for"
_NUMBERS = "The generator of GPUs is the controller's, for all workers."
_DEVICE = "The device is the workers' own, which each has set."
_CUDA = (
    _semantics(
        "torch.cuda:_lazy_init", f"{_SEEDS}:_skip_init_on_controller",
        "A device among a function's arguments may be the workers'.",
        f"{_GPU}::test_a_program_makes_tensors_by_their_device",
    ),
    _semantics("torch.cuda:manual_seed", f"{_SEEDS}:_seeding", _NUMBERS, f"{_GPU}::test_random_numbers"),
    _semantics("torch.cuda:manual_seed_all", f"{_SEEDS}:_seeding", _NUMBERS, f"{_GPU}::test_random_numbers"),
    _semantics("torch.cuda:get_rng_state", f"{_SEEDS}:_get_rng_state", _NUMBERS, f"{_GPU}::test_random_numbers"),
    _semantics("torch.cuda:set_rng_state", f"{_SEEDS}:_set_rng_state", _NUMBERS, f"{_GPU}::test_random_numbers"),
    _semantics("torch.cuda:current_stream", f"{_DEVICES}:_the_stream", _STREAMS, _STREAMS_TEST),
    _semantics("torch.cuda:default_stream", f"{_DEVICES}:_the_stream", _STREAMS, _STREAMS_TEST),
    _semantics("torch.cuda.streams:Event.__new__", f"{_DEVICES}:_new", _STREAMS, _STREAMS_TEST),
    _semantics("torch.cuda.streams:Stream.__new__", f"{_DEVICES}:_new", _STREAMS, _STREAMS_TEST),
    _semantics(
        "torch.cuda:synchronize", f"{_DEVICES}:_synchronize",
        "Waits for the workers, which wait for their GPUs.", _STREAMS_TEST,
    ),
    _semantics("torch.cuda:current_device", f"{_DEVICES}:_current_device", _DEVICE, _STREAMS_TEST),
    _semantics("torch.cuda:set_device", f"{_DEVICES}:_set_device", _DEVICE, _STREAMS_TEST),
    _semantics("torch.cuda:_exchange_device", f"{_DEVICES}:_exchange", _DEVICE, _STREAMS_TEST),
    _semantics(
        "torch.cuda:is_bf16_supported", f"{_DEVICES}:_bf16",
        "The workers' GPUs have bfloat16.", f"{_GPU}::test_autocast",
    ),
    _semantics(
        "torch.cuda.amp.common:amp_definitely_not_available", f"{_DEVICES}:_no_amp",
        "A gradient scaler works for the workers' GPUs.",
        f"{_GPU}::test_the_loss_is_scaled_and_what_overflows_is_not_done",
    ),
    _semantics(
        "torch.amp.autocast_mode:autocast.__enter__", f"{_SEMANTICS}.autocast:_enter",
        "C++ decides by where it has a tensor, which for a remote one is the CPU.", f"{_GPU}::test_autocast",
    ),
    _semantics(
        "torch.utils.checkpoint:_get_device_module", f"{_DEVICES}:_device_module",
        "An activation checkpoint keeps the state of the workers' generator.",
        f"{_GPU}::test_an_activation_checkpoint_keeps_the_state_of_the_workers_generator",
    ),
    _semantics(
        "torch.utils._foreach_utils:_group_tensors_by_device_and_dtype",
        f"{_SEMANTICS}.gradient_lists:grouped_by_device",
        "C++ finds remote tensors on the CPU.", f"{_GPU}::test_optimizers", swaps_code=True,
    ),
    *(
        _semantics(
            f"torch.nn.modules.module:Module.{name}", f"{_DEVICES}:_module_{name}",
            "A module goes to the workers by the name of their device.",
            f"{_GPU}::test_a_module_goes_there_by_the_name_of_the_device",
        )
        for name in ("to", "cuda")
    ),
)  # fmt: skip

_HANDLE_TEST = "training/test_fsdp.py::test_a_mesh_of_gpus_needs_none_here"
_ON_WORKERS = "Buffers that FSDP makes are made on the workers."
_FSDP2 = (
    _semantics(
        f"{_FSDP}._fsdp_init:_move_states_to_device", f"{_FSDP_MAKERS}:_move_states",
        "Parameters go to the workers as shards, not to a device of this process.", _HANDLE_TEST,
    ),
    _semantics(
        f"{_FSDP}._fully_shard:_init_param_group", f"{_FSDP_MAKERS}:_init_group",
        "Buffers go to the workers, the state is of a subclass, and groups that torch cannot make are refused.",
        "training/test_fsdp.py::test_buffers_are_changed_on_the_workers",
    ),
    _semantics(
        f"{_FSDP}._fsdp_param_group:FSDPParam", f"{_FSDP_MAKERS}:_param",
        "A subclass of FSDPParam, whose shard is each worker's own.",
        "training/test_fsdp.py::test_three_ranks_of_which_some_have_less_or_nothing", since=releases.FSDP2,
    ),
    _semantics(
        f"{_FSDP}._fsdp_param:_chunk_with_empty", f"{_FSDP_MAKERS}:_chunk",
        "A number that differs by rank takes each rank's chunk.",
        "training/test_fsdp.py::test_each_worker_gets_its_shard_and_no_more",
    ),
    _semantics(
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup", f"{_FSDP_MAKERS}:_group",
        _ON_WORKERS, "training/test_fsdp.py::test_values_are_those_of_a_single_process", since=releases.FSDP2,
    ),
    _semantics(
        f"{_FSDP}._fsdp_collectives:_get_dim0_padded_size", f"{_FSDP_MAKERS}:_padded_size",
        "torch.Size has no count of elements where sizes differ by rank.",
        "training/test_fsdp.py::test_with_tensor_parallelism",
    ),
    _semantics(
        f"{_FSDP}._fsdp_collectives:record_grad_output_stream", f"{_FSDP_MAKERS}:_record_stream",
        "A stream of a controller has no number; workers keep their own.", _HANDLE_TEST, since=(2, 15),
    ),
)  # fmt: skip

CORE = (
    *_MESHES, *_RANKS, *_DTENSORS, *_NUMBER_OPERANDS, *_FIXES_OF_SHARDINGS,
    _semantics(
        "torch._dynamo.convert_frame:ConvertFrameAssert.__call__", f"{_HERE}.first_trace:install_at_first_trace",
        "The rows for traces are applied with the first trace; dynamo takes a second to import.",
        "compile/test_compile.py::test_a_trace_for_another_backend_installs_what_it_needs",
    ),
)  # fmt: skip
"""Rows without which there is no controller; applied with the first mesh."""
CHECKPOINTS = Feature(
    "Saving and loading of a controller's DTensors by torch.distributed.checkpoint", _CHECKPOINTS, releases.CONTROLLER
)
GPUS = Feature("A mesh of GPUs", _CUDA, releases.CONTROLLER)
FSDP2 = Feature("fully_shard on a controller's mesh", _FSDP2, releases.FSDP2)
MESH = (*CORE, *_CHECKPOINTS, *_CUDA, *_FSDP2)
"""Rows that are applied with the first mesh."""

_UNEVEN = "compile/test_compile.py::test_shards_of_unequal_sizes"
_COMPILE = (
    _semantics(
        "torch:_TorchCompileInductorWrapper.__call__", f"{_HERE}.trace_installation:_on_workers",
        "Inductor's code reads memory, so it compiles on the workers.",
        "compile/test_compile.py::test_inductor_compiles_on_the_workers",
    ),
    _fix(
        "torch._subclasses.meta_utils:MetaConverter._backward_error", f"{_SEMANTICS}.graph_inputs:_with_history",
        "DTensor's sharding cache takes no symbols.",
        "compile/test_dynamic_sizes.py::test_captured_functions_accept_other_sizes", upstream="not reported",
    ),
    _semantics(
        f"{_DYNAMO}.builder:_automatic_dynamic", f"{_SEMANTICS}.graph_inputs:_static",
        "Sizes that differ by rank are no symbols.", _UNEVEN,
    ),
    _semantics(
        f"{_DYNAMO}.builder:get_fake_value", f"{_SEMANTICS}.graph_inputs:_or_with_sizes",
        "A trace that fails with symbols begins anew with sizes.",
        "compile/test_dynamic_sizes.py::test_captured_functions_accept_other_sizes",
    ),
    _semantics(
        f"{_DYNAMO}.tensor:TensorVariable.var_getattr", f"{_SEMANTICS}.graph_breaks:_attribute",
        "The local part of an uneven DTensor breaks the graph.",
        "compile/test_compile.py::test_the_local_part_of_an_uneven_tensor_is_left_to_eager_code", before=(2, 14),
    ),
    _semantics(
        f"{_DYNAMO}.tensor:TensorVariable.tp_getattro_impl", f"{_SEMANTICS}.graph_breaks:_attribute",
        "The local part of an uneven DTensor breaks the graph.",
        "compile/test_compile.py::test_the_local_part_of_an_uneven_tensor_is_left_to_eager_code", since=(2, 14),
    ),
    _semantics(
        f"{_DYNAMO}.tensor:TensorVariable.call_method", f"{_SEMANTICS}.graph_breaks:_between_devices",
        "A trace has tensors of all devices on the CPU, so a move breaks the graph.",
        f"{_GPU}::test_what_a_captured_step_leaves_to_eager_code",
    ),
    _semantics(
        f"{_DYNAMO}.torch:TorchInGraphFunctionVariable.call_function", f"{_SEMANTICS}.graph_breaks:_made_there",
        "A factory in a trace makes its tensor where the trace has the workers' tensors.",
        f"{_GPU}::test_what_a_captured_step_makes_is_made_on_the_workers_gpu",
    ),
    _fix(
        f"{_DYNAMO}.script_object:TorchScriptObjectVariable.call_method",
        f"{_SEMANTICS}.graph_breaks:_number_of_the_rank",
        "A graph break in a method of a mesh is taken for an error.",
        "compile/test_compile.py::test_the_number_of_the_rank", before=(2, 14),
    ),
    _fix(
        f"{_DYNAMO}.script_object:CustomClassObjectVariable.call_method",
        f"{_SEMANTICS}.graph_breaks:_number_of_the_rank",
        "A graph break in a method of a mesh is taken for an error.",
        "compile/test_compile.py::test_the_number_of_the_rank", since=(2, 14),
    ),
    _semantics(
        "torch._subclasses.meta_utils:MetaTensorDescriber.describe_tensor", f"{_SEMANTICS}.graph_inputs:_describe",
        "A trace has the sizes of the ranks that it stands for.", _UNEVEN,
    ),
    _semantics(
        "torch._functorch._aot_autograd.subclass_utils:_find_attr_matching_outer_metadata",
        f"{_SEMANTICS}.trace_sizes:whole_sizes",
        "The size of a sharded result is not its shard's, though both are equal on the traced rank.",
        "compile/test_compile.py::test_result_with_one_row_has_the_sizes_of_the_whole", since=(2, 14),
    ),
    _fix(
        f"{_DTENSOR}.__tensor_unflatten__", f"{_SEMANTICS}.traced_views:_strided_again",
        "The order of shards is lost when a DTensor is taken apart.",
        "compile/test_compile.py::test_views_over_a_sharded_dimension",
    ),
    _fix(
        f"{_TENSOR}.placement_types:_StridedShard.local_shard_size_and_offset",
        f"{_SEMANTICS}.traced_views:_places_of_strided",
        "Offsets are read out of a tensor, which has no values in a trace.",
        "compile/test_compile.py::test_views_over_a_sharded_dimension", upstream="pytorch/pytorch#184945",
    ),
    _fix(
        f"{_AOT}:gen_alias_from_base", f"{_SEMANTICS}.traced_views:_view_of",
        "A result that is a view of an input cannot be made again of a DTensor.",
        "compile/test_compile.py::test_inputs_that_are_changed_and_results_that_are_views",
        upstream="pytorch/pytorch#184002",
    ),
    _fix(
        f"{_AOT}:AOTDispatchAutograd.process_runtime_tangent", f"{_SEMANTICS}.aot_tangents:process",
        "A missing gradient of a DTensor comes as a plain tensor of zeros.",
        "compile/test_aot_tangents.py::test_one_of_the_results_is_enough", upstream="pytorch/pytorch#173123",
    ),
)  # fmt: skip
CAPTURED = Feature("torch.compile in a controller of DTensors", _COMPILE, releases.CAPTURED)
"""Its rows are applied with the first trace."""
COMPILE = CAPTURED.rows

PATCHES = (*MESH, *COMPILE)
"""All rows of a controller."""

_XLA_TEST = "tests/dtensor/devices/test_xla_meshes.py::test_tensors_are_on_xla_devices_of_another_torch"
_SPMD = "torch takes a mesh of XLA devices for its SPMD mode."
WORKER_XLA = tuple(
    Patch(target, "fix", (f"{_XLA_MAKERS}.{maker}",), why, _XLA_TEST, releases.XLA, (2, 10), "not reported")
    for target, maker, why in (
        (f"{_MESH}.__init__", "xla_spmd:leave_out_spmd", _SPMD),
        (f"{_TENSOR}._api:distribute_tensor", "xla_spmd:leave_out_spmd", _SPMD),
        (f"{_TENSOR}._api:distribute_module", "xla_spmd:leave_out_spmd", _SPMD),
        ("torch.distributed.device_mesh:_get_device_handle", "xla_spmd:leave_out_spmd", "There is no torch.xla."),
        (
            f"{_TENSOR}._dispatch:OpDispatcher.dispatch", "xla_functionalization:keep_views_together",
            "An operation in place changes a view of an XLA tensor, and not its base.",
        ),
    )
)  # fmt: skip
"""Rows of workers with XLA devices, which `leave_out_spmd` and `keep_views_together` put in place."""
WORKER_INDUCTOR = (
    _fix(
        "torch._meta_registrations:_meta_grouped_mm_common", "monarch_backend.dtensor._worker.grouped_mm:corrected",
        "Inductor asks it, and it refuses float32 and float16, which torch's kernels accept.",
        "compile/test_compile.py::test_grouped_mm_of_float32_in_a_captured_step", since=releases.WORKER, before=(2, 15),
    ),
)  # fmt: skip
"""Rows of workers that compile captured steps, which `grouped_mm.install` puts in place."""


def table() -> str:
    """Return docs/reference/torch-patches.md."""
    from monarch_backend._core.patches import documented
    from monarch_backend._replay.torch_manifest import REPLAY
    from monarch_backend._telemetry.profiler_manifest import PROFILER
    from monarch_backend.dtensor._patches import registrations
    from monarch_backend.process_group import _c10d_manifest

    return documented(
        {
            'Programs with `backend="monarch"`': (_c10d_manifest.C10D, _c10d_manifest.REGISTRATIONS),
            "Programs with `MONARCH_AS`, in addition": (_c10d_manifest.NAMED_AS, ()),
            "Controllers of DTensors": (PATCHES, registrations.CONTROLLER),
            "Processes that were profiled on request": (PROFILER, ()),
            "Replays of an actor": ((), REPLAY),
            "Workers": ((*WORKER_XLA, *WORKER_INDUCTOR), registrations.WORKER),
        }
    )


def check() -> int:
    missing = unmatched(PATCHES)
    for target, reason in missing.items():
        print(f"{target}\n    {reason}")
    print(f"{len(missing)} of {sum(row.is_for(torch_version()) for row in PATCHES)} rows do not match this torch")
    return len(missing)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(1 if check() else 0)
    print(table(), end="")
