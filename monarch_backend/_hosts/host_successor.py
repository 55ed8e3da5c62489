"""Host that takes the place of a lost one in its mesh, such as the new pod of a StatefulSet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from monarch_backend._core.limits import ResourceLimitError, start_thread

log = logging.getLogger("monarch_backend")


class HostSuccessor:
    """Search for the successor of one host. ``find`` waits for it, and returns its id, or None if there will be none.

    The search begins when it is needed, on a thread of its own. ``find`` returns soon after its argument is set.
    """

    def __init__(self, find: Callable[[threading.Event], str | None]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] = []
        self._is_searching = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_known = False
        """Whether the search is over."""
        self.host: str | None = None
        """Id of the successor, if there is one."""

    def when_known(self, call: Callable[[], None]) -> None:
        """Call ``call`` once, on another thread, when the search is over."""
        with self._lock:
            self._waiting.append(call)
            if self._is_searching and not self.is_known:
                return
            self._is_searching = True
        try:
            self._thread = threading.Thread(target=self._run, name="monarch-successor", daemon=True)
            start_thread(self._thread)
        except ResourceLimitError as error:
            log.warning("the successor of a lost host is not searched: %s", error)
            self._close()

    def stop(self) -> None:
        """Give up the search."""
        self._stopping.set()

    def join(self, seconds: float) -> None:
        """Wait until the thread of the search has ended, for some seconds at most."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))

    def _run(self) -> None:
        try:
            if not self.is_known:
                self.host = self._find(self._stopping)
        except Exception:
            log.exception("the search for the successor of a lost host has failed")
        finally:
            self._close()

    def _close(self) -> None:
        with self._lock:
            self.is_known = True
            calls, self._waiting = self._waiting, []
        for call in calls:
            call()
