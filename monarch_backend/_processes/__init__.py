"""Starting and ending processes: the fork server, a child's bootstrap, limits, CPU affinity."""
