"""One-sided memory over any NIC that libibverbs knows."""
