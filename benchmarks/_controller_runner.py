"""Runner process of controller.py: has one contender, and runs a case on each request.

    python benchmarks/_controller_runner.py ours|plain|monarch|simulated:N|lm:HOW:N (see _controller_model.py)

A request is a line of JSON on standard input, ``{"case": ..., "count": n}``. The answer is a line of JSON: seconds for
each operation or step.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

Case = Callable[[int], Any]


def loop(operation: Callable[[], object], end: Callable[[], object], others: Sequence[int] = ()) -> Case:
    """Return a case that runs ``operation`` in a loop and returns four times in seconds for each operation.

    They are: until all operations are issued, until all are done, CPU time of this process, mean CPU time of the
    processes ``others``. CPU time depends less on the load of the machine.
    """

    def run(count: int) -> tuple[float, ...]:
        end()
        here, there = on_processor(os.getpid()), sum(map(on_processor, others))
        start = time.perf_counter()
        for _ in range(count):
            operation()
        issued = time.perf_counter() - start
        end()
        done = time.perf_counter() - start
        here, there = on_processor(os.getpid()) - here, sum(map(on_processor, others)) - there
        return issued / count, done / count, here / count, there / count / max(1, len(others))

    return run


def on_processor(pid: int) -> float:
    """Return the CPU time of a process in seconds, over its live threads."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def nothing() -> None:
    """Do nothing: for cases without workers to wait for."""


def plain() -> dict[str, Case]:
    """Return the floors: a plain tensor, and a tensor subclass in Python that does nothing."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (8, 16), strides=(16, 1), dtype=torch.float32)

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return cls()

    a, b, wrapper = torch.randn(8, 16), torch.randn(8, 16), Wrapper()
    return {"add": loop(lambda: a + b, nothing), "subclass": loop(lambda: wrapper + wrapper, nothing)}


def dtensor_operations(x: Any, y: Any) -> dict[str, Callable[[], object]]:
    """Return typical operations on DTensors of shape (8, 16) that are sharded by rows."""
    return {
        "x + y": lambda: x + y,
        "x * 2": lambda: x * 2,
        "x / 2.5": lambda: x / 2.5,
        "1 - x": lambda: 1 - x,
        "x.mul_(1.0)": lambda: x.mul_(1.0),
        "x.add_(y)": lambda: x.add_(y),
        "x.view(-1)": lambda: x.view(-1),
        "x.t()": lambda: x.t(),
        "x[:, 1:]": lambda: x[:, 1:],
        "torch.cat([x, y], 1)": lambda: torch.cat([x, y], 1),
        "x[0], gathered": lambda: x[0],
        "torch.cat([x, y]), gathered": lambda: torch.cat([x, y]),
    }


def ours() -> dict[str, Case]:
    """Return operations on remote tensors and DTensors with two workers.

    "redistribute, ours" is only the function that replaces torch's `redistribute_local_tensor`.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute

    from monarch_backend.actor import this_host
    from monarch_backend.dtensor._controller import controller_mesh

    mesh = this_host().spawn_procs({"x": 2}).device_mesh("cpu")
    workers = controller_mesh.workers_of(mesh)
    assert workers is not None
    a, b = workers.put(torch.randn(8, 16)), workers.put(torch.randn(8, 16))
    x, y = (DTensor.from_local(each, mesh, [Shard(0)]) for each in (a, b))
    pids = workers.ask("pid")
    target = x.redistribute(mesh, [Replicate()])._spec

    def planned() -> Any:
        return _redistribute.redistribute_local_tensor(a, x._spec, target)

    return {
        "add": loop(lambda: a + b, workers.synchronize, pids),
        "dtensor": loop(lambda: x + y, workers.synchronize, pids),
        "redistribute": loop(lambda: x.redistribute(mesh, [Replicate()]), workers.synchronize, pids),
        "redistribute, ours": loop(planned, workers.synchronize, pids),
        "item": loop(lambda: a.sum().item(), workers.synchronize, pids),
        **{name: loop(each, workers.synchronize, pids) for name, each in dtensor_operations(x, y).items()},
    }


