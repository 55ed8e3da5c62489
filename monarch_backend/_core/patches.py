"""Changes of torch: the rows of a manifest, and the function that applies rows.

A manifest is a sequence of `Patch`, a row for each replaced name. It may also have `Registration` rows, for entries in
torch's tables. `apply` replaces those that the running release of
torch needs. A row refers to its replacement by name: a manifest can be read without importing torch's modules.

The rows of a `Feature` belong together. `apply_feature` refuses a feature by name if the running torch is too old for
it, or if an untested newer torch lacks a row's name. Other features work.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from monarch_backend._core.torch_version import NEWEST, torch_version

Kind = Literal["semantics", "fix", "cache"]
Scope = Literal["controller mesh", "process"]
Moment = Literal[
    "import of torch", "first group", "first mesh", "first mesh of GPUs or XLA", "first autocast", "first trace",
    "start of a worker",
]  # fmt: skip
Release = tuple[int, int]
Maker = Callable[[Any], Any]
"""Makes a replacement from torch's own object."""


@dataclasses.dataclass(frozen=True)
class Patch:
    """A name of torch that is replaced.

    ``target``: ``"module:attribute"``, with dots for attributes of a class. ``makers``: names of functions
    (``"module:function"``), applied in order. Each makes a replacement from the object before it. ``since`` and
    ``before``: the releases, from the first, up to and without the second. ``swaps_code``: the function object stays
    and its code calls the replacement, for functions that other modules import by name. ``adds``: torch reads the
    attribute and does not define it. ``test``: ``"path::name"``.
    """

    target: str
    kind: Kind
    makers: Sequence[str]
    why: str
    test: str
    since: Release
    before: Release | None = None
    upstream: str = "none"
    swaps_code: bool = False
    adds: bool = False

    def is_for(self, release: Release) -> bool:
        return _is_in(self, release)


@dataclasses.dataclass(frozen=True)
class Registration:
    """Entries that are added to tables of torch, replaced in these, or removed.

    ``tables``: each ``"module:attribute"``, or words for a table in C++. ``entries``: their names there, as patterns of
    fnmatch, or the ``"module:attribute"`` of our operators. ``like``: operators of torch; all entries that are torch's
    own for one of these. ``by``: our module that registers. ``at``: when it does. ``scope``: "controller mesh" if
    torch's own code runs for other tensors and meshes, else "process". ``since``, ``before``, ``test``: as in `Patch`.
    """

    tables: Sequence[str]
    entries: Sequence[str] | str
    by: str
    at: Moment
    scope: Scope
    kind: Kind
    why: str
    test: str
    since: Release
    before: Release | None = None
    like: Sequence[str] = ()

    def is_for(self, release: Release) -> bool:
        return _is_in(self, release)


@dataclasses.dataclass(frozen=True)
class Feature:
    """Rows that work only together. ``name`` is the subject of an error. ``since``: the oldest release that has it."""

    name: str
    rows: Sequence[Patch]
    since: Release


class PatchTargetError(RuntimeError):
    """A release of torch has no such name, although it is in the range of the name's row."""


class FeatureUnavailableError(RuntimeError):
    """A feature does not work with the running release of torch; the text names the release to use."""


originals: dict[str, Any] = {}
"""By target, torch's own object of each name that `apply` has replaced in this process."""


def unmatched(rows: Iterable[Patch], release: Release | None = None) -> dict[str, str]:
    """Return the rows in range whose name the running torch lacks: by target, the reason."""
    running = torch_version() if release is None else release
    found = {}
    for row in rows:
        if row.is_for(running) and row.target not in originals:
            try:
                locate(row)
            except PatchTargetError as error:
                found[row.target] = str(error)
    return found


def require(feature: Feature, release: Release | None = None) -> None:
    """Raise `FeatureUnavailableError` if the running torch does not have the feature."""
    reason = _reason(feature, torch_version() if release is None else release)
    if reason is not None:
        raise FeatureUnavailableError(reason)


