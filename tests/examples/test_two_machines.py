"""examples/two_machines.py prints what docs/tutorials/two_machines.md shows, also after one of its hosts is killed."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from tests.examples.example_runner import EXAMPLES
from tests.hosts.support import World
from tests.support.hosts import hosts, refusal

PAGE = EXAMPLES.parent / "docs" / "tutorials" / "two_machines.md"


def shown() -> list[str]:
    """Return the lines of the page's last two text blocks: the output before and after the host is killed."""
    found = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for text in found[-2:] for line in text.splitlines()]


def comparable(lines: list[str]) -> list[str]:
    """Return the lines sorted, with pids and addresses masked. Failures of two ranks arrive in any order.

    The reason of the host's loss is cut off: the host refuses connections or does not reconnect.
    """
    masked = [re.sub(r"(pid|process) \d+", r"\1 PID", line) for line in lines]
    masked = [re.sub(r"(has closed the connection).*", r"\1", line) for line in masked]
    return sorted(re.sub(r"\b\d+\.\d+\.\d+\.\d+\b", "ADDRESS", line) for line in masked)


@pytest.mark.slow
def test_a_killed_host_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        namespaces = None if refusal() else stack.enter_context(hosts(3))
        world = stack.enter_context(World(namespaces, tmp_path))
        one, two = (world.daemon(index, env={"MONARCH_HOST_NAME": f"node{index}"}) for index in (1, 2))
        arguments = [one.address, two.address, "--steps", "5", "--pause", "0.2"]
        program = world.controller()
        run = program.start(EXAMPLES / "two_machines.py", None, arguments=arguments)
        try:
            run.read_until("step 2: ")
            two.process.kill()
            program.finish()
        finally:
            program.drop()
    assert run.returncode == 0, run.err
    printed = [line for line in run.out.splitlines() if not re.match(r"step \d+: \w+Error: ", line)]
    assert comparable(printed) == comparable(shown())
