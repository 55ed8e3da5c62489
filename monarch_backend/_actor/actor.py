"""`Actor`, the decorators that make endpoints of its methods, and what is known of a class before any of it runs.

No messages and no meshes: what happens when an endpoint is called is in endpoint.py (at the caller) and runner.py (at
the actor).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from monarch_backend._actor.errors import UnknownEndpointError
from monarch_backend._mesh.extent import MeshBase

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "__monarch_endpoint__"


@dataclass(frozen=True)
class EndpointSpec:
    """How a method is to be called."""

    name: str
    is_async: bool
    is_generator: bool
    concurrent: bool = False
    explicit_port: bool = False
    check: Callable[..., None] | None = None  # takes what the method takes, `self` and the port left out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "check": None}  # made anew where it is needed


class EndpointMethod(Generic[P, R]):
    """A decorated method. On an actor it is the plain method; on a mesh, something to call from afar."""

    def __init__(self, method: Callable[..., Any], *, concurrent: bool, explicit_port: bool) -> None:
        self.method = method
        self.concurrent, self.explicit_port = concurrent, explicit_port
        functools.update_wrapper(self, method)  # type: ignore[arg-type]
        if concurrent and not (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
            raise TypeError(f"@concurrent_endpoint is for `async def`: {method.__qualname__} is a plain function")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

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
    """Make a method of an Actor one that others can send to.

    One message at a time is taken by an actor, in the order of arrival. A method that yields gives its values one by
    one while it runs. With ``explicit_response_port`` the method gets a Port before its arguments, and answers through
    it, later or several times, instead of by returning.

    Raises TypeError for what is no function.
    """
    return _decorate(method, concurrent=False, explicit_port=explicit_response_port)


def concurrent_endpoint(method: Callable[..., Any] | None = None, /, *, explicit_response_port: bool = False) -> Any:
    """As `endpoint`, for ``async def`` only: calls start in the order of arrival and then run interleaved."""
    return _decorate(method, concurrent=True, explicit_port=explicit_response_port)


def _decorate(method: Any, *, concurrent: bool, explicit_port: bool) -> Any:
    def decorate(function: Any) -> Any:
        if not inspect.isfunction(function):
            raise TypeError(f"an endpoint is a method, not {function!r}")
        return EndpointMethod(function, concurrent=concurrent, explicit_port=explicit_port)

    return decorate if method is None else decorate(method)


class Actor:
    """Base of what lives in a process of a mesh and is sent messages.

    Subclasses are not instantiated but spawned: ``proc_mesh.spawn("name", MyActor, *args)`` builds one in each process.
    They may define ``__supervise__(self, failure) -> bool``, asked when a mesh that this actor spawned has failed, and
    ``__cleanup__(self, exc)``, called when the actor stops; both may be ``async``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG004 # __init__ takes them
        """An actor is built by its process, see the class."""
        if not _building.get(cls, 0):
            raise TypeError(
                f"{cls.__name__} is an actor: spawn it, proc_mesh.spawn('name', {cls.__name__}, ...), "
                "instead of calling it"
            )
        return super().__new__(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{type(self).__name__} is an actor and stays in its process: send its mesh, or what it holds")

    @property
    def logger(self) -> Any:
        """A logger with the actor's name."""
        import logging

        from monarch_backend._actor.context import current_actor_name

        return logging.getLogger(f"{type(self).__module__}.{current_actor_name()}")


_building: dict[type, int] = {}


def build(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An instance of an actor's class; the one place that may make one."""
    _building[cls] = _building.get(cls, 0) + 1
    try:
        return cls(*args, **kwargs)
    finally:
        _building[cls] -= 1
        if not _building[cls]:
            del _building[cls]


@dataclass(frozen=True)
class ActorClassInfo:
    """What is known of an actor class: its endpoints, and whether it needs an event loop."""

    cls: type
    endpoints: Mapping[str, EndpointSpec]
    is_async: bool

    def spec(self, name: str) -> EndpointSpec:
        """The endpoint of this name. Raises UnknownEndpointError, which says what there is."""
        found = self.endpoints.get(name)
        if found is not None:
            return found
        here = ", ".join(sorted(self.endpoints)) or "none"
        if callable(getattr(self.cls, name, None)) and not name.startswith("__"):
            raise UnknownEndpointError(
                f"{self.cls.__name__}.{name} is no endpoint: decorate it with @endpoint, or call it through "
                f"as_endpoint(mesh.{name}); its endpoints are: {here}"
            )
        raise UnknownEndpointError(f"{self.cls.__name__} has no endpoint {name!r}; its endpoints are: {here}")


def _reserved() -> frozenset[str]:
    from monarch_backend._actor.actor_mesh import ActorMesh

    names = {*dir(MeshBase), *dir(ActorMesh), "_core", "_shape"}
    return frozenset(name for name in names if not name.startswith("__"))


@functools.lru_cache(maxsize=1024)
def blueprint(cls: type) -> ActorClassInfo:
    """Read an actor's class. Raises TypeError for another class and ValueError for endpoints that don't fit
    together.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise TypeError(
            f"{getattr(cls, '__name__', cls)!r} is no Actor: derive the class from monarch_backend.actor.Actor"
        )
    found: dict[str, EndpointSpec] = {}
    reserved = _reserved()
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if isinstance(method, EndpointMethod):
            if name in reserved:
                raise ValueError(
                    f"{cls.__name__}.{name}: every mesh has an attribute {name!r}; give the endpoint another name"
                )
            found[name] = specify(name, method.method, method.concurrent, method.explicit_port)
    kinds = {spec.is_async for spec in found.values()}
    if len(kinds) == 2:
        plain = ", ".join(sorted(name for name, spec in found.items() if not spec.is_async))
        raise ValueError(
            f"{cls.__name__} mixes `def` and `async def` endpoints: an actor has one kind. "
            f"Make these async, too: {plain}"
        )
    return ActorClassInfo(cls, found, kinds == {True})


def specify(
    name: str, method: Callable[..., Any], concurrent: bool = False, explicit_port: bool = False
) -> EndpointSpec:
    """What is known of one method."""
    generator = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
    is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    return EndpointSpec(
        name, is_async, generator, concurrent, explicit_port, _checker(name, method, 2 if explicit_port else 1)
    )


def _checker(name: str, method: Callable[..., Any], skip: int) -> Callable[..., None] | None:
    """A function that does nothing but take what the method takes: Python's own binding, at a tenth of inspect's
    cost.
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
