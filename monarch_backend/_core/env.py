"""Settings of the package: the environment variables, their types, defaults and units, in one table.

No other module reads a variable of the package. `get` reads one setting, `check` reads all of them. An unknown name or
a bad value raises ValueError with the valid ones. Nothing is read when this module is imported.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PREFIX = "MONARCH_"

PRIVATE_PREFIXES = ("MONARCH_TEST_", "MONARCH_STRESS_")
"""Names of the project's own tests."""

FOREIGN = frozenset(
    {
        "MONARCH_FILE_LOG",
        "MONARCH_STDERR_LOG",
        "MONARCH_LOG_SUFFIX",
        "MONARCH_V0_WORKAROUND_DO_NOT_USE",
        "MONARCH_HOST_MESH_V1_REMOVE_ME_BEFORE_RELEASE",
    }
)
"""Names of the package torchmonarch, which may be set for programs that use both packages. They have no effect here."""


class Setting(NamedTuple):
    """One environment variable.

    ``type`` is flag, integer, choice, text, path or list. ``values`` completes "NAME='text': ..." in an error;
    ``parse`` raises ValueError. The value of a ``secret`` is in no error.
    """

    name: str
    type: str
    default: Any
    unit: str
    values: str
    parse: Callable[[str], Any]
    doc: str
    secret: bool = False


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse


def _flag(text: str) -> bool:
    return _one_of("0", "1")(text) == "1"


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least or (most is not None and int(text) > most):
            raise ValueError
        return int(text)

    return parse


def _zero_or(least: int, most: int) -> Callable[[str], int]:
    return lambda text: 0 if text == "0" else _number(least, most)(text)


def _ports(text: str) -> tuple[tuple[str, int], ...]:
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, colon, port = item.partition(":")
        if not name:
            raise ValueError
        found.append((name, _number(1, 255)(port) if colon else 0))
    return tuple(found)


