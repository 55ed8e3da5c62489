"""Each part of torch that a controller replaces or reads still exists, in the form that the package relies on."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._local_tensor as local_tensor
from torch._dynamo.guards import GuardBuilder
from torch._export import wrappers
from torch._functorch import config as functorch
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import MetaTensorDesc
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _api as api
from torch.distributed.tensor import _dispatch as op_dispatch
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor import _sharding_prop as sharding_prop
from torch.distributed.tensor._ops import _math_ops as reductions
from torch.distributed.tensor._ops import _tensor_ops as tensor_ops
from torch.distributed.tensor._ops import _view_ops as view_ops
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from monarch_backend._core import patches
from monarch_backend._core.patches import Patch, Release
from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor import RemoteTensorError, simulated_mesh
from monarch_backend.dtensor._controller import controller_mesh, remote_tensor
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import fake_tensors, op_signatures
from monarch_backend.dtensor._ops import convolution
from monarch_backend.dtensor._patches import installation, manifest, trace_installation
from monarch_backend.dtensor._patches.fixes import replicate_fallback, sharding_fixes
from monarch_backend.dtensor._patches.semantics import op_handlers, parallel_modules, traced_views
from monarch_backend.dtensor._torch_internals import c10d_registry, decompositions, sharding_tables

RELEASE = torch_version()
if RELEASE < (2, 13):
    pytest.skip("the forms of older releases are not recorded", allow_module_level=True)
ASYNC_SAVE = (
    "state_dict checkpoint_id storage_writer planner process_group async_checkpointer_type async_stager no_dist "
    "use_collectives"
)
FSDP = "torch.distributed.fsdp._fully_shard"
FORMS_OF_FSDP = {
    "_fsdp_init._move_states_to_device": "params buffers device",
    "_fully_shard._init_param_group": (
        "state params modules mesh_info post_forward_mesh_info device shard_placement_fn mp_policy offload_policy "
        "reshard_after_forward"
    ),
    "_fsdp_param._chunk_with_empty": "tensor num_chunks dim",
    "_fsdp_collectives._get_dim0_padded_size": "tensor_size dim0_factor",
}
FORMS_OF_FSDP_PARAM = {
    "_init_sharded_param": "self param device shard_placement_fn mesh_info",
    "_init_sharding_spec_plain": "self param fsdp_placement",
    "reset_sharded_param": "self",
    "init_all_gather_outputs": ("self all_gather_input_numels all_gather_input_dtypes world_size device"),
}
FORMS = {
    "DeviceMesh.__init__": (
        "self device_type mesh mesh_dim_names backend_override _init_backend _rank _layout _rank_map _root_mesh"
    ),
    "DeviceMesh.get_coordinate": "self",
    "DeviceMesh._is_current_rank_part_of_mesh": "self",
    "DeviceMesh._sym_get_coordinate": "self index",
    "DeviceMesh.get_local_rank": "self mesh_dim",
    "DeviceMesh.get_rank": "self",
    "DeviceMesh._get_mesh_tensor_from_full_mesh": "full_mesh current_rank",
    "DeviceMesh._setup_world_group_and_device": "self",
    "DeviceMesh._compute_coordinate_on_dim": "self",
    "DeviceMesh._init_process_groups": "layout rank_map mesh_dim_names backend_override",
    "torch.distributed._local_tensor._for_each_rank_run_func": "func ranks args kwargs alias",
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset": (
        "global_shape mesh_shape my_coordinate placements skip_offset"
    ),
    "torch.distributed._functional_collectives._maybe_wrap_tensor": "self",
    "ConvertFrameAssert.__call__": "self frame cache_entry hooks frame_state skip",
    "DTensor.from_local": "local_tensor device_mesh placements run_check shape stride grad_placements",
    "torch.distributed.tensor._api._dtensor_init_helper": "init_op size device_mesh placements kwargs",
    "torch.distributed.checkpoint.state_dict_saver._save_state_dict": (
        "state_dict storage_writer process_group coordinator_rank no_dist planner use_collectives"
    ),
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict": (
        "state_dict storage_reader process_group coordinator_rank no_dist planner"
    ),
    **{f"{FSDP}.{place}": form for place, form in FORMS_OF_FSDP.items()},
    **{f"FSDPParam.{place}": form for place, form in FORMS_OF_FSDP_PARAM.items()},
    "FSDPParamGroup.__init__": (
        "self params modules mesh_info post_forward_mesh_info device shard_placement_fn mp_policy offload_policy"
    ),
    "FSDPParamGroup.unshard": "self async_op",
    "FSDPParamGroup.post_backward": "self unused",
    "FSDPState._root_pre_forward": "self module args kwargs",
    "torch.cuda._lazy_init": "",
    "torch.cuda.current_stream": "device",
    "torch.cuda.default_stream": "device",
    "Stream.__new__": "cls device priority kwargs",
    "Event.__new__": "cls enable_timing blocking interprocess external",
    "torch.cuda.synchronize": "device",
    "torch.cuda.current_device": "",
    "torch.cuda.set_device": "device",
    "torch.cuda._exchange_device": "device",
    "Module.to": "self args kwargs",
    "Module.cuda": "self device",
    "torch.cuda.is_bf16_supported": "including_emulation",
    "torch.cuda.amp.common.amp_definitely_not_available": "",
    "torch.utils.checkpoint._get_device_module": "device",
    "autocast.__enter__": "self",
    "DTensor.__init__": "args kwargs",
    "OpDispatcher.wrap": "res spec",
    "OpDispatcher._dispatch_get_local_results_slow_path": "self op_call args op_info",
    "OpDispatcher._unwrap_to_op_info_impl": "self op_call args kwargs create_schema",
    "DTensorSpec.__init__": "self mesh placements tensor_meta shard_order use_strided_shard_as_shard_order",
    "DTensorSpec.__eq__": "self other",
    "OpDispatcher._dispatch_fast_path_python_tail": (
        "self op_call args kwargs compute_mesh output_sharding local_results participating is_inplace_op "
        "is_out_variant_op"
    ),
    "ShardingPropagator._propagate_tensor_meta_non_cached": "self op_schema",
    "OpDispatcher.redistribute_local_args": "op_info suggested_input_schema use_val_from_redistribute_schema",
    "OpDispatcher._propagate_op_sharding_dispatch_slow_path": "self op_call args kwargs op_info try_cache",
    "ShardingPropagator.propagate_op_sharding_non_cached": "self op_schema",
    "SymInt.__hash__": "self",
    "Tensor.__getitem__": "self key",
    "Tensor.__setitem__": "self key value",
    "DTensor.to_local": "self grad_placements",
    "DTensor.redistribute": "self device_mesh placements async_op forward_dtype backward_dtype",
    "DTensor.__repr__": "self",
    "DTensor.__iter__": "self",
    "DTensor.__format__": "self format_spec",
    "torch.cuda.manual_seed": "seed",
    "torch.cuda.manual_seed_all": "seed",
    "torch.cuda.get_rng_state": "device",
    "torch.cuda.set_rng_state": "new_state device",
    "_MaskPartial._partition_value": "self tensor mesh mesh_dim",
    "torch.distributed.distributed_c10d._get_pg_default_device": "group",
    "torch.nn.parallel.distributed._verify_param_shape_across_processes": "process_group tensors logger",
    "DTensor.storage": "self",
    "DTensor.share_memory_": "self",
    "DTensor.__dlpack__": "self stream max_version dl_device copy",
}
"""Parameters of each replaced function of torch, by name. Functions of C types have no parameters to check."""
FORMS_BY_RELEASE: tuple[tuple[Release, dict[str, str]], ...] = (
    ((2, 14), {"DTensor.__dlpack__": "self stream max_version dl_device copy read_only"}),
    (
        (2, 15),
        {
            "DeviceMesh.__init__": (
                "self device_type mesh mesh_dim_names backend_override preserve_rank_order _init_backend _rank _layout "
                "_rank_map _root_mesh"
            ),
            "DeviceMesh._init_process_groups": ("layout rank_map mesh_dim_names backend_override preserve_rank_order"),
            "torch.distributed.fsdp._fully_shard._fsdp_collectives.record_grad_output_stream": "buffer stream",
        },
    ),
)
"""Parameters that differ from a release on."""
for _since, _forms in FORMS_BY_RELEASE:
    if _since <= RELEASE:
        FORMS.update(_forms)
OF_C = {
    "DTensor.tolist", "DTensor.numpy", "DTensor.__array__",
    "DTensor.__getitem__", "DTensor.__setitem__", "DTensor.data",
    "DTensor.device", "DTensor.is_cpu", "DTensor.is_cuda", "DTensor.is_meta",
    "DTensor.to", "DTensor.cpu", "DTensor.cuda", "DTensor.type_as", "DTensor.pin_memory", "DTensor.record_stream",
    "torch.distributed.tensor._api.compute_global_tensor_info",
    "DTensor.data_ptr", "DTensor.untyped_storage", "DTensor.apply_", "DTensor.map_", "DTensor.map2_",
    "DTensor.__cuda_array_interface__", "torch.to_dlpack", "torch.utils.dlpack.to_dlpack",
    "DTensor.get_device", "DTensor.__setstate__", "DeviceMesh.__new__",
}  # fmt: skip


installation.install()


def name_of(where: Any, name: str) -> str:
    return f"{where.__name__}.{name}"


def places_of(rows: Sequence[Patch]) -> dict[str, Any]:
    """Return torch's own object for each replaced name, including names that a subclass or a base class overrides."""
    found: dict[str, Any] = {}
    for row in rows:
        if not row.is_for(RELEASE):
            continue
        where, name = patches.locate(row)
        own = patches.originals.get(row.target)
        if row.swaps_code or row.adds or own is None:
            continue
        replaced = getattr(where, name)
        if name == "__bases__":
            ours = {each for base in replaced[0].__mro__[:-1] for each in vars(base) if each in dir(torch.Tensor)}
            ours -= {"__module__", "__doc__", "__slots__"}
            found.update({name_of(where, each): getattr(torch.Tensor, each) for each in ours})
        elif name == "__new__" and where is DeviceMesh:
            ours = vars(controller_mesh.ControllerMesh)
            methods = {each for each in ours if each == "__init__" or not each.startswith("__")}
            found.update({name_of(where, each): inspect.getattr_static(DeviceMesh, each) for each in methods})
            found[name_of(where, name)] = own
        elif inspect.isclass(own):
            special = ("__call__", "__init__")
            ours = [each for each in vars(replaced) if each in special or not each.startswith("__")]
            ours = [each for each in ours if hasattr(own, each)]
            found.update({name_of(own, each): inspect.getattr_static(own, each) for each in ours})
        else:
            found[name_of(where, name)] = own
    found["FSDPState._root_pre_forward"] = FSDPState._root_pre_forward  # overridden by a subclass of the state
    return found


