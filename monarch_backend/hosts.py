"""Hosts of a program: daemons that serve controllers, and attaching to them.

The implementation is in _hosts/: the daemon of a host (daemon.py), the agent of one controller there (agent.py), and
the controller's side (attach.py, remote_spawner.py).
"""

from monarch_backend import _wiring as _wiring
from monarch_backend._hosts.attach import attach, attach_to_workers
from monarch_backend._hosts.daemon import run_worker_loop_forever
from monarch_backend._hosts.protocol import host_name
from monarch_backend._hosts.workspace_tree import WorkspaceError

__all__ = ["WorkspaceError", "attach", "attach_to_workers", "host_name", "run_worker_loop_forever"]
