"""Random numbers of shards, equal to those of a single process."""
