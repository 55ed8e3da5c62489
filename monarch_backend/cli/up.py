"""`monarch-backend up`: a host, until it is told to end. What it does is hosts/_daemon.py's."""

from __future__ import annotations

import sys


def run(address: str) -> int:
    """0 after SIGTERM or Ctrl-C; 2, with the reason, if it can't listen there."""
    from monarch_backend.hosts import run_worker_loop_forever

    def ready(host: str, port: int) -> None:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"monarch_backend: this host is up: tcp://{where}", flush=True)

    try:
        run_worker_loop_forever(address, on_ready=ready)
    except (OSError, ValueError) as error:
        print(f"monarch-backend up: {error}", file=sys.stderr)
        return 2
    return 0
