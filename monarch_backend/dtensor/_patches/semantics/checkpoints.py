"""Replacements in torch.distributed.checkpoint: each worker writes and reads its shards."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import state_dict_saver

from monarch_backend.dtensor._controller import checkpoint, controller_process_group
from monarch_backend.dtensor._controller.controller_mesh import Replacement


def _save(own: Any) -> Replacement:
    def _save_state_dict(
        state_dict: Any, storage_writer: Any, process_group: Any = None, coordinator_rank: int = 0,
        no_dist: bool = False, planner: Any = None, use_collectives: bool = True,
    ) -> Any:  # fmt: skip
        if not controller_process_group.is_controller():
            return own(state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner, use_collectives)
        mesh = checkpoint.mesh_of(state_dict)
        if mesh is None:
            return checkpoint.save_here(own, state_dict, storage_writer, planner)
        return checkpoint.save(mesh, state_dict, storage_writer, planner, use_collectives)

    return _save_state_dict


def _async_save(own: Any) -> Replacement:
    def async_save(
        state_dict: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, planner: Any = None, **options: Any
    ) -> Any:
        given = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer, "planner": planner}
        if not controller_process_group.is_controller():
            return own(state_dict, **given, **options)
        values = state_dict_saver._stateful_to_state_dict(state_dict)
        writer = state_dict_saver._storage_setup(storage_writer, checkpoint_id, reader=False)
        return checkpoint.async_save(checkpoint.mesh_of(values), values, writer, planner)

    return async_save


def _load(own: Any) -> Replacement:
    def _load_state_dict(
        state_dict: Any, storage_reader: Any, process_group: Any = None, coordinator_rank: int = 0,
        no_dist: bool = False, planner: Any = None,
    ) -> None:  # fmt: skip
        if not controller_process_group.is_controller():
            own(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)
            return
        mesh = checkpoint.mesh_of(state_dict)
        if mesh is None:
            checkpoint.load_here(own, state_dict, storage_reader, planner)
        else:
            checkpoint.load(mesh, state_dict, storage_reader, planner)

    return _load_state_dict
