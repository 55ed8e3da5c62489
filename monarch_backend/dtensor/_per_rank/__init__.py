"""Values that differ by rank: ints, strides, shards, and the classes of ranks of a trace."""
