"""Folder of this package, by which the files of its code are recognised in a stack."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE_FOLDER = str(Path(__file__).parents[1]) + os.sep