PLACES = places_of(manifest.MESH)


def test_list_of_parameters_has_each_replaced_function() -> None:
    assert set(PLACES) == set(FORMS) | OF_C


@pytest.mark.parametrize("place", sorted(FORMS))
def test_replaced_function_has_the_expected_parameters(place: str) -> None:
    own = PLACES[place]
    own = own.__func__ if isinstance(own, (staticmethod, classmethod)) else own
    if isinstance(own, types.WrapperDescriptorType):  # a method of C, without a module
        assert own.__objclass__ is torch._C.TensorBase
        return
    assert own.__module__.split(".")[0] == "torch", "it is not torch's own that was replaced"
    if inspect.isbuiltin(own):  # in a build for GPUs: a C function without a signature
        assert own is torch._C._cuda_exchangeDevice
        return
    assert " ".join(inspect.signature(own).parameters) == FORMS[place]


def test_errors_for_missing_shardings_are_the_expected_ones() -> None:
    """The fallback looks for the class of the error, and for its text if a tensor would have to be redistributed."""
    assert "raise NotImplementedError(" in inspect.getsource(sharding_prop.ShardingPropagator)
    said = "".join(map(inspect.getsource, (utils.expand_to_full_mesh_op_strategy, tensor_ops, view_ops)))
    since = replicate_fallback._GATHERED_SINCE if RELEASE >= (2, 14) else ()
    assert not [words for words in (*replicate_fallback._GATHERED, *since) if words not in said]
    assert "costs.index(min(costs))" in inspect.getsource(sharding_prop), "what raises that, where no way is left"
    slow = inspect.getsource(op_dispatch.OpDispatcher._propagate_op_sharding_dispatch_slow_path)
    assert "out = op_call.decompose(*args, **kwargs)" in slow, "what it returns may be the result itself"
    assert slow.rstrip().endswith(") from e")


