"""Programs over several hosts: daemons, agents, attaching, workspaces. The public names are in monarch_backend.hosts."""
