"""Registration of the functions that higher layers provide to lower ones: see _core/extension_points.py.

The public modules and the processes of a mesh import this module. It imports higher layers at their first use only.
"""

from __future__ import annotations

from typing import Any

from monarch_backend._core.extension_points import provide


def _runtime() -> Any:
    from monarch_backend._actor import runtime

    return runtime


def run_worker(plan: Any) -> None:
    """Run a process of a mesh. A pickled plan names this function, so that the process imports this module."""
    from monarch_backend._actor import worker_main

    worker_main.main(plan)


def run_bootstrap(packed: bytes) -> None:
    """Call the user's ``bootstrap=`` in a process of a mesh. It is pickled as `run_worker` is."""
    from monarch_backend._actor import worker_main

    worker_main.run_bootstrap(packed)


def _actor_module() -> Any:
    from monarch_backend import actor

    return actor


def _gateway() -> Any:
    from monarch_backend._hosts import attach

    return attach.go_through


def _remote_places() -> Any:
    from monarch_backend._hosts import remote_places

    return remote_places.ask


def _answer_tasks() -> Any:
    from monarch_backend._actor.execution import task_stacks

    return task_stacks.answer


def _workspace_sync() -> Any:
    from monarch_backend._hosts import workspace_sync

    return workspace_sync.sync


def _replay_recording() -> Any:
    from monarch_backend._replay import recording

    return recording.install


def _rdma() -> Any:
    from monarch_backend._rdma import control_rpc

    return control_rpc.heard


def _prefault() -> Any:
    from monarch_backend._actor.processes import message_memory

    return message_memory.on_setting


def _dtensor() -> Any:
    from monarch_backend import dtensor

    return dtensor


provide("runtime", _runtime)
provide("worker", lambda: run_worker)
provide("bootstrap", lambda: run_bootstrap)
provide("actor module", _actor_module)
provide("gateway", _gateway)
provide("places on other hosts", _remote_places)
provide("request tasks", _answer_tasks)
provide("workspace sync", _workspace_sync)
provide("replay recording", _replay_recording)
provide("setting rdma", _rdma)
provide("setting prefault", _prefault)
provide("dtensor", _dtensor)