def test_strategy_of_index_put_is_our_fix() -> None:
    known = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs[torch.ops.aten.index_put_.default]
    assert dataclasses.is_dataclass(known) and known.func.__module__ == sharding_fixes.__name__
    own = inspect.signature(tensor_ops.index_put_single_dim_strategy)
    assert " ".join(own.parameters) == "op args kwargs"
    assert callable(op_dispatch.as_strided_handler)


def test_global_shape_is_computed_from_a_shard_and_the_mesh() -> None:
    own = patches.originals["torch.distributed.tensor._api:compute_global_tensor_info"]
    assert own is torch._C._DTensor_compute_global_tensor_info
    mesh = simulated_mesh((2, 3), ("x", "y"))
    assert own(torch.empty(2, 5), mesh, (Shard(0), Shard(1))) == ([4, 15], [15, 1])


def test_functions_with_swapped_code_have_the_expected_parameters() -> None:
    swapped = [patches.originals[row.target] for row in manifest.MESH if row.swaps_code and row.is_for(RELEASE)]
    forms = {function.__name__: " ".join(inspect.signature(function).parameters) for function in swapped}
    assert forms == {
        "distribute_tensor": "tensor device_mesh placements src_data_rank",
        "distribute_module": "module device_mesh partition_fn input_fn output_fn",
        "_get_device_handle": "device_type",
        "get_rank": "group",
        "broadcast_object_list": "object_list src group device group_src"
        + (" weights_only" if RELEASE >= (2, 14) else ""),
        "_get_total_norm": "tensors norm_type error_if_nonfinite foreach",
        "_clip_grads_with_norm_": "parameters max_norm total_norm foreach",
        "parallelize_module": "module device_mesh parallelize_plan src_data_rank",
        "_group_tensors_by_device_and_dtype": "tensorlistlist with_indices",
        "redistribute_local_tensor": (
            "local_tensor current_spec target_spec async_op use_graph_based_transform is_explicit"
        ),
        "async_save": ASYNC_SAVE,
        "_broadcast_state_dict": "full_state_dict local_state_dict device pg strict cpu_offload",
    }
    assert dist.get_rank is c10d.get_rank


