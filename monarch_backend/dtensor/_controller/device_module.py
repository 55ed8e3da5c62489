"""Streams and events of the workers' devices, with the interface that torch's code uses on the controller.

Workers execute commands in order, so there is nothing to wait for between commands: all of these do nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any


class Event:
    """Event with the interface of torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, _stream: Stream | None = None) -> None:
        """Do nothing."""

    def wait(self, _stream: Stream | None = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True


class Stream:
    """Stream with the interface of torch.cuda.Stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, _event: Event) -> None:
        """Do nothing."""

    def wait_stream(self, _stream: Stream) -> None:
        """Do nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that has happened."""
        return event or Event()

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True


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
        """Return the only stream."""
        return self._stream

    def stream(self, _stream: Any) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()


class XlaModule:
    """Module torch.xla of a controller, which has no such device. XLA's random numbers are the CPU's here."""

    def device_count(self) -> int:
        """Return 0: there is no state of random numbers beside the CPU's."""
        return 0
