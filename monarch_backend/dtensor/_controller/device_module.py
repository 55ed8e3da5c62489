"""Streams and events of the workers' devices, with the interface that torch's code uses on the controller.

Workers execute records in order, so there is nothing to wait for between records: all of these do nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any


class Event:
    """As torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, _stream: Stream | None = None) -> None:
        """Nothing."""

    def wait(self, _stream: Stream | None = None) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def query(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True


class Stream:
    """As torch.cuda.Stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, _event: Event) -> None:
        """Nothing."""

    def wait_stream(self, _stream: Stream) -> None:
        """Nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def synchronize(self) -> None:
        """Nothing."""

    def query(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True


class DeviceHandle:
    """As the module torch.cuda: streams and events of the workers, and all else of this process' module."""

    Stream, Event = Stream, Event

    def __init__(self, module: Any = None) -> None:
        self._stream, self._module = Stream(), module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def current_stream(self, _device: Any = None) -> Any:
        """The only one."""
        return self._stream

    def stream(self, _stream: Any) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        return contextlib.nullcontext()
