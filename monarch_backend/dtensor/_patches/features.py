"""Features of a controller that a release of torch may lack: checkpoints, GPUs, FSDP2 and captured steps.

Each is a `Feature` of the manifest. Without it the controller works, and a program that uses it gets an error that
names the release to use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from monarch_backend._core import patches
from monarch_backend._core.patches import Feature
from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._patches import manifest


def install() -> None:
    """Apply the rows that a mesh needs, and those of each feature that the running torch has."""
    patches.apply(manifest.CORE)
    for feature in (manifest.CHECKPOINTS, manifest.FSDP2):
        patches.apply_feature(feature, functools.partial(_refused, feature))
    patches.apply_feature(manifest.GPUS)  # `device_mesh` refuses them


def require_traces() -> None:
    """Raise an error that names the release to use if the running torch can't capture steps."""
    _require(manifest.CAPTURED)


def require_gpus() -> None:
    """Raise an error that names the release to use if the running torch can't be a controller of GPUs."""
    _require(manifest.GPUS)


def _require(feature: Feature) -> None:
    try:
        patches.require(feature)
    except patches.FeatureUnavailableError as error:
        raise RemoteTensorError(str(error)) from None


def _refused(feature: Feature, own: Any) -> Callable[..., Any]:
    """Return a function that raises in a controller, and calls torch's own elsewhere."""

    def refuse(*args: Any, **options: Any) -> Any:
        if controller_process_group.is_controller():
            _require(feature)
        return own(*args, **options)

    return refuse
