"""MONARCH_DEBUG in the environment: each operation waits for its result and raises at its own line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.actor.script_runner import Run

SCRIPT = """
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from monarch_backend.actor import this_host
from monarch_backend.dtensor import RemoteOpError

if __name__ == "__main__":
    with this_host().spawn_procs({"x": 2}) as procs:
        mesh = procs.device_mesh("cpu")
        table, rows = (distribute_tensor(each, mesh, [Replicate()]) for each in (torch.ones(3, 2), torch.tensor([9])))
        at = "nowhere"
        try:
            at = "the operation"
            found = torch.nn.functional.embedding(rows, table)
            at = "the next one"
            found = found + 1
            at = "the read"
            found.tolist()
        except RemoteOpError as error:
            print(at, "|", error.operation, "|", error.issued_at.strip().splitlines()[-1].strip())
        try:
            at = "the check"
            torch._assert_async(rows.to_local() == 0)
            at = "the read"
            rows.tolist()
        except RemoteOpError as error:
            print(at, "|", error.operation, "|", error.issued_at.strip().splitlines()[-1].strip())
        x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
        step = torch.compile(lambda x: x + 1, backend="monarch", options={"inductor": False})
        print((x * 2).sum().item(), step(x).tolist())
"""
OPERATION = "aten.embedding.default | found = torch.nn.functional.embedding(rows, table)"
CHECK = "aten._assert_async.default | torch._assert_async(rows.to_local() == 0)"
GOES_ON = "30.0 [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]"


@pytest.mark.slow
@pytest.mark.parametrize(("value", "where", "check"), [
    ("1", "the operation", "the check"),
    ("", "the read", "the read"),
    pytest.param("0", "the read", "the read", marks=pytest.mark.slow),
])  # fmt: skip
def test_debug_mode_raises_at_the_failed_operation(
    run_script: Callable[..., Run], value: str, where: str, check: str
) -> None:
    ended = run_script(SCRIPT, env={"MONARCH_DEBUG": value})
    assert ended.out.splitlines() == [f"{where} | {OPERATION}", f"{check} | {CHECK}", GOES_ON], ended.err
    assert ended.returncode == 0
