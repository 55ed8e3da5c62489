"""monarch_backend: a torch.distributed backend that chooses the best route for every tensor.

This module contains only the public names. Each is imported at its first use, because `import torch` imports this
module on every machine where the package is installed (see _autoload.py).

>>> import monarch_backend
>>> sorted(monarch_backend.routes())[:1]
['cpu']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_backend.process_group import (
        CollectiveArgumentError as CollectiveArgumentError,
    )
    from monarch_backend.process_group import (
        CollectiveMismatchError as CollectiveMismatchError,
    )
    from monarch_backend.process_group import (
        CollectiveTimeoutError as CollectiveTimeoutError,
    )
    from monarch_backend.process_group import (
        GroupClosedError as GroupClosedError,
    )
    from monarch_backend.process_group import (
        MonarchError as MonarchError,
    )
    from monarch_backend.process_group import (
        NoRouteError as NoRouteError,
    )
    from monarch_backend.process_group import (
        Options as Options,
    )
    from monarch_backend.process_group import (
        ProcessGroupError as ProcessGroupError,
    )
    from monarch_backend.process_group import (
        RankFailedError as RankFailedError,
    )
    from monarch_backend.process_group import (
        Route as Route,
    )
    from monarch_backend.process_group import (
        SharedMemoryError as SharedMemoryError,
    )
    from monarch_backend.process_group import (
        empty_shared as empty_shared,
    )
    from monarch_backend.process_group import (
        routes as routes,
    )

__version__ = "0.1.0"

__all__ = [
    "CollectiveArgumentError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupClosedError",
    "MonarchError",
    "NoRouteError",
    "Options",
    "ProcessGroupError",
    "RankFailedError",
    "Route",
    "SharedMemoryError",
    "empty_shared",
    "routes",
]


def __getattr__(name: str) -> Any:
    if name == "_native":
        return _compiled_core()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from monarch_backend import process_group

    value = getattr(process_group, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _compiled_core() -> Any:
    """Import the extension module.

    `from monarch_backend import _native` calls this while the extension is not loaded. Raises ImportError with the
    reason: most often, a clone in `sys.path` hides the installed package.
    """
    import importlib.machinery
    import os
    import sys

    name = f"{__name__}._native"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(here)
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if not os.path.exists(os.path.join(root, "csrc")):
        text = f"{here} has no compiled core ({name}) for {version}: pip install --force-reinstall monarch_backend"
        raise ImportError(text, name=name, path=here)
    elsewhere = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != os.path.realpath(root)]
    installed = importlib.machinery.PathFinder.find_spec(__name__, elsewhere)
    hides = (
        f" and hides the installed package in {os.path.dirname(installed.origin)}"
        if installed and installed.origin
        else ""
    )
    instead = f"run the program from a directory outside {root}, or " if hides else ""
    raise ImportError(
        f"monarch_backend was imported from the source folder {here}, which has no compiled core ({name}) for {version}"
        f"{hides}. To fix it, {instead}build the core in place: `pip install -e {root}`, or `make setup` there.",
        name=name,
        path=here,
    )


def _torch_will_call_us() -> bool:
    """Return whether a later `import torch` looks for the entry point of this package and finds it."""
    import importlib.metadata
    import os

    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    found = importlib.metadata.entry_points(group="torch.backends", name="monarch")
    return any(entry.module == "monarch_backend._autoload" for entry in found)


def _on_import() -> None:
    import sys

    # While `import torch` runs its entry points, torch is still being initialised. The user did not ask for this
    # package then: the entry point registers it, and a warning about versions would be noise.
    loading = sys.modules.get("torch")
    if loading is not None and getattr(loading.__spec__, "_initializing", False):
        return
    if loading is None and _torch_will_call_us():
        return  # a host's daemon needs no torch, and starts in a tenth of the time
    import torch  # noqa: F401 # first and separately: it calls our entry point, which needs the modules below

    from monarch_backend import _autoload
    from monarch_backend._core import torch_version

    _autoload.register()
    torch_version.remark()


_on_import()