def simulated(size: int) -> dict[str, Case]:
    """Return operations of a controller with simulated workers: only the controller's cost."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from monarch_backend.dtensor import simulated_mesh

    mesh = simulated_mesh((size,), ("x",))
    x = distribute_tensor(torch.randn(8 * size, 16), mesh, [Shard(0)])
    uneven = distribute_tensor(torch.randn(8 * size - 3, 16), mesh, [Shard(0)])
    a: Any = x.to_local()
    assert isinstance(x, DTensor)
    return {
        "add": loop(lambda: a + a, nothing),
        "dtensor": loop(lambda: x + x, nothing),
        "uneven": loop(lambda: uneven + uneven, nothing),
        "redistribute": loop(lambda: x.redistribute(mesh, [Replicate()]), nothing),
    }


def torch_dtensor() -> dict[str, Case]:
    """Return operations of torch's DTensor alone, on torch's fake process group and without workers."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    meta = torch.empty(8, 16, device="meta")
    x = DTensor.from_local(meta, mesh, [Shard(0)])
    # These shards are on the CPU. Operations of meta tensors are mostly Python and would dominate the times.
    one, other = (DTensor.from_local(torch.randn(4, 16), mesh, [Shard(0)]) for _ in range(2))
    return {
        "dtensor": loop(lambda: x + x, nothing),
        "redistribute": loop(lambda: x.redistribute(mesh, [Replicate()]), nothing),
        **{name: loop(each, nothing) for name, each in dtensor_operations(one, other).items()},
    }


def operation_names() -> list[str]:
    """Return the names of the operations of `dtensor_operations`."""
    return list(dtensor_operations(None, None))


def monarch() -> dict[str, Case]:
    """Return an addition with torchmonarch's tensor engine on two workers."""
    engine = importlib.import_module("monarch")
    host = importlib.import_module("monarch.actor").this_host()
    mesh = host.spawn_procs(per_host={"gpus": 2})
    mesh.activate().__enter__()
    a, b = torch.randn(8, 16), torch.randn(8, 16)
    return {"add": loop(lambda: a + b, lambda: engine.fetch_shard(a + b, gpus=0).result())}


def language_model(how: str, size: int) -> dict[str, Case]:
    """Return training steps of examples/train_lm.py with tensor parallelism, built as in `_controller_model.build`."""
    import _controller_model

    built = _controller_model.build(how, size)

    def run(count: int) -> float:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            built.step().item()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def records(count: int) -> list[int]:
        """Return the number of records of each step."""
        assert built.records is not None
        marks = [built.records()]
        for _ in range(count):
            built.step()
            marks.append(built.records())
        return [after - before for before, after in itertools.pairwise(marks)]

    return {"step": run, "records": records}


def cases_of(name: str) -> dict[str, Case]:
    """Return the cases of a contender."""
    kind, _, rest = name.partition(":")
    if kind == "simulated":
        return simulated(int(rest))
    if kind == "lm":
        how, _, size = rest.partition(":")
        return language_model(how, int(size or 0))
    made: dict[str, Case] = {"plain": plain, "ours": ours, "monarch": monarch, "dtensor": torch_dtensor}[kind]()
    return made


def requests() -> Iterator[dict[str, Any]]:
    """Yield the requests from standard input. Under torchrun rank 0 reads and broadcasts them."""
    rank = int(os.environ.get("RANK", 0))
    while True:
        line = sys.stdin.readline() if rank == 0 else ""
        if "RANK" in os.environ:
            import torch.distributed as dist

            box = [line]
            dist.broadcast_object_list(box)
            line = box[0]
        if not line:
            return
        yield json.loads(line)


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr, not among the answers
    cases = cases_of(sys.argv[1])
    first = int(os.environ.get("RANK", 0)) == 0
    if first:
        print(json.dumps("ready"), file=answers, flush=True)
    for request in requests():
        result = cases[request["case"]](request["count"])
        if first:
            print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
