"""Jobs: how the hosts of a program are started. Public names are in monarch_backend.job."""
