"""Clients of waiting processes: they list them, send commands, and attach a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from monarch_backend._core import platform
from monarch_backend._processes import local_sockets
from monarch_backend._processes.debugging.messages import SOCKET_PREFIX, Peer
from monarch_backend._telemetry.labels import in_words, is_wanted

STATUS_TIMEOUT_S = 1.0
"""Seconds that waiting processes have to answer. One that runs a command of another client does not."""

_OVER = "it does not wait any more: its call or its process has ended"
"""Answer of a process that has closed its socket before the command, such as when the program ends."""

_NAME = re.compile(rf"{SOCKET_PREFIX}(\d+)-[0-9a-f]+")


class Disconnected(Exception):
    """The process has ended, or refuses the client. The text says what happened."""


@dataclass(frozen=True)
class WaitingProcess:
    """A thread that waits at a breakpoint. ``since`` is a Unix time in seconds; ``attached`` a pid, or 0.

    A process that runs a client's command does not answer. Then only ``id``, ``pid`` and ``address`` are known.
    """

    id: str
    pid: int
    label: str = ""
    host: str = ""
    thread: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    where: str = ""
    since: float = 0.0
    attached: int = 0
    address: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the public output."""
        return {name: value for name, value in asdict(self).items() if name != "address"}


def waiting_processes() -> list[WaitingProcess]:
    """Return the waiting processes of this user on this machine, by label."""
    peers: dict[str, Peer] = {}
    found: list[WaitingProcess] = []
    try:
        for address in _addresses():
            with contextlib.suppress(OSError):
                peers[address] = connect(address)
        for peer in peers.values():
            with contextlib.suppress(OSError):
                peer.send(do="status")
        deadline = time.monotonic() + STATUS_TIMEOUT_S
        for address, peer in peers.items():
            pid = _pid_of(address)
            try:
                status = next(_replies(peer, max(0.0, deadline - time.monotonic())))["status"]
                known = {name: status[name] for name in WaitingProcess.__dataclass_fields__ if name in status}
                found.append(WaitingProcess(**{**known, "address": address}))
            except TimeoutError:
                found.append(WaitingProcess(str(pid), pid, where="it runs a command", address=address))
            except (Disconnected, OSError, KeyError, TypeError):  # it has just gone on
                continue
    finally:
        for peer in peers.values():
            peer.close()
    return sorted(found, key=lambda each: ([_order(part) for part in each.label.split()], each.pid))


def _order(word: str) -> tuple[int, str]:
    return (int(word), "") if word.isdecimal() else (-1, word)


def select_processes(which: Sequence[str] | None, processes: Sequence[WaitingProcess]) -> list[WaitingProcess]:
    """Return the processes that ``which`` names, by ids or as `labels.is_among` does.

    None stands for all. Raises LookupError if there are none, and ValueError for a range that is none.

    >>> ranks = [WaitingProcess(f"{pid}.1", pid, f"gpus {pid - 100}") for pid in (100, 101, 102)]
    >>> [each.pid for each in select_processes(["gpus=0,2"], ranks)]
    [100, 102]
    >>> [each.label for each in select_processes(["101"], ranks)], len(select_processes(None, ranks))
    (['gpus 1'], 3)
    """
    ids = {word.strip() for words in which or () for word in words.split(",")}
    chosen = [each for each in processes if is_wanted(each.label, each.pid, which) or each.id in ids]
    if not chosen:
        there = "; ".join(f"{each.label} (pid {each.pid})" for each in processes) or "none"
        raise LookupError(
            f"no waiting process is {in_words(which)}; there are: {there}" if which else "no process waits"
        )
    return chosen


def connect(address: str) -> Peer:
    """Connect to a waiting process. Raises OSError, also PermissionError if another user listens there."""
    sock = local_sockets.connect(address, STATUS_TIMEOUT_S)
    pid, user = local_sockets.peer(sock)
    if user != os.geteuid():
        sock.close()
        raise PermissionError(f"user {user} listens at {address}")
    return Peer(sock, pid)


def send_command(
    processes: Sequence[WaitingProcess], command: str, *, until_resumed: bool = False
) -> Iterator[tuple[WaitingProcess, str]]:
    """Send one command to all processes. Yield each one's answer when it arrives, in the order of arrival.

    A command that lets a process go on is answered when it stops again or its debugger ends, with ``until_resumed``
    once the process runs.
    """
    peers: dict[int, tuple[WaitingProcess, Peer]] = {}
    texts: dict[int, str] = {}
    try:
        poll = select.poll()
        for process in processes:
            peer = None
            try:
                peer = connect(process.address)
                peer.send(do="run", command=command)
            except OSError as error:
                if peer is not None:
                    peer.close()
                is_over = isinstance(error, ConnectionError)
                yield process, _OVER if is_over else f"it does not wait any more: {error}"
                continue
            peers[peer.socket.fileno()], texts[peer.socket.fileno()] = (process, peer), ""
            poll.register(peer.socket, select.POLLIN)
        while peers:
            for descriptor, _ in poll.poll():
                process, peer = peers[descriptor]
                done = False
                try:
                    for message in peer.receive():
                        text, done = _text(message, until_resumed)
                        texts[descriptor] += text
                        if done:
                            break
                except (EOFError, ConnectionError):
                    texts[descriptor] += _OVER
                    done = True
                except (OSError, ValueError) as error:
                    texts[descriptor] += f"{_OVER}: {error}"
                    done = True
                if done:
                    poll.unregister(descriptor)
                    del peers[descriptor]
                    peer.close()
                    yield process, texts.pop(descriptor)
    finally:
        for _, peer in peers.values():
            peer.close()