def test_a_dtensor_is_made_by_new_alone() -> None:
    """Our constructor leaves out `__init__`, which has an effect only while torch exports."""
    x = distribute_tensor(torch.ones(4, 2), simulated_mesh((2,), ("x",)), [Shard(0)])
    made = DTensor.__new__(DTensor, x._local_tensor, x._spec, requires_grad=True)
    assert made._spec is x._spec and made._local_tensor is x._local_tensor and made.requires_grad
    assert made.shape == x.shape and made.stride() == x.stride() and made.dtype == x.dtype
    source = inspect.getsource(api)
    body = source[source.index("    def __init__(self, *args, **kwargs):") :].split('"""')[2]
    assert body.strip().startswith("super().__init__()\n\n")
    assert "if not torch.compiler.is_exporting():\n            return" in inspect.getsource(
        wrappers.mark_subclass_constructor_exportable_experimental
    )


def test_a_copy_is_filled_by_setstate_where_a_class_has_its_own() -> None:
    source = inspect.getsource(torch._tensor._rebuild_from_type_v2)
    assert "ret.__setstate__(state)" in source and "torch._utils._set_obj_state(ret, state)" in source
    assert " ".join(inspect.signature(torch._utils._set_obj_state).parameters) == "obj state"


def test_modes_are_counted_and_redistributions_have_the_settings_that_are_read() -> None:
    count = torch._C._len_torch_dispatch_stack
    assert count() == 0
    with FakeTensorMode():
        assert count() == 1
        with CommDebugMode():
            assert count() == 2
    with redistribution.disable_redistribute_transform_optimization():
        assert redistribution._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION is True
    with redistribution.use_min_cost_redistribution_plan():
        assert redistribution._FORCE_MIN_COST_REDISTRIBUTION_PLAN is True
    settings = {name for name in vars(redistribution) if re.fullmatch("_[A-Z_]+", name)}
    assert settings == {"_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION", "_FORCE_MIN_COST_REDISTRIBUTION_PLAN"}


