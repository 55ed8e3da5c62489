"""Streams and events of the workers' devices, with the interface that torch's code uses on the controller.

Workers execute commands in order, so there is nothing to wait for between commands: all of these do nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any


class _Happened:
    """Base of streams and events, which have nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        """Do nothing."""

    def query(self) -> bool:
        return True


class Event(_Happened):
    record = wait = _Happened.synchronize


class Stream(_Happened):
    """Stream with the interface of torch.cuda.Stream."""

    wait_event = wait_stream = _Happened.synchronize

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class DeviceHandle:
    """Module like torch.cuda: streams and events of the workers, all other names from this process's module."""

    Stream, Event = Stream, Event

    def __init__(self, module: Any = None) -> None:
        self._stream, self._module = Stream(), module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def current_device(self) -> int:
        """Return 0: each worker has one device."""
        return 0

    def current_stream(self, _device: Any = None) -> Any:
        return self._stream

    def stream(self, _stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class XlaModule:
    """Module torch.xla of a controller, which has no such device. XLA's random numbers are the CPU's here."""

    def device_count(self) -> int:
        """Return 0: there is no state of random numbers beside the CPU's."""
        return 0
