"""Registered memory that other processes read and write. monarch_backend.rdma exports the public names."""