def test_a_mesh_names_its_groups_by_dimension_and_a_slice_has_those_of_its_root() -> None:
    mesh = simulated_mesh((2, 2), ("a", "b"))
    names = [mesh.get_group(dim).group_name for dim in ("a", "b")]
    assert mesh._dim_group_names == names
    assert mesh["b"]._dim_group_names == mesh["b"]._dim_group_names == names[1:]


def test_parallelize_module_calls_itself_for_each_style() -> None:
    """Only the outermost call is the user's."""
    make = parallel_modules._parallelize
    seen: list[bool] = []

    def own(module: Any, mesh: Any, plan: Any) -> Any:
        seen.append(controller_mesh._mode.parallelizing)
        return module if plan is None else make(own)(module, mesh, None)

    assert make(own)("module", None, None) == "module"
    with pytest.raises(RuntimeError, match="mesh"):
        make(own)(torch.nn.Linear(1, 1), None, {})
    assert seen == [True, True, True] and not controller_mesh._mode.parallelizing


def test_modules_and_parameters_have_the_tables_of_hooks_that_are_read() -> None:
    module = torch.nn.Linear(1, 1)
    handle = module.register_forward_pre_hook(seen := lambda *_: None)
    assert list(module._forward_pre_hooks.items()) == [(handle.id, seen)]
    weight = module.weight
    assert not weight._backward_hooks and not weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    weight.register_hook(lambda _: None)
    module.bias.register_post_accumulate_grad_hook(lambda _: None)
    assert weight._backward_hooks and module.bias._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def test_torch_runs_functions_for_each_rank_by_the_names_that_are_replaced() -> None:
    mode = controller_mesh._mode
    assert local_tensor._PROCESS_MODE and local_tensor._PROCESS_LOCAL_TENSOR_MODE[0] is mode
    assert local_tensor.local_tensor_mode() is local_tensor.enabled_local_tensor_mode() is mode
    with mode.disable():
        assert local_tensor.enabled_local_tensor_mode() is None
    source = inspect.getsource(local_tensor.maybe_run_for_local_tensor)
    assert "enabled_local_tensor_mode()" in source
    assert "_for_each_rank_run_func(func, lm.ranks, args, kwargs, alias=False)" in source
    assert set(local_tensor._PATCHED_DEVICE_MESH_METHODS) <= {
        name.partition(".")[2] for name in PLACES if name.startswith("DeviceMesh.")
    }


def test_torchs_tables_of_groups_are_those_that_are_written() -> None:
    world = c10d._world
    for table in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        assert isinstance(getattr(world, table), dict)
    source = inspect.getsource(c10d._register_pg_in_world)
    for table in (
        "pg_map[pg]",
        "pg_names[pg]",
        "pg_backend_config[pg]",
        "pg_group_ranks[pg]",
        "_register_process_group(",
    ):
        assert table in source
    assert callable(c10d_registry.c10d._update_default_pg)
    assert "default_pg.new_group(" in inspect.getsource(c10d._new_group_with_tag)


