"""Jobs: how the hosts of a program are started. The public names are in monarch_backend.job."""
