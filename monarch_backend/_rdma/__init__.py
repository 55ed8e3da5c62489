"""Memory that other processes read and write. The public names are in monarch_backend.rdma."""
