"""One-sided memory: buffers that other processes read and write without the owner's taking part."""
