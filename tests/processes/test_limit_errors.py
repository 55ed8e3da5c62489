"""Low limits raise ResourceLimitError with the limit's name. State directories are private."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core.limits import ResourceLimitError, explained, start_thread
from monarch_backend._core.state import make_private
from monarch_backend._hosts.startup_handshake import log_file
from monarch_backend._processes import resource_limits
from monarch_backend._processes.resource_limits import SpawnLimitError, check_spawn
from monarch_backend._transport.network.auth import user_secret

_PROGRAM = """
import resource, torch, torch.distributed as dist
from monarch_backend.actor import this_host
from monarch_backend.process_group import empty_shared
value = {value}
print(value)
resource.setrlimit(resource.{name}, (value, value))
for use in (lambda: this_host().spawn_procs({{"gpus": 1}}), lambda: empty_shared(10)):
    try:
        use()
    except RuntimeError as error:
        print(type(error).__name__, error)
"""
_USED = "int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()"


@pytest.mark.parametrize(("name", "value"), [("RLIMIT_FSIZE", "1024"), ("RLIMIT_AS", _USED + " + (64 << 20)")])
def test_low_rlimit_raises_resource_limit_error(name: str, value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(name=name, value=value)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    number, *said = done.stdout.splitlines()
    assert [line.startswith("ResourceLimitError can't reserve") for line in said] == [True, True], done
    for line in said:
        assert f"{name} (ulimit -{'f' if name == 'RLIMIT_FSIZE' else 'v'}) is {number}" in line


def test_thread_that_cannot_start_names_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    with pytest.raises(ResourceLimitError, match=r"can't start the thread 'helper'.*pids.max of the control group"):
        start_thread(threading.Thread(target=print, name="helper"))


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match=r"^something else$"), explained("do it"):
        raise RuntimeError("something else")


@pytest.mark.needs("proc")
def test_no_proc_raises_spawn_limit_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource_limits, "PROC", tmp_path)
    with pytest.raises(SpawnLimitError, match=r"is not mounted, .* Mount it"):
        check_spawn(1, plain=False, descriptors_each=0)


@pytest.fixture(params=[0o000, 0o022, 0o277, 0o777], ids=oct)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("_umask")
def test_state_directories_are_private_with_any_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "new" / "state"))
    root = tmp_path / "new" / "state" / "monarch_backend"
    assert log_file(None).parent == root / "logs"
    assert [_mode(path) for path in (root, root / "logs", root.parent)] == [0o700] * 3


def test_state_directory_that_others_can_read_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tmp_path.chmod(0o755)
    (tmp_path / "monarch_backend").mkdir(mode=0o755)
    (tmp_path / "mine").mkdir(mode=0o755)
    user_secret()
    assert _mode(tmp_path / "monarch_backend") == 0o700
    make_private(tmp_path / "mine")  # not a state directory: keeps the mode that its owner chose
    assert (_mode(tmp_path / "mine"), _mode(tmp_path)) == (0o755, 0o755)
