"""Real sshd on loopback, with its own keys, configuration and port. It ends with the test.

It serves only the user that runs the tests. The machine's own keys and configuration are not touched.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SEPARATION = Path("/run/sshd")  # the empty folder that sshd needs when root runs it


@dataclass(frozen=True)
class Server:
    """A running sshd. ``options`` make ssh accept this server without questions."""

    port: int
    identity: Path
    options: list[str]
    log: Path


@functools.cache
def refusal() -> str:
    """Return the reason why sshd cannot run here, or ''."""
    path = "/usr/sbin:/sbin:" + os.environ.get("PATH", "")
    missing = [tool for tool in ("sshd", "ssh", "ssh-keygen") if shutil.which(tool, path=path) is None]
    if missing:
        return f"{', '.join(missing)} not found: install openssh-server and openssh-client"
    if os.geteuid() == 0 and not _SEPARATION.is_dir():
        try:
            _SEPARATION.mkdir(mode=0o755)
        except OSError as error:
            return f"sshd as root wants {_SEPARATION}: {error}"
    return ""


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Server]:
    """Yield a server that accepts connections."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = folder / "authorized_keys"
    keys.write_bytes((folder / "user.pub").read_bytes())
    keys.chmod(0o600)
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {keys}\nPidFile none\n"
        f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        f"AllowUsers {getpass.getuser()}\n"
    )
    path = shutil.which("sshd", path="/usr/sbin:/sbin:" + os.environ.get("PATH", "")) or "sshd"
    log = folder / "sshd.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [path, "-D", "-e", "-f", str(folder / "sshd_config")], stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        _wait(port, process, log)
        known = ["-o", f"UserKnownHostsFile={folder}/known_hosts", "-o", "GlobalKnownHostsFile=/dev/null"]
        yield Server(port, folder / "user", ["-F", "none", "-o", "IdentitiesOnly=yes", *known], log)
    finally:
        process.terminate()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"sshd does not listen: {log.read_text()}")
