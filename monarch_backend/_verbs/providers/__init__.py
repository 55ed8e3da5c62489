"""Packages that drive libibverbs: the common interface, one adapter for each, and their queues in C++."""
