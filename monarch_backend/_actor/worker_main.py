"""Main function of a process of a mesh: it connects to its owner, runs actors and ends when the owner ends it."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from typing import Any, NoReturn

import cloudpickle  # type: ignore[import-untyped]

from monarch_backend._actor import runtime
from monarch_backend._actor.calls.codec import HOST, pack_failure, text_of
from monarch_backend._actor.errors import Death, MeshFailure
from monarch_backend._actor.execution import blocking_calls
from monarch_backend._actor.execution.runner import ActorRunner
from monarch_backend._actor.processes.start import Plan
from monarch_backend._core.extension_points import extension
from monarch_backend._logs import worker_logging
from monarch_backend._mesh.extent import Extent
from monarch_backend._processes import finalization
from monarch_backend._processes.child_bootstrap import report_exception
from monarch_backend._processes.debugging import channel
from monarch_backend._serialization import pickling
from monarch_backend._serialization.exceptions import remote_traceback
from monarch_backend._telemetry import recorder
from monarch_backend._transport.local.event_loop import release
from monarch_backend._transport.local.frames import Constructed, Failed
from monarch_backend._transport.local.peer import CreditWaiter, Peer
from monarch_backend._transport.tokens import epoch_of

_bootstrap_error: BaseException | None = None


def run_bootstrap(packed: bytes) -> None:
    """Call the user's ``bootstrap=``. An error is printed, and kept for `main`, which reports it to the owner."""
    global _bootstrap_error
    from monarch_backend._telemetry.spans import span  # most processes have no bootstrap

    try:
        with span("bootstrap"):
            cloudpickle.loads(packed)()
    except (Exception, SystemExit) as error:
        report_exception(error)
        _bootstrap_error = error


FLUSH_TIMEOUT_S = 5.0
"""Seconds that an ending process waits for receivers to read its messages."""


class _MainThread:
    """Runs one actor at a time on the process's main thread."""

    def __init__(self, program: runtime.Runtime) -> None:
        self._program = program
        self._runners: deque[ActorRunner] = deque()
        self._busy = False
        self.ready = False
        self.wait_lock: threading.Lock | None = None
        self.leaving: str | None = None
        self.is_aborted = False

    def start_runner(self, runner: ActorRunner) -> None:
        """Run an actor, on a thread of its own if the main thread is taken. Called on the reading thread."""
        if self._busy:
            self._program.start_runner_thread(runner)
            return
        self._busy = True
        self._runners.append(runner)
        self._wake()

    def leave(self, how: str, reason: str) -> None:
        """End the process: its actors first, the newest before older ones. Called on the reading thread."""
        self.leaving = reason
        self.is_aborted = self.is_aborted or how == "abort"
        self._program.leaving = True
        channel.end_waits(reason)
        for runner in reversed(list(self._program.runners.values())):
            runner.end_in_time(how, reason)
        self._wake()
        # An endpoint that never returns needs no limit here: the owner kills the process.

    def _wake(self) -> None:
        self.ready = True
        release(self)
        self._program.progress.wake()

    def run(self) -> None:
        """Run actors until the process is to end. Called on the main thread."""
        while True:
            self._program.progress.wait(self)
            self.ready = False
            while self._runners:
                self._runners.popleft().run()
                self._busy = False
            if self.leaving is not None:
                return


def main(plan: Plan) -> None:
    """Run a process of a mesh. The fork server calls it after the bootstrap."""
    worker_logging.install_worker_logging()
    pickling.settle_in(sys.modules["__main__"])
    oversubscribed = plan.local_processes + 1 > (os.cpu_count() or 1) if plan.local_processes else plan.oversubscribed
    blocking_calls.install()
    program = runtime.start(plan.token, oversubscribed)
    recorder.name_mesh(plan.name, epoch_of(plan.token))
    channel.set_label(f"{channel.label} of {plan.name}")
    owner = program.router.peer(plan.owner)
    program.server_address = plan.server
    program.root = program.router.peer(plan.root, owner)
    program.home_rank, program.home_extent = plan.rank, Extent(plan.labels, plan.sizes)
    thread = _MainThread(program)
    program.start_runner = thread.start_runner
    program.on_exit = thread.leave
    if _bootstrap_error is not None:
        program.start_runner = lambda _: None  # no constructor runs here
    _join(program, owner, plan)  # last, because messages may arrive at once
    if _bootstrap_error is not None:
        _fail_to_start(program, owner, plan, _bootstrap_error)
    if plan.has_bootstrap:
        program.router.tell(owner, Constructed(0, plan.rank))
    thread.run()
    _wait_for_others(program)
    for call in program.last:
        call()
    # Before the link closes, which the owner takes for the end of this process.
    if thread.is_aborted:
        finalization.skip()
    else:
        finalization.finalize_user_code()
    program.closing = True
    program.owner.starter.close()
    _send_what_is_left(program)
    sys.stdout.flush()
    sys.stderr.flush()
    program.links.host.leave()  # type: ignore[attr-defined]


def _fail_to_start(program: runtime.Runtime, owner: Peer, plan: Plan, error: BaseException) -> NoReturn:
    death = Death(
        plan.rank, "", HOST, program.pid, f"its bootstrap failed: {text_of(error)}", 1, error, remote_traceback(error),
        at_start=True,
    )  # fmt: skip
    failure = MeshFailure(plan.name, [death])
    failure.__cause__ = error
    program.router.tell(owner, Failed(0, plan.rank), pack_failure(failure))
    _send_what_is_left(program)
    raise SystemExit(1)


def _join(program: runtime.Runtime, owner: Peer, plan: Plan) -> None:
    if plan.gateway:
        extension("gateway")(program, plan.gateway)
    while program.router.link_to(owner) < 0 and owner.gone is None:
        # The owner is on another host, or is stopped, by a debugger for example.
        program.progress.wait(CreditWaiter(), 0.05, lambda: owner.link >= 0)
    if owner.gone is not None or not program.links.host.die_with_peer(plan.die_with or plan.owner):  # type: ignore[attr-defined]
        sys.stderr.write(f"monarch_backend: the owner of {plan.name} is gone; process {os.getpid()} ends\n")
        raise SystemExit(1)


def _send_what_is_left(program: runtime.Runtime) -> None:
    """Send replies that are queued because their receivers have not read for a moment."""
    mailbox: Any = program.links.mailbox  # type: ignore[attr-defined]
    end = program.clock.now() + FLUSH_TIMEOUT_S
    while (program.router.stuck or mailbox.kept_back()) and program.clock.now() < end:
        program.progress.wait(CreditWaiter(), 0.005)


def _wait_for_others(program: runtime.Runtime) -> None:
    """Wait for the other actors to finish their messages and clean up. The owner's time limit ends this process."""
    for runner in list(program.runners.values()):
        while not runner.over:
            program.progress.wait(CreditWaiter(), 0.005)
