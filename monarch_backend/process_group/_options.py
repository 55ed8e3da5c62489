"""Values of ``pg_options=`` in ``init_process_group`` and ``new_group`` for backend "monarch"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Options:
    """Options of the backends behind the routes, by device type: the ``pg_options=`` of ``init_process_group``.

    ``by_device["cuda"]`` takes torch's ``ProcessGroupNCCL.Options``. torch's options object may also be given alone:
    that of NCCL is used for "cuda", that of XCCL for "xpu".

    >>> from monarch_backend import Options
    >>> Options(by_device={}).for_device("cpu") is None
    True
    """

    by_device: dict[str, Any] = field(default_factory=dict)

    def for_device(self, device: str) -> Any:
        """Return the options of one device type, None if there are none."""
        return self.by_device.get(device)

    @classmethod
    def parse(cls, given: Any) -> Options:
        """Convert the ``pg_options`` of a caller: Options, an options object of torch, or None.

        Raises TypeError for any other object.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        name = type(given).__qualname__
        if name in ("ProcessGroupNCCL.Options", "ProcessGroupNCCL2.Options"):
            return cls({"cuda": given})
        if name in ("ProcessGroupXCCL.Options",):
            return cls({"xpu": given})
        raise TypeError(
            f"pg_options of type {name} belongs to no route of backend 'monarch': pass "
            "monarch_backend.Options(by_device={'cuda': ProcessGroupNCCL.Options(...)}) or a ProcessGroupNCCL.Options"
        )
