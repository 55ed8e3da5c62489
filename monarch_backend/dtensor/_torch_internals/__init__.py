"""Private parts of torch that are read or called, and not replaced."""