def test_a_collective_without_a_group_is_told_from_others_that_fail() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", "gone")
    assert c10d_registry.says_gone(caught.value)
    assert not c10d_registry.says_gone(RuntimeError("it does not fit"))


def test_meshes_of_processes_that_have_ended_are_not_those_of_new_ones(mesh: Any) -> None:
    assert "self._thread_id" in inspect.getsource(DeviceMesh._hash_key)
    assert "_thread_id" in inspect.getsource(DeviceMesh.__eq__)
    serial = controller_mesh.workers_of(mesh).serial
    assert all(each._thread_id == serial for each in (mesh, mesh[mesh.mesh_dim_names[0]]))


def test_the_same_processes_are_the_same_mesh(all_procs: Any) -> None:
    procs = all_procs["2x2"]
    assert procs.device_mesh("cpu") is procs.device_mesh("cpu")
    assert procs.slice(dp=0).device_mesh("cpu") is procs.slice(dp=0).device_mesh("cpu")
    assert procs.slice(dp=0).device_mesh("cpu") != procs.slice(dp=1).device_mesh("cpu")


def test_operators_of_dtensor_can_have_handlers() -> None:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    assert {torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default} <= set(handlers)


def test_the_controllers_tensor_is_each_ranks(mesh: Any) -> None:
    assert dist.get_backend() == "monarch"
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [dist.get_world_size()] * 2


def test_torch_names_a_new_group_by_the_function_that_workers_replace() -> None:
    source = inspect.getsource(inspect.unwrap(c10d._new_group_with_tag))
    assert "group_name = _process_group_name(ranks, use_hashed_name=use_local_synchronization)" in source


def test_masks_of_sharded_rows_are_kept_in_their_placement() -> None:
    """Captured steps use the masks at once, and a failing lookup leaves none: see `embedding_mask`."""
    placement, rows = _MaskPartial(offset_shape=torch.Size([4])), torch.ones(2, 3)
    placement.mask_buffer.materialize_mask(torch.tensor([True, False]))
    placement.mask_buffer.apply_mask(rows)
    assert rows.tolist() == [[0, 0, 0], [1, 1, 1]]
    placement.mask_buffer.release_mask()
    assert placement.mask_buffer.data is None
    assert Partial(placement.reduce_op) == Partial("sum")


FORMS_OF_COMPILE = {
    "torch._dynamo.variables.builder._automatic_dynamic": "e tx source static_shapes outer_only tensor_spec",
    "torch._dynamo.variables.builder.get_fake_value": "node tx allow_non_graph_fake",
    "MetaTensorDescriber.describe_tensor": "self t recurse trace",
    "MetaConverter._backward_error": "cls t",
    "AOTDispatchAutograd.process_runtime_tangent": (
        "x meta tangent_idx tangent_desc compile_id_str tangent_stack_trace"
    ),
    "ShardingPropagator.propagate_op_sharding_non_cached": "self op_schema",
    "OpDispatcher.redistribute_local_args": "op_info suggested_input_schema use_val_from_redistribute_schema",
    "DTensor.to_local": "self grad_placements",
    "DTensor.__tensor_unflatten__": "inner_tensors flatten_spec outer_size outer_stride",
    "_StridedShard.local_shard_size_and_offset": "self curr_local_size num_chunks rank offset_mode",
    "TensorVariable.call_method": "self tx name args kwargs",
    "TorchInGraphFunctionVariable.call_function": "self tx args kwargs",
}

