"""The hook that makes ``backend="monarch"`` known. Runs inside ``import torch`` for every user of the machine.

May live here: registering the name and the stand-ins for torch's name checks. May not: anything that costs
time or can fail. The process group itself is imported by the creator, when the first group is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BACKEND_NAME = "monarch"
# A default only for devices that torch gives to nobody is claimed by listing it here (torch's register_backend);
# cpu and cuda have their defaults, so listing them claims nothing. "xla" and "tpu" belong to their packages.
DEVICES = ["cpu", "cuda"]


def _create_process_group(options: Any, pg_options: Any = None) -> ProcessGroup:
    from monarch_backend.process_group import create

    return create(options, pg_options)


def register() -> None:
    """Register ``"monarch"`` with torch.distributed; calling it again changes nothing.

    Raises nothing on a torch without distributed support: there ``init_process_group`` does not exist either.
    """
    import torch.distributed as dist

    if not dist.is_available() or BACKEND_NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(BACKEND_NAME, _create_process_group, extended_api=True, devices=DEVICES)
    from monarch_backend import _torch_patches

    _torch_patches.install()


def torch_backends_entry() -> None:
    """Entry point of group ``torch.backends``: called by ``import torch`` itself.

    torch 2.14 and later load the group ``torch.distributed.backends`` when the name is first used, so there
    is nothing to do at import. An exception here would break ``import torch`` for everybody, hence the net:
    what went wrong is said once, and ``init_process_group`` will say that the backend is unknown.
    """
    import torch

    try:
        if not hasattr(torch.distributed.Backend, "_ensure_backend_registered"):
            register()
    except Exception as error:  # see the docstring
        import warnings

        warnings.warn(f"monarch_backend could not register with torch {torch.__version__}: {error}", stacklevel=2)
