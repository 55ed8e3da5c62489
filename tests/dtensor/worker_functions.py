"""Functions that workers run. Workers import this module."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._rng import philox
from monarch_backend.dtensor._worker import Executor, attention, op_functions, random_ops
from monarch_backend.dtensor._worker.control_actor import inboxes


def left_in_inboxes() -> int:
    """Return the number of transfers in the inboxes of this process."""
    return sum(
        len(inbox._parts) + len(inbox._kept) + len(inbox._refused) + len(inbox._readers) for inbox in inboxes.values()
    )


class Box:
    """A container that torch's pytree does not know."""

    def __init__(self, content: Any) -> None:
        self.content = content


def fails_on(rank: int, _: Any) -> None:
    """Raise on one rank while the other ranks wait for it in a collective."""
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(1))


def sum_of_ranks() -> int:
    """Return the sum of all ranks, calculated by a collective of all ranks."""
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def checked_look_up(indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look up rows of the table on the CPU, where torch checks an index."""
    return torch.nn.functional.embedding(indices.cpu(), table.cpu()).to(table.device)


def where_it_is(x: Any) -> tuple[str, str, list[Any]]:
    """Return the device of this worker's shard, the worker's torch release and the shard's values."""
    return str(x.to_local().device), torch.__version__[:3], x.to_local().tolist()


def fails() -> None:
    """Raise on all ranks."""
    raise ValueError("on purpose")


def doubled_and_summed(x: Any) -> tuple[Any, Any]:
    """Return a doubled DTensor and a sum, calculated by the DTensor of the worker's own torch."""
    return x.redistribute(x.device_mesh, [Replicate()]) * 2, x.sum().full_tensor().item()


def doubled_in_place(x: Any) -> None:
    """Double a DTensor in place, by the DTensor of the worker's own torch."""
    x.add_(x)


def doubled_plain(x: torch.Tensor) -> float:
    """Double a plain tensor in place and return its sum."""
    return float(x.mul_(2).sum())


def autocasts_of_xla() -> list[str]:
    """Operators for which torch_xla has a rule in autocast."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastXLA")
    return [name.removeprefix("aten::") for name in names]


def dtypes_in_autocast(step: Any, x: Any) -> list[str]:
    """Return the dtypes of the step's results under torch_xla's own autocast."""
    with torch.autocast("xla"):
        return [str(each.dtype) for each in step(x.full_tensor())]


def execution_count() -> int:
    """Return how often XLA has executed recorded operations."""
    from torch_xla.debug import metrics

    found = metrics.metric_data("ExecuteTime")
    return 0 if found is None else int(found[0])


def set_max_recorded_words(words: int) -> int:
    """Set the number of recorded words after which XLA executes them, and return the previous number."""
    from monarch_backend.dtensor._worker.xla import xla_device

    before, xla_device.MAX_RECORDED_WORDS = xla_device.MAX_RECORDED_WORDS, words
    return before


class _Numbers:
    """Simulated state of a GPU's random generator.

    As on a GPU, the seed and the count of numbers drawn determine the next numbers.
    """

    def __init__(self) -> None:
        self._at, self._known = (0, 0), torch.get_rng_state()

    def set_state(self, state: bytes, _device: torch.device) -> None:
        seed, drawn = self._at = philox._STATE.unpack(state)
        torch.manual_seed(seed * 1_000_003 + drawn)
        self._known = torch.get_rng_state()

    def state_of(self, device: torch.device) -> bytes:
        seed, drawn = self._at
        if not torch.equal(self._known, torch.get_rng_state()):
            self.set_state(philox._STATE.pack(seed, drawn + 4), device)
        return philox._STATE.pack(*self._at)

    def after(self, draw: Any) -> Any:
        """Wrap a function that draws numbers, so that the next numbers depend on seed and count only."""

        def drawn(*args: Any, **kwargs: Any) -> Any:
            try:
                return draw(*args, **kwargs)
            finally:
                self.state_of(torch.device("cpu"))

        return drawn


class ExecutorWithoutGpu(Executor):
    """Executor that runs a GPU worker's commands on the CPU.

    The device "cuda" means the CPU, and attention uses the functions of a GPU's worker.
    """

    def __init__(self, device_type: str, timeout: float) -> None:
        super().__init__("cpu", timeout)
        self.inbox = inboxes[device_type]  # the inbox of the control actor
        op_functions.constant = _with_gpus_on_the_cpu
        numbers = _Numbers()
        random_ops.state_of, random_ops.set_state = numbers.state_of, numbers.set_state
        random_ops._drawn, random_ops.whole = numbers.after(random_ops._drawn), numbers.after(random_ops.whole)
        for name, ours in (("", "forward"), ("_backward", "backward")):
            operator = f"aten._scaled_dot_product_flash_attention_for_cpu{name}.default"
            op_functions._REPLACED[operator] = getattr(attention, ours)


def _with_gpus_on_the_cpu(tagged: list[Any], device: torch.device) -> Any:
    return device if tagged == [_protocol.Tag.DEVICE, "cuda"] else _protocol.constant(tagged, device)


def reads_its_memory(x: Any) -> bool:
    """Return whether a local DTensor's shard has its values at its address and a storage that starts there."""
    local = x.to_local()
    first = ctypes.c_float.from_address(local.data_ptr()).value
    return bool(first == local.flatten()[0]) and local.untyped_storage().data_ptr() == local.data_ptr()


# What `Executor.inspect` calls ----------------------------------------------------------------------------------


def count(commands: Any) -> int:
    """Return the number of tensors that are held."""
    return len(commands.tensors)


def known(commands: Any) -> int:
    """Return the number of known signatures."""
    return len(commands.functions)


def live_bytes(commands: Any) -> int:
    """Return the bytes of the held tensors' storages, each storage once."""
    storages = {}
    for each in commands.tensors.values():
        if isinstance(each, torch.Tensor) and not each.is_meta:
            storage = each.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