def _text(message: dict[str, Any], until_resumed: bool) -> tuple[str, bool]:
    """Return the text of a message, and whether the answer is complete."""
    if "error" in message:
        return message["error"], True
    if "over" in message:
        return message.get("text", "") + message["over"], True
    if "resumed" in message:
        return message["resumed"] + ("the program continues" if until_resumed else ""), until_resumed
    return str(message.get("output", "")), "prompt" in message


def _replies(peer: Peer, timeout: float | None) -> Iterator[dict[str, Any]]:
    """Yield messages. Raises TimeoutError after a while without any, and Disconnected at the end."""
    peer.socket.settimeout(timeout)
    while True:
        try:
            messages = peer.receive()
        except BlockingIOError:
            raise TimeoutError from None
        except (EOFError, ConnectionError):
            raise Disconnected("the process has ended") from None
        except ValueError as error:  # another program
            raise Disconnected(f"the process sends something else than a debugger does: {error}") from None
        yield from messages


class Attachment:
    """An attached client. ``read_line`` returns a command for a prompt; `input` does so at a terminal."""

    def __init__(self, process: WaitingProcess) -> None:
        """Attach. Raises OSError, and Disconnected if another client is attached."""
        self.process = process
        self._peer = connect(process.address)
        self._matches: list[str] = []

    def run(self, read_line: Callable[[str], str], write: Callable[[str], object]) -> str:
        """Send commands until the debugger ends or the input does. Return what happened, for people."""
        try:
            self._peer.send(do="attach")
            while (prompt := self._until_prompt(write)) is not None:
                while True:
                    try:
                        line = read_line(prompt)
                        break
                    except KeyboardInterrupt:
                        write("\n")
                self._peer.send(do="run", command=line)
        except EOFError:
            write("\n")
            return "detached: the process waits on"
        except KeyboardInterrupt:
            return "detached: the program goes on until its next stop"
        except (Disconnected, OSError) as error:
            return str(error) if isinstance(error, Disconnected) else "the process has ended"
        finally:
            self._peer.close()
        return self._over

    def _until_prompt(self, write: Callable[[str], object]) -> str | None:
        """Show what arrives. Return the next prompt, or None when the debugger has ended."""
        for message in _replies(self._peer, None):
            if "error" in message:
                raise Disconnected(message["error"])
            write(message.get("output", message.get("resumed", message.get("text", ""))))
            if "over" in message:
                self._over = str(message["over"])
                return None
            if "prompt" in message:
                return str(message["prompt"])
        return None

    def complete(self, text: str, state: int) -> str | None:
        """Complete a line, as readline's function does: the process answers, which waits at a prompt."""
        import readline

        if state == 0:
            self._matches = self.names(text, readline.get_line_buffer(), readline.get_begidx(), readline.get_endidx())
        return self._matches[state] if state < len(self._matches) else None

    def names(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """Return completions of ``text``, which is ``line[begin:end]``; none if the process does not answer."""
        try:
            self._peer.send(do="names", text=text, line=line, begin=begin, end=end)
            for message in _replies(self._peer, STATUS_TIMEOUT_S):
                if "names" in message:
                    return [str(name) for name in message["names"]]
        except (Disconnected, OSError):
            return []
        return []


def _pid_of(address: str) -> int:
    found = _NAME.search(address)
    assert found is not None
    return int(found[1])


def _addresses() -> list[str]:
    """Return the addresses of waiting processes, without those of processes that were killed."""
    pattern = re.compile(re.escape(local_sockets.address_of("")) + _NAME.pattern)
    if platform.HAS_ABSTRACT_SOCKETS:
        with open("/proc/net/unix", errors="replace") as file:  # other users choose the names of their sockets
            names = {words[-1] for line in file if (words := line.split())}
        return sorted(name for name in names if pattern.fullmatch(name))
    folder = os.path.dirname(local_sockets.address_of("debug"))
    found = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if _NAME.fullmatch(name)]
    for address in list(found):
        try:
            os.kill(_pid_of(address), 0)
        except ProcessLookupError:
            local_sockets.remove(address)
            found.remove(address)
        except OSError:
            continue
    return found


def as_json(processes: Sequence[WaitingProcess]) -> str:
    """Return the JSON array of `monarch-backend debug --json`."""
    return json.dumps([each.as_json() for each in processes], indent=1)
