"""Sizes and limits of the router. Other modules read them here at each use: simulations and tests replace them."""

from monarch_backend._transport.local.links import MOST_IN_ONE as MOST_IN_ONE

CREDIT_WINDOW = 1024
"""Credits for messages from one process to another. A sender without credit waits."""

CREDIT_RESERVE = 16
"""Credits that other threads may take between the check of the credit and the message that follows."""

BYTES_PER_CREDIT = 1 << 20
"""Bytes after which a message takes one more credit. It bounds unprocessed messages to 1 GiB and one message."""

TREE_FANOUT = 8
"""Processes to which one process of a tree relays a message."""

MAX_DIRECT_RECEIVERS = 64
"""Receivers up to which a message is sent directly to each. One process wakes 64 others in 0.3 ms; a tree doubles the
work of all processes together (docs/adr/0040 has the measurement)."""

MAX_REFUSALS = 7
"""Lookups of a process that refuses connections. The delay doubles each time, 2.5 s altogether."""

SHARED_COPY_MIN_BYTES = 32 << 10
"""Bytes from which a message is sent directly to all receivers: they read one copy in shared memory."""
