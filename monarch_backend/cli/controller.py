"""Main program of `monarch-backend run --controller` on each node: a host, and on the first node the script as well.

``python -m monarch_backend.cli.controller [-m MODULE | SCRIPT] ARGUMENTS...``, with a launcher's variables.
"""

from __future__ import annotations

import os
import runpy
import sys

from monarch_backend.job import host_mesh_from_env


def main() -> None:
    """Run until the script ends; on other nodes, until it has ended on the first one."""
    words = sys.argv[1:]
    host_mesh_from_env()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
