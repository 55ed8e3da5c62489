"""Other machines: what runs there for a controller, how they find each other, and how processes are started on them.

Rooms: the daemon of a host (_daemon.py), the agent of one controller there (_agent.py), what a controller does to reach
them (_attach.py, _remote_spawner.py). How frames travel is transport's; meshes are mesh's.
"""

from monarch_backend._public import name_exceptions
from monarch_backend.hosts._attach import attach, attach_to_workers
from monarch_backend.hosts._daemon import run_worker_loop_forever
from monarch_backend.hosts._messages import host_name
from monarch_backend.hosts._workspace_tree import WorkspaceError

__all__ = ["WorkspaceError", "attach", "attach_to_workers", "host_name", "run_worker_loop_forever"]

name_exceptions(__name__, globals())
