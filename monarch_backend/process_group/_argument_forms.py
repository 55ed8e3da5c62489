"""Call forms of c10d's methods: a list form with an options object, and single tensors with root, op, timeout.

`ProcessGroup.broadcast` takes ``(tensors, opts)`` and ``(tensor, root, timeout)``, all by position or by name. Most
collectives have such a pair. Methods of _collectives.py take the first form only; the decorator converts the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from monarch_backend.process_group._collective_specs import ARGUMENTS, BY_METHOD

_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}

_Method = Callable[..., Any]


def call_forms(method: _Method) -> _Method:
    """Decorator for ``method(self, *tensors, opts)``, whose name is in the table of collectives.

    The method also takes what the table allows in place of the options. Anything else is a TypeError, as from c10d.
    """
    spec = BY_METHOD[method.__name__]
    options, tensors, instead = spec.options, ARGUMENTS[spec.form], spec.keywords
    assert options is not None
    count = len(tensors)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        if not named and len(args) == count + 1 and type(args[count]) is options:
            return method(self, *args)  # torch's own calls
        return method(self, *_parse(method.__name__, options, tensors, instead, args, named))

    return call


def _parse(
    method: str,
    options: type,
    tensors: tuple[tuple[str, ...], ...],
    instead: tuple[str, ...],
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> list[Any]:
    values = list(args[: len(tensors)])
    for names in tensors[len(values) :]:
        given = [name for name in names if name in named]
        if len(given) != 1:
            raise TypeError(f"{method}() needs the argument {' or '.join(names)}")
        values.append(named.pop(given[0]))
    rest = list(args[len(tensors) :])
    opts = named.pop("opts", None)
    if rest and (isinstance(rest[0], options) or (len(rest) == 1 and rest[0] is None)):
        opts = rest.pop(0)
    if len(rest) > len(instead) or named.keys() - set(instead[len(rest) :]):
        given = [*map(repr, rest), *named]
        raise TypeError(f"{method}() takes opts{''.join(f' or {name}' for name in instead)}; not {', '.join(given)}")
    fields = {**dict(zip(instead, rest, strict=False)), **named}
    if opts is not None and fields:
        raise TypeError(f"{method}() takes opts or {', '.join(fields)}, not both")
    return [*values, _filled(options, fields) if opts is None else opts]


def _filled(options: type, fields: dict[str, Any]) -> Any:
    opts = options()
    for name, value in fields.items():
        if value is not None:
            setattr(opts, _FIELDS[name], value)
    return opts