_OF_OPAQUE = "CustomClassObjectVariable" if RELEASE >= (2, 14) else "TorchScriptObjectVariable"
_OF_ATTRIBUTES = "tp_getattro_impl" if RELEASE >= (2, 14) else "var_getattr"
FORMS_OF_COMPILE[f"{_OF_OPAQUE}.call_method"] = "self tx name args kwargs"
FORMS_OF_COMPILE[f"TensorVariable.{_OF_ATTRIBUTES}"] = "self tx name"
if RELEASE >= (2, 14):
    _OF_AOT = "torch._functorch._aot_autograd.subclass_utils"
    FORMS_OF_COMPILE[f"{_OF_AOT}._find_attr_matching_outer_metadata"] = "a inner_keys metadata_fn"


@pytest.mark.parametrize("name", sorted(FORMS_OF_COMPILE))
def test_functions_replaced_in_traces_have_the_expected_parameters(name: str) -> None:
    trace_installation.install()  # one is a classmethod, and its form depends on the installation
    own = {**PLACES, **places_of(manifest.COMPILE)}[name]
    own = own.__func__ if isinstance(own, (staticmethod, classmethod)) else own
    assert " ".join(inspect.signature(own).parameters) == FORMS_OF_COMPILE[name]


def test_sharded_dimension_of_a_view_maps_to_its_input() -> None:
    mesh = simulated_mesh((2, 2), ("x", "y"))
    base = distribute_tensor(torch.ones(4, 6, 8), mesh, [Shard(0), Replicate()])

    def of(view: torch.Tensor, dim: int) -> int:
        like: Any = types.SimpleNamespace(shape=view.shape, stride=view.stride, size=view.size)
        return traced_views._origin(base, like, dim)

    whole = torch.ones(4, 6, 8)
    assert [of(whole[1], dim) for dim in (0, 1)] == [1, 2]
    assert of(whole[1].view(-1), 0) == 1  # the outermost dimension
    assert [of(whole[2:].transpose(1, 2), dim) for dim in (1, 2)] == [2, 1]
    assert of(whole.view(4, 2, 3, 8), 1) == 1
    with pytest.raises(RemoteTensorError, match=r"dimension 1 is sharded like none of the input.*clone"):
        of(whole.diagonal(), 1)


def test_torch_traces_in_a_context_of_its_own_and_says_what_a_trace_changes() -> None:
    """Attributes that `tracing_state` and `trace_backends` read exist. Guards of a tensor use its sizes and strides."""
    assert hasattr(ShapeEnv(), "tracked_fakes")
    assert functorch.force_non_lazy_backward_lowering is False
    fields = {each.name for each in dataclasses.fields(ViewAndMutationMeta)}
    assert fields >= {"input_info", "output_info"}
    assert {each.name for each in dataclasses.fields(MetaTensorDesc)} >= {"id", "is_leaf"}
    with tracing(TracingContext(FakeTensorMode())):
        context = TracingContext.try_get()
        assert context is not None and context.fw_metadata is None
    source = inspect.getsource(GuardBuilder.TENSOR_MATCH)
    assert "input_source_to_sizes_strides" in source and "convert_to_concrete_values" in source


def test_convolutions_have_a_handler_that_those_of_others_still_get() -> None:
    assert set(convolution.HANDLERS) <= DTensor._op_dispatcher._custom_op_handlers.keys()
    handle = op_handlers._of_controllers(lambda *_: "ours", lambda *_: "torch's")
    assert handle(None, (torch.ones(1), None), {}) == "torch's"


def test_the_table_of_reductions_is_the_one_that_is_looked_into(mesh: Any) -> None:
    aten = torch.ops.aten
    if RELEASE < (2, 14):
        anys = aten.any.default, aten.any.dim, aten.any.dims
        assert {reductions.LINEAR_REDUCTION_OP_MAP[each] for each in anys} == {"max"}
    x = distribute_tensor(torch.ones(6, 6), mesh, [Shard(0)] * mesh.ndim) > 0
    found = set(x.any().placements), set(x.any(0).placements)
    wanted = Partial("max") if RELEASE < (2, 14) else Replicate()  # later releases gather x first
    assert found == ({wanted}, {wanted})


