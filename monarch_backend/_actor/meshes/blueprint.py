"""Description of an actor class, read from its methods."""

from __future__ import annotations

import functools
import inspect

from monarch_backend._actor.actor import Actor, ActorClassInfo, EndpointMethod, EndpointSpec, specify
from monarch_backend._actor.meshes.actor_mesh import ActorMesh
from monarch_backend._mesh.mesh_base import MeshBase


def _reserved() -> frozenset[str]:
    names = {*dir(MeshBase), *dir(ActorMesh), "_core", "_shape"}
    return frozenset(name for name in names if not name.startswith("__"))


@functools.lru_cache(maxsize=1024)
def blueprint(cls: type) -> ActorClassInfo:
    """Return the description of an actor class.

    Raises TypeError for a class that is not an `Actor`. Raises ValueError for an endpoint whose name every mesh has,
    and for a class that mixes `def` and `async def` endpoints.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise TypeError(
            f"{getattr(cls, '__name__', cls)!r} is not an Actor: derive the class from monarch_backend.actor.Actor"
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