def _names(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    for name in found:
        _one_of("gloo", "nccl")(name)
    return found


_TABLE = (
    Setting("MONARCH_SHM", "flag", True, "", "give 1, or 0 to use Gloo for all CPU tensors", _flag,
            "Ranks of one host exchange CPU tensors through shared memory."),
    Setting("MONARCH_SHM_ARENA_BYTES", "integer", 256 << 20, "bytes",
            "give a number of bytes, 1048576 or more, or leave it unset", _number(1 << 20),
            "Limit of the shared memory of one process."),
    Setting("MONARCH_PREFAULT_BYTES", "integer", 64 << 20, "bytes",
            "give 0 for none, or bytes from 1048576 to 536870912", _zero_or(1 << 20, 512 << 20),
            "Memory that each process of an actor program commits in the background before its first large message."),
    Setting("MONARCH_IDLE_MEMORY_TIMEOUT", "integer", 30, "seconds", "give 0 for never, or seconds from 1 to 1000000",
            _zero_or(1, 1000000),
            "Time after which the memory of actor messages is given back to the system if it is not used. 0: never. "
            "Without effect where there are RDMA devices."),
    Setting("MONARCH_CMA_MIN_BYTES", "integer", 4 << 20, "bytes",
            "give a number of bytes, 0 for never, or leave it unset", _number(0),
            "Size from which ranks read a piece of a tensor from each other's memory. 0: never."),
    Setting("MONARCH_DEBUG", "flag", False, "", "give 1, or 0", _flag,
            "Print which routes are chosen, and why, to standard error."),
    Setting("MONARCH_AS", "list", (), "", "give gloo, nccl, or gloo,nccl, or leave it unset", _names,
            "Backends of torch whose groups are made by this one: gloo for CPU tensors, nccl for GPU tensors."),
    Setting("MONARCH_BUSY_POLL", "choice", "", "", "1 to wait by spinning first, 0 to sleep at once, or unset",
            _one_of("0", "1"),
            "Whether a process spins before it sleeps. Unset: it spins if there are enough processors."),
    Setting("MONARCH_START_METHOD", "choice", "", "", "it can be fork or spawn, or unset for the better one",
            _one_of("fork", "spawn"), "How processes are started. Unset: fork, where the fork server can."),
    Setting("MONARCH_PRELOAD_TORCH", "flag", True, "", "give 1, or 0", _flag,
            "The fork server imports torch once, for all processes. 0: a forked process imports it if its code does. "
            "Then programs without tensors use 1.5 s of CPU time and 200 MB less on each host."),
    Setting("MONARCH_SECRET", "text", "", "", "64 hexadecimal digits", str,
            "The job's secret. A file is safer: other processes may see the environment.", secret=True),
    Setting("MONARCH_SECRET_FILE", "path", "", "", "a file of mode 600", str,
            "File with secrets of jobs, one in each line."),
    Setting("MONARCH_TLS", "flag", True, "", "0 for none, or unset", _flag, "Connections between hosts are encrypted."),
    Setting("MONARCH_TLS_CA", "path", "", "", "a file in PEM", str,
            "Authorities that sign the certificates of hosts."),
    Setting("MONARCH_TLS_CERT", "path", "", "", "a file in PEM", str, "Certificate of this host."),
    Setting("MONARCH_TLS_KEY", "path", "", "", "a file in PEM", str, "Private key of this host's certificate."),
    Setting("MONARCH_HOST_NAME", "text", "", "", "any text", str,
            "Name of this host in messages. Unset: the system's host name."),
    Setting("MONARCH_HOST_TIMEOUT", "integer", 5, "seconds", "give 0 for never, or seconds from 4 to 100",
            _zero_or(4, 100),
            "Time in which ranks and launchers report a host that is cut off. 0: never."),
    Setting("MONARCH_TREE_FANOUT", "integer", None, "hosts", "a number of hosts, 1 or more", _number(1),
            "Hosts to which one host forwards a message for many hosts. Unset: 8."),
    Setting("MONARCH_RDMA_TRANSPORT", "choice", "", "", "one of 'tcp', 'verbs', or unset for the best route",
            _one_of("tcp", "verbs"), "Route to registered memory of other hosts."),
    Setting("MONARCH_CMA", "flag", True, "", "0 not to use process_vm_readv, or unset", _flag,
            "Copy memory of other processes of this host with process_vm_readv."),
    Setting("MONARCH_CMA_THREADS", "integer", 2, "threads", "how many threads make a large copy, 1 to 16",
            _number(1, 16), "Threads that share one large copy between processes of this host."),
    Setting("MONARCH_GPU_IPC", "flag", True, "", "0 not to map GPU memory, or unset", _flag,
            "Map GPU memory of other processes of this host."),
    Setting("MONARCH_GPU_DRIVER", "path", "", "", "a library", str,
            "Library of the GPU driver. Unset: that of the vendor torch was built for."),
    Setting("MONARCH_RDMA_DEVICES", "list", (), "", "names as rxe0 or mlx5_1:2 are needed, with commas between",
            _ports, "Ports of NICs that may be used. Unset: all active ones."),
    Setting("MONARCH_RDMA_GID_INDEX", "integer", None, "", "a number from 0 to 65535 is needed", _number(0, 65535),
            "Index of the port's address. Unset: the one nearest to the peer's address."),
    Setting("MONARCH_VERBS_PROVIDER", "choice", "", "", "pyverbs or ibverbs, or unset for the first that loads",
            _one_of("pyverbs", "ibverbs"), "Python package that drives NICs."),
    Setting("MONARCH_RDMA_QPS_PER_PEER", "integer", 2, "queue pairs", "a number from 1 to 16 is needed",
            _number(1, 16), "Queue pairs of each port to each process."),
    Setting("MONARCH_RDMA_TIMEOUT", "integer", 16, "exponent", "a number from 1 to 31 is needed", _number(1, 31),
            "Time to wait for an acknowledgement: 4.096 us * 2**value."),
    Setting("MONARCH_RDMA_RETRIES", "integer", 6, "retries", "a number from 0 to 7 is needed", _number(0, 7),
            "How often a NIC sends a packet again."),
    Setting("MONARCH_RDMA_TRAFFIC_CLASS", "integer", 0, "", "a number from 0 to 255 is needed", _number(0, 255),
            "Traffic class of RDMA packets."),
    Setting("MONARCH_RDMA_SERVICE_LEVEL", "integer", 0, "", "a number from 0 to 15 is needed", _number(0, 15),
            "Service level of RDMA packets."),
    Setting("MONARCH_RDMA_MR_CACHE_ENTRIES", "integer", 1024, "allocations", "a number from 0 to 1048576 is needed",
            _number(0, 1 << 20), "Own allocations that stay registered with a device."),
    Setting("MONARCH_RDMA_MR_CACHE_BYTES", "integer", 64 << 30, "bytes",
            "a number from 0 to 1125899906842624 is needed", _number(0, 1 << 50),
            "Total size of own allocations that stay registered with a device."),
    Setting("MONARCH_RDMA_MIN_BYTES", "integer", 1 << 20, "bytes",
            "give a number of bytes, 1 or more, or leave it unset", _number(1),
            "Size from which NICs carry a message between hosts."),
    Setting("MONARCH_TELEMETRY", "flag", True, "", "give 1, or 0", _flag,
            "Record the last events and the current activity of each process, for `monarch-backend ps` and others."),
    Setting("MONARCH_LOG_HISTORY_BYTES", "integer", 8 << 20, "bytes",
            "give 0 for none, or bytes from 65536 to 17179869184", _zero_or(1 << 16, 1 << 34),
            "Last output of a program's processes that is kept for `monarch-backend logs`."),
    Setting("MONARCH_LOG_DIR", "path", "", "", "a folder, which is made if it is missing", str,
            "Folder of the files with the last output of programs. Unset: `monarch_backend-UID/logs` among the "
            "temporary files."),
    Setting("MONARCH_LOG_FILES", "integer", 16, "files", "give 0 to keep the output in memory, or files up to 10000",
            _number(0, 10_000),
            "Programs whose last output stays on disk after their end. 0: output ends with its program."),
    Setting("MONARCH_WAIT_NOTICE", "integer", 10, "seconds", "give 0 for never, or seconds from 1 to 1000000",
            _zero_or(1, 1000000),
            "Time after which a wait for a call logs which ranks are missing and where they are. 0: never."),
    Setting("MONARCH_STRAGGLER_PERCENT", "integer", 150, "percent", "give 0 for never, or percent from 105 to 100000",
            _zero_or(105, 100000),
            "A rank whose steps take more than this share of the median of its mesh is named as slow. 0: never."),
    Setting("MONARCH_CANCEL_ON_INTERRUPT", "flag", False, "", "give 1, or 0", _flag,
            "In a notebook or IPython, interrupting a cell cancels the calls that the cell has made."),
    Setting("MONARCH_POST_MORTEM", "flag", False, "", "give 1, or 0", _flag,
            "An error in an endpoint waits for `monarch-backend debug` before it is sent. `post_mortem=True` of "
            "`spawn_procs` sets it."),
    Setting("MONARCH_REPLAY", "path", "", "", "a folder, which is made if it is missing", str,
            "Record what actors receive into files in this folder, for `monarch-backend replay`. `replay=folder` of "
            "`spawn_procs` sets it. Unset: nothing is recorded."),
    Setting("MONARCH_REPLAY_BYTES", "integer", 256 << 20, "bytes",
            "give bytes from 65536 to 1099511627776", _number(1 << 16, 1 << 40),
            "Limit of the replay file of one actor. Its recording stops there."),
    Setting("MONARCH_REPLAY_FOLDER_BYTES", "integer", 4 << 30, "bytes",
            "give bytes from 65536 to 1125899906842624", _number(1 << 16, 1 << 50),
            "Limit of all replay files in a folder, also older ones. All recording into the folder stops there."),
    Setting("MONARCH_DEADLOCK_DETECTION", "flag", True, "", "give 1, or 0", _flag,
            "Raise DeadlockError in actors that wait for each other."),
    Setting("MONARCH_UNKNOWN_SETTINGS", "choice", "error", "", "error, or warn", _one_of("error", "warn"),
            "Effect of an unknown MONARCH_ name. Use warn if another program has such names."),
    Setting("MONARCH_NPROC_PER_NODE", "integer", None, "ranks", "a number of 1 or more", _number(1),
            "Set by `monarch-backend run` for its script: ranks of a node."),
    Setting("MONARCH_LOCAL_RANKS", "integer", 1, "processes", "a number of 1 or more", _number(1),
            "Set for a host's agent: processes of a mesh on its host."),
    Setting("MONARCH_PORTABLE", "flag", False, "", "give 1, or 0", _flag,
            "For tests on Linux: use only what macOS has, too. Needs a core that was built with "
            "MONARCH_BUILD_PORTABLE=1."),
    Setting("MONARCH_BUILD_PORTABLE", "flag", False, "", "give 1, or 0", _flag,
            "Build the C++ core on Linux as on macOS, for tests. Read by setup.py."),
    Setting("MONARCH_BUILD_JOBS", "integer", None, "processes", "a number of 1 or more", _number(1),
            "Compilers that run at the same time when the package is built. Read by setup.py."),
)  # fmt: skip

SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _TABLE}
"""All settings by name."""


