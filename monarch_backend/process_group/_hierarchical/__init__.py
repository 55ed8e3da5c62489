"""Collectives of ranks on several hosts: shared memory inside, messages between."""
