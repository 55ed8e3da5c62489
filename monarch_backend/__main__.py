"""`python -m monarch_backend COMMAND` is `monarch-backend COMMAND`, with the interpreter that one names."""

import sys

from monarch_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())