def get(name: str, environment: Mapping[str, str] | None = None) -> Any:
    """Return the value of the setting ``name``, or its default if it is unset or empty. Raises ValueError.

    >>> get("MONARCH_SHM_ARENA_BYTES", {"MONARCH_SHM_ARENA_BYTES": "1048576"}), get("MONARCH_SHM", {})
    (1048576, True)
    """
    setting = SETTINGS[name]
    text = (os.environ if environment is None else environment).get(name, "")
    if not text:
        return setting.default
    try:
        return setting.parse(text)
    except ValueError:
        raise ValueError(f"{name}={'(secret)' if setting.secret else repr(text)}: {setting.values}") from None


def check(environment: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for a setting with a bad value, and for a name that begins with MONARCH_ and is not a setting.

    >>> try:
    ...     check({"MONARCH_SMH": "1"})
    ... except ValueError as error:
    ...     print(str(error).partition("?")[0])
    MONARCH_SMH is not a setting; did you mean MONARCH_SHM
    """
    given = os.environ if environment is None else environment
    for name in given:
        if not name.startswith(PREFIX) or name in FOREIGN or name.startswith(PRIVATE_PREFIXES):
            continue
        if name in SETTINGS:
            get(name, given)
        else:
            _unknown(name, warn=get("MONARCH_UNKNOWN_SETTINGS", given) == "warn")


def _unknown(name: str, *, warn: bool) -> None:
    # Without the prefix, which would make every pair of names similar.
    words = {setting.removeprefix(PREFIX): setting for setting in SETTINGS}
    close = [words[word] for word in difflib.get_close_matches(name.removeprefix(PREFIX), words, 1)]
    text = (
        f"{name} is not a setting{f'; did you mean {close[0]}?' if close else '.'} "
        f"Settings are: {', '.join(SETTINGS)}. "
    )
    text += "Unset it, or set MONARCH_UNKNOWN_SETTINGS=warn if it belongs to another program"
    if not warn:
        raise ValueError(text)
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the processes of a job without its secret: their program or host makes the
    connections.
    """
    return {name: value for name, value in environment.items() if name not in ("MONARCH_SECRET", "MONARCH_SECRET_FILE")}