def apply(rows: Iterable[Patch], release: Release | None = None) -> list[Patch]:
    """Apply the rows whose range has ``release``, by default the running one, and return these.

    A row is applied once in a process. Raises `PatchTargetError` before anything is replaced if a target is missing. On
    a torch that is newer than the tested ones, a fix or a cache without target is left out, with one warning for all.
    """
    running = torch_version() if release is None else release
    wanted = [row for row in rows if row.is_for(running)]
    missing = unmatched(wanted, running) if running > NEWEST else {}
    left_out = [row for row in wanted if row.target in missing and row.kind != "semantics"]
    if left_out:
        names = "; ".join(f"{row.target} ({row.why})" for row in left_out)
        warnings.warn(f"torch {_text(running)} is newer than tested and lacks what is corrected: {names}", stacklevel=2)
    wanted = [row for row in wanted if row not in left_out]
    found = [(row, *locate(row)) for row in wanted if row.target not in originals]
    makers = [[named(maker) for maker in row.makers] for row, *_ in found]
    for (row, owner, name), making in zip(found, makers, strict=True):
        _put(row, owner, name, making)
    return wanted


def apply_feature(feature: Feature, refuse: Maker | None = None, release: Release | None = None) -> bool:
    """Apply a feature's rows; return whether the running torch has the feature.

    Without it ``refuse`` makes the replacements of the functions among its rows.
    """
    running = torch_version() if release is None else release
    reason = _reason(feature, running)
    if reason is None:
        apply(feature.rows, running)
        return True
    if refuse is None:
        return False
    for row in feature.rows:
        with contextlib.suppress(PatchTargetError):
            owner, name = locate(row)
            own = getattr(owner, name, None)
            if inspect.isroutine(own) and row.target not in originals:
                _put(row, owner, name, [refuse])
    return False


def _is_in(row: Patch | Registration, release: Release) -> bool:
    return row.since <= release and (row.before is None or release < row.before)


def _put(row: Patch, owner: Any, name: str, makers: Sequence[Maker]) -> None:
    """Replace a row's name by what the makers make, and keep torch's own object in `originals`."""
    originals[row.target] = None if row.adds else _own(owner, name)
    if row.adds:
        for maker in makers:
            setattr(owner, name, maker(None))
    elif row.swaps_code:
        originals[row.target] = _swap_code(inspect.unwrap(getattr(owner, name)), makers)
    else:
        for maker in makers:
            _replace(owner, name, maker)


def _reason(feature: Feature, running: Release) -> str | None:
    """Return why the running torch does not have a feature; None if it has."""
    here = f"{feature.name} does not work with torch {_text(running)}"
    if running < feature.since:
        return f"{here}: use torch {_text(feature.since)} to {_text(NEWEST)}"
    if running <= NEWEST:
        return None
    instead = f"Use torch {_text(NEWEST)}, the newest that monarch_backend was tested with"
    missing = list(unmatched(feature.rows, running))
    if missing:
        return f"{here}, which lacks {', '.join(missing)}. {instead}"
    try:
        for row in feature.rows:
            for maker in row.makers if row.is_for(running) else ():
                named(maker)
    except (ImportError, AttributeError) as error:
        return f"{here}: {error}. {instead}"
    return None


def locate(row: Patch) -> tuple[Any, str]:
    """Return the module or class that has the row's name, and the attribute's name there."""
    module, _, path = row.target.partition(":")
    *classes, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for each in classes:
            owner = getattr(owner, each)
        if not row.adds:
            inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        releases = f"{_text(row.since)} up to {_text(row.before) if row.before else 'the newest'}"
        raise PatchTargetError(
            f"torch {'.'.join(map(str, torch_version()))} has no {row.target}, which monarch_backend replaces in torch "
            f"{releases} ({row.why}). Use a release of torch that monarch_backend was tested with"
        ) from error
    return owner, name


def named(reference: str) -> Any:
    """Return the object of a ``"module:name"``."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _text(release: Release) -> str:
    return ".".join(map(str, release))


def _own(owner: Any, name: str) -> Any:
    raw = inspect.getattr_static(owner, name)
    return getattr(owner, name) if name in ("__bases__", "__class__") else raw


def _replace(owner: Any, name: str, maker: Maker) -> None:
    raw = inspect.getattr_static(owner, name)
    if isinstance(raw, (staticmethod, classmethod)):
        setattr(owner, name, type(raw)(functools.wraps(raw.__func__)(maker(raw.__func__))))
        return
    own = getattr(owner, name)
    made = maker(own)
    is_function = callable(own) and callable(made) and not isinstance(made, (type, property))
    setattr(owner, name, functools.wraps(own)(made) if is_function else made)


def _swap_code(function: Any, makers: Sequence[Maker]) -> Any:
    """Let the function's code call what the makers make; return a function with its own code."""
    own = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = inspect.signature(own)
    name = f"_monarch_{function.__name__}"  # a module may have several
    made: Any = own
    for maker in makers:
        made = maker(made)
    function.__globals__[name] = made
    calls = (lambda *args, **kwargs: _monarch_stand_in(*args, **kwargs)).__code__  # type: ignore[name-defined] # noqa: F821
    # dynamo decides by the file whether it traces a function: as it does the replacement.
    function.__code__ = calls.replace(co_names=(name,), co_filename=made.__code__.co_filename)
    return own


