"""Sizes and limits of the router. Other modules read them here at each use: simulations and tests replace them."""

from __future__ import annotations

from monarch_backend._transport.local.links import MOST_IN_ONE as MOST_IN_ONE

CREDIT_WINDOW = 1024
"""Credits for messages from one process to another, under way or waiting to be processed; then the sender waits."""

CREDIT_RESERVE = 16
"""Credits of the window that other threads may take between a check of what is left and the message that follows."""

BYTES_PER_CREDIT = 1 << 20
"""Bytes after which a message takes one more credit, so that unprocessed messages are bounded to 1 GiB. The last
message may exceed it."""

TREE_FANOUT = 8
"""Processes to which one process of a tree relays a message."""

MAX_DIRECT_RECEIVERS = 64
"""Receivers up to which a message goes directly to each. Waking 64 processes takes one process a third of a
millisecond, while a tree doubles the work of all of them together (docs/adr/0040 has the measurement)."""

MAX_REFUSALS = 7
"""Lookups of a process that refuses connections. The delay doubles each time, 2.5 s altogether."""

SHARED_COPY_MIN_BYTES = 32 << 10
"""Bytes from which a message goes directly to all receivers: they read one copy in shared memory, without a tree."""
