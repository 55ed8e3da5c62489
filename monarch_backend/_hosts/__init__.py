"""Programs that use several hosts: daemons, agents, attaching, workspaces. Public: monarch_backend.hosts."""
