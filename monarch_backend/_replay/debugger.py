"""pdb in the terminal of a replay: it stops in the endpoint of one message, and where an exception is raised."""

from __future__ import annotations

import bdb
import inspect
import sys
from collections.abc import Callable
from typing import Any

from monarch_backend._processes.debugging.user_code import UserCodePdb, is_of_package

_SKIPPED = ["monarch_backend", "monarch_backend.*", "asyncio", "asyncio.*", "contextvars", "selectors"]


class ReplayPdb(UserCodePdb):
    """Debugger of a replay. It steps over the code of this package and of asyncio."""

    def __init__(self) -> None:
        super().__init__(skip=_SKIPPED, nosigint=True)

    def arm(self) -> None:
        """Stop at the first line of the next function that is called."""
        self.reset()
        sys.settrace(self.trace_dispatch)

    def post_mortem(self, error: BaseException) -> None:
        """Stop where the error was raised. Return when the user continues. Raises BdbQuit for `quit`."""
        sys.settrace(None)
        trace = error.__traceback__
        while trace is not None and is_of_package(trace.tb_frame):
            trace = trace.tb_next
        if trace is None:
            return
        self.reset()
        self.interaction(None, trace)
        if self.quitting:
            raise bdb.BdbQuit

    def wrap(self, method: Callable[..., Any], is_chosen: Callable[[], bool]) -> Callable[..., Any]:
        """Return a method that stops at the first line of ``method`` if ``is_chosen()``."""
        function = getattr(method, "__func__", method)

        def arm() -> None:
            if is_chosen():
                self.arm()

        if inspect.isasyncgenfunction(function):

            async def stream(*args: Any, **kwargs: Any) -> Any:
                values = method(*args, **kwargs)
                arm()
                async for value in values:
                    yield value

            return stream
        if inspect.iscoroutinefunction(function):

            async def run_async(*args: Any, **kwargs: Any) -> Any:
                coroutine = method(*args, **kwargs)
                arm()
                return await coroutine

            return run_async
        if inspect.isgeneratorfunction(function):

            def generate(*args: Any, **kwargs: Any) -> Any:
                values = method(*args, **kwargs)
                arm()
                yield from values

            return generate

        def run(*args: Any, **kwargs: Any) -> Any:
            arm()
            return method(*args, **kwargs)

        return run
