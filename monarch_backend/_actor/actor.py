"""`Actor`, the decorators of its endpoints, and the static description of an actor class.

This module sends no messages. The caller's side of an endpoint is calls/endpoint.py, the actor's side is
execution/runner.py.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from monarch_backend._actor.context import current_actor_name
from monarch_backend._actor.errors import UnknownEndpointError

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "__monarch_endpoint__"


@dataclass(frozen=True)
class EndpointSpec:
    """Kind and options of an endpoint, read from its method."""

    name: str
    is_async: bool
    is_generator: bool
    concurrent: bool = False
    explicit_port: bool = False
    check: Callable[..., None] | None = None  # the method's signature without `self` and the port

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "check": None}  # not picklable; each process makes its own


class EndpointMethod(Generic[P, R]):
    """A decorated method. On an actor it is the plain method; an `ActorMesh` makes an `Endpoint` of it."""

    def __init__(self, method: Callable[..., Any], *, concurrent: bool, explicit_port: bool) -> None:
        self.method = method
        self.concurrent, self.explicit_port = concurrent, explicit_port
        functools.update_wrapper(self, method)  # type: ignore[arg-type]
        if concurrent and not (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
            raise TypeError(
                f"@concurrent_endpoint needs an `async def` method: {method.__qualname__} is a plain function"
            )

    @overload
    def __get__(self, instance: None, owner: type) -> EndpointMethod[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else self.method.__get__(instance, owner)


@overload
def endpoint(method: Callable[..., R], /) -> Any: ...
@overload
def endpoint(*, explicit_response_port: bool = False) -> Callable[[Callable[..., R]], Any]: ...
def endpoint(method: Callable[..., Any] | None = None, /, *, explicit_response_port: bool = False) -> Any:
    """Make a method of an `Actor` callable from other processes, through `Endpoint`.

    An actor handles one message at a time, in the order of arrival. A generator method sends each value as it is
    yielded. With ``explicit_response_port=True`` the method receives a `Port` as its first argument. It, or any actor
    it passes the port to, sends the reply at any later time, once or several times.

    Raises TypeError if the decorated object is not a function.

    >>> from monarch_backend.actor import Actor, endpoint, this_proc
    >>> class Doubler(Actor):
    ...     @endpoint
    ...     def double(self, x):
    ...         return 2 * x
    ...     @endpoint(explicit_response_port=True)
    ...     def double_later(self, port, x):
    ...         port.send(2 * x)
    >>> mesh = this_proc().spawn("doubler", Doubler)
    >>> mesh.double.call_one(3).get(), mesh.double_later.call_one(4).get()
    (6, 8)
    """
    return _decorate(method, concurrent=False, explicit_port=explicit_response_port)


def concurrent_endpoint(method: Callable[..., Any] | None = None, /, *, explicit_response_port: bool = False) -> Any:
    """Make an ``async def`` method an endpoint whose calls run interleaved. They start in the order of arrival.

    The parameters are those of `endpoint`. Raises TypeError for a method that is not ``async def``.

    >>> from monarch_backend.actor import Actor, concurrent_endpoint, this_proc
    >>> class Doubler(Actor):
    ...     @concurrent_endpoint
    ...     async def double(self, x):
    ...         return 2 * x
    >>> mesh = this_proc().spawn("doubler", Doubler)
    >>> mesh.double.call_one(3).get()
    6
    """
    return _decorate(method, concurrent=True, explicit_port=explicit_response_port)


def _decorate(method: Any, *, concurrent: bool, explicit_port: bool) -> Any:
    def decorate(function: Any) -> Any:
        if not inspect.isfunction(function):
            raise TypeError(f"an endpoint is a method, not {function!r}")
        return EndpointMethod(function, concurrent=concurrent, explicit_port=explicit_port)

    return decorate if method is None else decorate(method)


class Actor:
    """Base class of actors: objects in the processes of a mesh that handle messages.

    ``proc_mesh.spawn("name", MyActor, *args)`` constructs one in each process. Calling a subclass directly raises
    TypeError, and so does pickling an actor.

    A subclass may define three further methods, plain or ``async``:

    - ``__supervise__(self, failure) -> bool`` receives the `MeshFailure` of a mesh that this actor has spawned.
      Return True if it is handled; otherwise this actor fails, too.
    - ``__cleanup__(self, exc)`` runs when the actor ends. ``exc`` is the error that ended it, or None.
    - ``__host_ending__(self, notice)`` receives the `HostEnding` of a host that ends soon. It runs before the messages
      in the queue; an async actor runs it beside its running endpoint. An error in it is logged.

    >>> from monarch_backend.actor import Actor, endpoint, this_proc
    >>> class Counter(Actor):
    ...     def __init__(self, start):
    ...         self.value = start
    ...     @endpoint
    ...     def add(self, n):
    ...         self.value += n
    ...         return self.value
    >>> this_proc().spawn("counter", Counter, 40).add.call_one(2).get()
    42
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG004 # __init__ takes them
        """Construct an actor in its process. Raises TypeError when called by other code."""
        if not _building.get(cls, 0):
            raise TypeError(
                f"{cls.__name__} is an actor: spawn it, proc_mesh.spawn('name', {cls.__name__}, ...), "
                "instead of calling it"
            )
        return super().__new__(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{type(self).__name__} is an actor and cannot leave its process: send its mesh, or its values")

    @property
    def logger(self) -> Any:
        """Logger with the name of the actor's module and the actor's name."""
        return logging.getLogger(f"{type(self).__module__}.{current_actor_name()}")


_building: dict[type, int] = {}


def build(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Construct an actor. Only this function may call an actor's class."""
    _building[cls] = _building.get(cls, 0) + 1
    try:
        return cls(*args, **kwargs)
    finally:
        _building[cls] -= 1
        if not _building[cls]:
            del _building[cls]


@dataclass(frozen=True)
class ActorClassInfo:
    """Description of an actor class: its endpoints, and whether they need an event loop."""

    cls: type
    endpoints: Mapping[str, EndpointSpec]
    is_async: bool

    def spec(self, name: str) -> EndpointSpec:
        """Return the endpoint of this name. Raises UnknownEndpointError, whose text lists the endpoints."""
        found = self.endpoints.get(name)
        if found is not None:
            return found
        here = ", ".join(sorted(self.endpoints)) or "none"
        if callable(getattr(self.cls, name, None)) and not name.startswith("__"):
            raise UnknownEndpointError(
                f"{self.cls.__name__}.{name} is not an endpoint: decorate it with @endpoint, or call it through "
                f"as_endpoint(mesh.{name}); its endpoints are: {here}"
            )
        raise UnknownEndpointError(f"{self.cls.__name__} has no endpoint {name!r}; its endpoints are: {here}")


def specify(
    name: str, method: Callable[..., Any], concurrent: bool = False, explicit_port: bool = False
) -> EndpointSpec:
    generator = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
    is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    return EndpointSpec(
        name, is_async, generator, concurrent, explicit_port, _checker(name, method, 2 if explicit_port else 1)
    )


def _checker(name: str, method: Callable[..., Any], skip: int) -> Callable[..., None] | None:
    """Return an empty function with the method's signature: a call of it checks arguments.

    Python binds the arguments itself, in a tenth of the time of `inspect.Signature.bind`.
    """
    signature = inspect.signature(method)
    parameters = list(signature.parameters.values())[skip:]
    if any(p.kind is p.POSITIONAL_ONLY and not p.name.isidentifier() for p in parameters):
        return None
    bare = [p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None) for p in parameters]
    text = str(inspect.Signature(bare))
    scope: dict[str, Any] = {}
    exec(f"def {name}{text}: pass", scope)  # names and defaults come from a function's own signature
    return cast("Callable[..., None]", scope[name])