def test_operators_on_lists_are_registered_as_torch_registers_its_own() -> None:
    parameters = inspect.signature(sharding_tables.pointwise._register_single_dim_pointwise).parameters
    assert next(iter(parameters)) == "op"
    assert all(each.default is not inspect.Parameter.empty for each in list(parameters.values())[1:])
    known = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    assert torch.ops.aten._fused_adam_.default in known
    assert torch.ops.aten._foreach_copy_.default in known


def test_tensors_are_made_by_arguments_in_this_order(mesh: Any) -> None:
    wanted = {
        "shape": (4, 6), "stride": (6, 1), "offset": 2, "dtype": torch.float64, "shown": torch.device("cpu"),
    }  # fmt: skip
    made = remote_tensor.make(*remote_tensor.form_of(types.SimpleNamespace(**wanted, classes=None)))  # type: ignore[arg-type]
    assert type(made) is RemoteTensor
    assert (tuple(made.shape), made.stride(), made.storage_offset(), made.dtype) == ((4, 6), (6, 1), 2, torch.float64)
    assert torch.Tensor.device.__get__(made) == torch.device("cpu")  # type: ignore[attr-defined]
    assert not made.requires_grad
    remote_tensor.no_pointer(made)
    with pytest.raises(RuntimeError):
        torch.Tensor.data_ptr(made)
    uneven = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)] * mesh.ndim).to_local()
    assert type(uneven.shape[0]) is torch.SymInt, "sizes are asked of us"


def test_fake_tensors_have_a_cache_that_can_be_left_out() -> None:
    assert FakeTensorMode().cache_enabled in (True, False)
    assert fake_tensors._fake.cache_enabled is False
    before = len(FakeTensorMode.cache)
    with fake_tensors._fake:
        torch.ones(3, 211) + 1
    assert len(FakeTensorMode.cache) == before


def test_schemas_say_which_arguments_are_numbers() -> None:
    aten = torch.ops.aten
    assert op_signatures.scalars_of(aten.add.Tensor._schema) == (0b11, {"self", "other", "alpha"})
    assert op_signatures.scalars_of(aten.clamp.default._schema) == (0b111, {"self", "min", "max"})
    assert op_signatures.scalars_of(aten.select.int._schema) == (0b1, {"self"})
    assert op_signatures.scalars_of(aten.arange.start._schema) == (0, frozenset())


def test_composite_operators_decompose_as_expected() -> None:
    """Without autograd a composite operator is not decomposed, so its own kernel for autograd is called."""
    linear = decompositions.made_of_others(torch.ops.aten.linear.default)
    x = torch.randn(3, 2)
    assert linear is not None
    torch.testing.assert_close(linear(x, x), x @ x.T)
    for whole in (torch.ops.aten.mm.default, torch.ops.aten.sym_size.default, torch.ops.aten.is_contiguous.default):
        assert decompositions.made_of_others(whole) is None


def test_parts_of_a_norm() -> None:
    placement = reductions._NormPartial(3)
    assert placement.norm_type == 3 and placement.is_partial("sum") and placement != Partial()
    assert reductions.NormReduction(3).norm_type == 3


@pytest.mark.slow
@pytest.mark.parametrize("first", ["_compile.compile_backend", "_patches.fixes.view_writeback"])
def test_every_patch_is_in_place_in_either_order_of_imports(first: str) -> None:
    """torch's entry point imports `compile_backend` first if a step is captured before a mesh exists."""
    program = f"""
import monarch_backend.dtensor.{first}
from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._patches import installation
from monarch_backend.dtensor._patches.semantics import op_handlers, parallel_modules
installation.install()
from monarch_backend._core import patches
from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor._patches import manifest
placed = len(patches.originals)
import monarch_backend.dtensor._device_mesh
from torch.distributed.tensor import DTensor
assert len(patches.originals) == placed, "registered too late"
placed = [row.target for row in manifest.MESH if row.target in patches.originals]
assert placed == [row.target for row in manifest.MESH if row.is_for(torch_version())] != []
print(DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path.__code__.co_filename)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert "monarch_backend" in said.stdout
