"""What the environment says about verbs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from monarch_backend.rdma.verbs._errors import VerbsError


@dataclass(frozen=True)
class Settings:
    """Defaults are for a fabric that nobody has described.

    An acknowledgement may take 4.096 us * 2**timeout and a packet is sent 1 + retries times: with 16 and 6 a link that
    is dead is found so after 1.9 s (devices may take up to four times as long, by the specification). Not 7 retries:
    soft-RoCE takes that for "for ever".
    """

    devices: tuple[tuple[str, int], ...] = ()  # and ports; 0: all ports of the device. Empty: all devices
    gid_index: int | None = None
    binding: str = ""
    queue_pairs: int = 2  # of each port, to each peer
    timeout: int = 16
    retries: int = 6
    traffic_class: int = 0
    service_level: int = 0
    cache_entries: int = 1024  # allocations that stay registered, for each device
    cache_bytes: int = 64 << 30

    @property
    def silence(self) -> float:
        """Seconds within which a device has to end a work request, one way or the other: twice what it may take for
        it by the specification.
        """
        return 2 * 4 * 4.096e-6 * 2.0**self.timeout * (1 + self.retries)

    def permits(self, device: str, port: int) -> bool:
        """This port may be used."""
        return not self.devices or any(name == device and number in (0, port) for name, number in self.devices)


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """MONARCH_RDMA_DEVICES="rxe0,mlx5_1:2" and the others. Raises VerbsError for what means nothing.

    >>> from_environment({"MONARCH_RDMA_DEVICES": "rxe0,mlx5_1:2"}).devices
    (('rxe0', 0), ('mlx5_1', 2))
    """

    def number(name: str, default: int, most: int, least: int = 0) -> int:
        text = environment.get(name, "")
        if not text:
            return default
        if not text.isdigit() or not least <= int(text) <= most:
            raise VerbsError(f"{name}={text!r}: a number from {least} to {most} is needed")
        return int(text)

    default = Settings()
    return Settings(
        devices=_devices(environment.get("MONARCH_RDMA_DEVICES", "")),
        gid_index=number("MONARCH_RDMA_GID_INDEX", 0, 65535) if environment.get("MONARCH_RDMA_GID_INDEX") else None,
        binding=environment.get("MONARCH_RDMA_BINDING", ""),
        queue_pairs=number("MONARCH_RDMA_QUEUE_PAIRS", default.queue_pairs, 16, 1),
        timeout=number("MONARCH_RDMA_TIMEOUT", default.timeout, 31, 1),
        retries=number("MONARCH_RDMA_RETRIES", default.retries, 7),
        traffic_class=number("MONARCH_RDMA_TRAFFIC_CLASS", default.traffic_class, 255),
        service_level=number("MONARCH_RDMA_SERVICE_LEVEL", default.service_level, 15),
        cache_entries=number("MONARCH_RDMA_CACHE_ENTRIES", default.cache_entries, 1 << 20),
        cache_bytes=number("MONARCH_RDMA_CACHE_BYTES", default.cache_bytes, 1 << 50),
    )


def _devices(text: str) -> tuple[tuple[str, int], ...]:
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, port = item.partition(":")
        if not name or (port and not (port.isdigit() and 1 <= int(port) <= 255)):
            raise VerbsError(
                f"MONARCH_RDMA_DEVICES={text!r}: names as rxe0 or mlx5_1:2 are needed, with commas between"
            )
        found.append((name, int(port or 0)))
    return tuple(found)
