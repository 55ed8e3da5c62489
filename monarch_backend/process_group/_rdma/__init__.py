"""Large messages between hosts that NICs read."""
