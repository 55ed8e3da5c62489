"""A process ends with its parent by a pipe, on systems where the kernel does not see to that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PARENT = """
import os, signal, subprocess, sys
from monarch_backend._processes import parent_watch

pipe = parent_watch.descriptor()
assert parent_watch.descriptor() == pipe
command = [sys.executable, "-c", sys.argv[1], str(pipe)]
subprocess.Popen(command, pass_fds=[pipe], start_new_session="leader" in sys.argv)
if "forks" in sys.argv and os.fork() == 0:
    os.close(1)  # the test waits for the end of this pipe
    os.close(2)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""

BEGIN = """
import os, signal, subprocess, sys, time
from monarch_backend._processes import parent_watch
parent_watch.start(int(sys.argv[1]))
"""

CHILDREN = {
    "in Python code": BEGIN + "print('up', flush=True)\nwhile True: pass",
    "in a system call": BEGIN + "print('up', flush=True)\ntime.sleep(600)",
    "in a lock": BEGIN
    + "import threading\nprint('up', flush=True)\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "that ignores signals": BEGIN
    + "for s in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(s, signal.SIG_IGN)\n"
    + "print('up', flush=True)\nwhile True: pass",
}


def _started(child: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, child, *options]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    return parent


def _output_after_kill(parent: subprocess.Popen[str]) -> str:
    """Output of the parent's descendants after its SIGKILL. It ends when the last of them has ended."""
    parent.kill()
    out, _ = parent.communicate(timeout=60)
    assert parent.returncode == -signal.SIGKILL
    return out


@pytest.mark.parametrize("where", CHILDREN)
def test_child_ends_with_its_killed_parent(where: str) -> None:
    assert _output_after_kill(_started(CHILDREN[where])) == ""


def test_descendants_of_the_child_end_with_it() -> None:
    child = BEGIN + "subprocess.Popen(['sleep', '600'])\nprint('up', flush=True)\ntime.sleep(600)"
    assert _output_after_kill(_started(child, "leader")) == ""


def test_fork_of_the_parent_does_not_hide_its_end() -> None:
    """The fork runs until its input ends, which is after the output of the others."""
    parent = _started(CHILDREN["in a system call"], "forks")
    parent.kill()
    assert parent.stdout is not None
    assert parent.stdout.read() == ""
    parent.communicate(timeout=60)


def test_child_outlives_its_parent_on_request() -> None:
    child = BEGIN + (
        "parent_watch.outlive_parent()\n"
        "parent = os.getppid()\n"
        "print('up', flush=True)\n"
        "while os.getppid() == parent: time.sleep(0.01)\n"
        "time.sleep(0.2)\n"  # for the thread that would kill it
        "print('still there', flush=True)\n"
    )
    assert _output_after_kill(_started(child)) == "still there\n"


def test_pipe_is_not_inherited_by_other_programs() -> None:
    program = (
        "import os, subprocess, sys\n"
        "from monarch_backend._processes import parent_watch\n"
        "pipe = parent_watch.descriptor()\n"
        "print(any(os.get_inheritable(end) for end in parent_watch._pipe))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout == "False\n", done.stderr
