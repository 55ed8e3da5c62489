"""`python -m monarch_backend.cli`: the command line where the script is not on the PATH, for example over ssh."""

import sys

from monarch_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())
