"""Events of a controller: batches, reads, captured steps, and compilations with their reasons."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_backend._telemetry import recorder
from monarch_backend._telemetry.kinds import Kind, Status
from monarch_backend._telemetry.reader import Area, RecordedEvent
from monarch_backend.dtensor import RemoteOpError
from monarch_backend.dtensor._controller import command_stream
from tests.dtensor.conftest import workers_of


class Seen:
    """Events of this process since this object was made."""

    def __init__(self) -> None:
        self._since = 0
        self._since = max((event.number for event in self._all()), default=0)

    def _all(self) -> list[RecordedEvent]:
        area = recorder.area()
        assert area is not None
        with Area(os.dup(area.descriptor)) as opened:
            own = next(each for each in opened.processes(events=True) if each.pid == os.getpid())
        return [each for each in own.events if each.kind == Kind.CONTROLLER and each.number > self._since]

    def named(self, detail: str) -> list[RecordedEvent]:
        return [each for each in self._all() if each.detail.startswith(detail)]


@pytest.fixture
def workers(mesh_of: Callable[[str], Any]) -> Any:
    return workers_of(mesh_of("2"))


def test_read_of_a_value_records_batch_and_wait(workers: Any) -> None:
    tensor = workers.put(torch.ones(4))
    workers.synchronize()
    with workers.stream._sending:  # the timer does not send the deletion of the sum meanwhile
        seen = Seen()
        before = workers.stream.nbytes
        assert tensor.sum().item() == 4
        [batch], [read] = seen.named("send batch"), seen.named("read item")
        assert (batch.name, batch.value) == (workers.name, workers.stream.nbytes - before)
        assert batch.reference == workers.stream.batches
    assert (read.name, read.status) == (workers.name, Status.OK) and read.duration_ns > 0


def test_operations_of_one_batch_record_one_event(workers: Any) -> None:
    tensor = workers.put(torch.ones(4))
    workers.synchronize()
    seen = Seen()
    with workers.stream._sending:  # the timer sends nothing meanwhile
        for _ in range(5):
            tensor = tensor + tensor
        assert not seen.named("")
        workers.stream.flush()
    assert len(seen.named("send batch")) == 1


def test_read_of_a_failed_operation_records_an_error(workers: Any) -> None:
    seen = Seen()
    index = workers.put(torch.tensor([9]))
    with pytest.raises(RemoteOpError):
        workers.put(torch.ones(3)).index_select(0, index).sum().item()
    assert [each.status for each in seen.named("read item")] == [Status.ERROR]


def test_controller_far_ahead_records_its_wait(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_stream, "ACKNOWLEDGE_EVERY_WORDS", 0)
    monkeypatch.setattr(command_stream, "MAX_INFLIGHT_BATCHES", 0)
    tensor = workers.put(torch.ones(4))
    seen = Seen()
    tensor += 1
    workers.stream.flush()
    assert seen.named("wait for workers")


def test_captured_step_records_its_compilations_with_reasons(workers: Any) -> None:
    @torch.compile(backend="monarch", options={"inductor": False}, dynamic=False)
    def step(x: Any) -> Any:
        return x * 2 + 1

    seen = Seen()
    small = workers.put(torch.ones(3))
    for _ in range(2):
        step(small)
    assert len(seen.named("compile")) == len(seen.named("capture")) - len(seen.named("captured step")) == 1
    assert len(seen.named("captured step")) == 2
    step(workers.put(torch.ones(5)))
    [again] = seen.named("recompile: ")
    assert "size mismatch" in again.detail and again.duration_ns > 0
    assert len(seen.named("captured step")) == 3


def test_step_that_cannot_be_captured_records_why(workers: Any) -> None:
    @torch.compile(backend="monarch")
    def step(x: Any) -> Any:
        return torch.bernoulli(x) + 1  # its random numbers depend on values

    seen = Seen()
    step(workers.put(torch.ones(3, 3)))
    [left] = seen.named("left to eager code: ")
    assert "bernoulli" in left.detail and left.status == Status.ERROR
