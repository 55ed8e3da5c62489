"""Functions of torch that are replaced on a controller, by topic."""
