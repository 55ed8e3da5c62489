"""The user's state directory, for the secret, job files and logs. Only the user can read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def state_directory() -> Path:
    """Return ``$XDG_STATE_HOME/monarch_backend``, or its default in the home directory. It may not exist."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "monarch_backend"


def make_private(path: Path) -> Path:
    """Make the directory ``path`` with mode 0700, whatever the umask, and its missing parents.

    Older releases made directories of the state that other users can enter. Such a directory gets mode 0700, too.
    Raises OSError.
    """
    root = state_directory()
    if root in path.parents:
        make_private(root)
    for directory in reversed([each for each in (path, *path.parents) if not each.exists()]):
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:  # another process was faster
            continue
        directory.chmod(0o700)  # the umask may have removed bits of the owner
    status = path.stat()
    is_ours = status.st_uid == os.geteuid() and (path == root or root in path.parents)
    if is_ours and stat.S_IMODE(status.st_mode) != 0o700:
        path.chmod(0o700)
    return path
