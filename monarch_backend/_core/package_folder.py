"""Folder of this package, by which the files of its code are recognised in a stack."""

import os
from pathlib import Path

PACKAGE_FOLDER = str(Path(__file__).parents[1]) + os.sep
