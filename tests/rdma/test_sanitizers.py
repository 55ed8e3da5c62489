"""Memory over TCP under AddressSanitizer with UBSan and under ThreadSanitizer: the driver in csrc/memory/stress/."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from monarch_backend._transport.network.tls import Ders
from tests.rdma import pretended_gpu
from tests.support import sanitizers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="memory over TCP is Linux's"),
]

# OpenSSL is not built with ThreadSanitizer, so its atomics are invisible to it.
NOT_OURS = "called_from_lib:libssl.so\ncalled_from_lib:libcrypto.so\nrace:libssl.so\nrace:libcrypto.so\n"


@pytest.mark.parametrize("portable", [False, True], ids=["linux", "portable"])
@pytest.mark.parametrize(("tls", "gpu"), [(False, False), (True, False), (False, True)], ids=["plain", "tls", "gpu"])
@pytest.mark.parametrize("kind", ["address", "thread"])
def test_many_threads_and_registrations_that_come_and_go(
    kind: str, tls: bool, gpu: bool, portable: bool, tmp_path: Path
) -> None:
    ders = Ders.of_secret(b"s" * 32)
    for name in ("certificate", "key", "ca"):
        (tmp_path / name).write_bytes(getattr(ders, name))
    (tmp_path / "suppressions").write_text(NOT_OURS)
    options = dict(sanitizers.OPTIONS)
    options["TSAN_OPTIONS"] += f":suppressions={tmp_path / 'suppressions'}"
    if gpu:
        options["MONARCH_GPU_DRIVER"] = pretended_gpu.library()
    command = [*sanitizers.prefix(kind), sanitizers.memory_driver(kind, portable), 14, tmp_path if tls else ""]
    print(sanitizers.checked(command, 300, **options))
