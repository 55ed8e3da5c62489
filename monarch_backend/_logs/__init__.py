"""The output of processes: collection, de-duplication, forwarding."""