def documented(manifests: Mapping[str, tuple[Sequence[Patch], Sequence[Registration]]]) -> str:
    """Return the page with up to two tables for each title: the replaced names, and the registrations."""
    parts = [_PAGE]
    for title, (rows, registrations) in manifests.items():
        parts.append(f"\n## {title}\n")
        if rows:
            parts.append(f"\n{_counts(rows, 'replaced names')}\n\n{_NAMES}\n")
            parts += [f"| {' | '.join(_cells(row))} |\n" for row in rows]
        if registrations:
            parts.append(f"\n{_counts(registrations, 'registrations')}\n\n{_REGISTRATIONS}\n")
            parts += [f"| {' | '.join(_registered(row))} |\n" for row in registrations]
    return "".join(parts)


_PAGE = """# Changes of torch

Generated by `python -m monarch_backend.dtensor._patches.manifest`. A program has two kinds of changes:

- Replaced names: attributes of torch's modules and classes. Other meshes and groups get torch's own functions.
- Registrations: entries in torch's own tables, such as kernels of the dispatcher and DTensor's sharding strategies.

Both are made when they are needed, and not before. A program without a mesh of a controller has those of
`backend="monarch"` only. Kinds: *semantics* where torch acts for the rank of its process, *fix* where its result is
wrong or missing, *cache* where only time is saved. A row applies to the releases of torch in its range.

Upstream, for a replaced name:

- *none*: torch does what it is meant to do, so there is nothing to report.
- *not reported*: a defect of torch or torch_xla for which we know no issue and no pull request of pytorch/pytorch.
- A link: an issue or a pull request about the same defect, which may be closed. The row ends with the first release
  that does not need it.

Scope of a registration:

- *controller mesh*: torch's own code is called for other tensors and meshes, so they have torch's results.
- *process*: it also acts on other tensors and meshes of the process, from the named moment on.

A test compares the tables of torch before and after with these rows, in a new process
(`tests/dtensor/patches/test_registrations.py`).
"""
_NAMES = "| name | kind | torch | why | upstream | test |\n| --- | --- | --- | --- | --- | --- |"
_REGISTRATIONS = (
    "| tables | entries | at | scope | kind | torch | why | module | test |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def _counts(rows: Sequence[Patch] | Sequence[Registration], what: str) -> str:
    kinds = collections.Counter(row.kind for row in rows)
    return f"{len(rows)} {what}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) + "."


def _cells(row: Patch) -> tuple[str, ...]:
    name = f"`{row.target.replace(':', '.')}`"
    return name, row.kind, _range(row), row.why, _link(row.upstream), f"`{row.test}`"


def _registered(row: Registration) -> tuple[str, ...]:
    tables = ", ".join(f"`{_short(each)}`" if ":" in each else each for each in row.tables)
    if isinstance(row.entries, str):
        entries = f"the operators of `{_short(row.entries)}`"
    else:
        entries = ", ".join(f"`{_short(each)}`" for each in row.entries)
    if row.like:
        like = "all with the entry of " + " or ".join(f"`{each}`" for each in row.like)
        entries = f"{entries}; {like}" if entries else like
    module = f"`{_short(row.by)}`"
    return tables, entries, row.at, row.scope, row.kind, _range(row), row.why, module, f"`{row.test}`"


def _short(reference: str) -> str:
    """Return the text of a reference, without our package's name and the module of DTensor; operators as they are."""
    if "::" in reference:
        return reference
    public = reference.removeprefix("torch.distributed.tensor:")
    return public.removeprefix("monarch_backend.").replace(":", ".")


def _range(row: Patch | Registration) -> str:
    return f">= {_text(row.since)}" + (f", < {_text(row.before)}" if row.before else "")


def _link(upstream: str) -> str:
    repository, is_thread, number = upstream.partition("#")
    return f"[{upstream}](https://github.com/{repository}/issues/{number})" if is_thread else upstream
