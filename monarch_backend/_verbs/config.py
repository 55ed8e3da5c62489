"""Settings of verbs from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from monarch_backend._core import env
from monarch_backend._verbs.errors import VerbsError


@dataclass(frozen=True)
class Settings:
    """Settings of verbs. The defaults fit an unknown fabric.

    An acknowledgement may take 4.096 us * 2**timeout, and a packet is sent 1 + retries times. With 16 and 6 a dead link
    is detected after 1.9 s. By the specification devices may take up to four times as long. The retries are not 7,
    which soft-RoCE takes for infinity.
    """

    devices: tuple[tuple[str, int], ...] = ()  # with ports; port 0: all ports of the device. Empty: all devices
    gid_index: int | None = None
    binding: str = ""
    queue_pairs: int = 2  # per port and peer
    timeout: int = 16
    retries: int = 6
    traffic_class: int = 0
    service_level: int = 0
    cache_entries: int = 1024  # allocations that stay registered, per device
    cache_bytes: int = 64 << 30

    @property
    def silence(self) -> float:
        """Seconds within which a device must complete or fail a work request: twice the specification's limit."""
        return 2 * 4 * 4.096e-6 * 2.0**self.timeout * (1 + self.retries)

    def permits(self, device: str, port: int) -> bool:
        return not self.devices or any(name == device and number in (0, port) for name, number in self.devices)


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """Parse MONARCH_RDMA_DEVICES="rxe0,mlx5_1:2" and the other variables. Raises VerbsError for invalid values.

    >>> from_environment({"MONARCH_RDMA_DEVICES": "rxe0,mlx5_1:2"}).devices
    (('rxe0', 0), ('mlx5_1', 2))
    """

    def get(name: str) -> Any:
        try:
            return env.get(name, environment)
        except ValueError as error:
            raise VerbsError(str(error)) from None

    return Settings(
        devices=get("MONARCH_RDMA_DEVICES"),
        gid_index=get("MONARCH_RDMA_GID_INDEX"),
        binding=get("MONARCH_VERBS_PROVIDER"),
        queue_pairs=get("MONARCH_RDMA_QPS_PER_PEER"),
        timeout=get("MONARCH_RDMA_TIMEOUT"),
        retries=get("MONARCH_RDMA_RETRIES"),
        traffic_class=get("MONARCH_RDMA_TRAFFIC_CLASS"),
        service_level=get("MONARCH_RDMA_SERVICE_LEVEL"),
        cache_entries=get("MONARCH_RDMA_MR_CACHE_ENTRIES"),
        cache_bytes=get("MONARCH_RDMA_MR_CACHE_BYTES"),
    )
