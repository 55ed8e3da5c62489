"""Other machines: what runs there for a controller, how they find each other, and how processes are started on them.

Rooms: the daemon of a host (_hosts/daemon.py), the agent of one controller there (_hosts/agent.py), what a controller does to reach
them (_hosts/attach.py, _hosts/remote_spawner.py). How frames travel is transport's; meshes are mesh's.
"""

from monarch_backend import _wiring as _wiring
from monarch_backend._core.public_names import name_exceptions
from monarch_backend._hosts.attach import attach, attach_to_workers
from monarch_backend._hosts.daemon import run_worker_loop_forever
from monarch_backend._hosts.protocol import host_name
from monarch_backend._hosts.workspace_tree import WorkspaceError

__all__ = ["WorkspaceError", "attach", "attach_to_workers", "host_name", "run_worker_loop_forever"]

name_exceptions(__name__, globals())
