"""The Slurm jobs of a `SlurmJob`: the one that `apply` has submitted, and a further one for each growth of a mesh.

The job's file lists them in ``JobFile.submitted``. All have the same name at Slurm. A Slurm job with that name that is
not in the list was accepted after its submission was given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monarch_backend._job.state_file import JobFile


@dataclass(frozen=True)
class Allocation:
    """One Slurm job. ``hosts``: the indices of its hosts, by mesh. ``folder``: its logs, and the addresses of hosts.

    ``is_further``: a growth has submitted it. It then has hosts of one mesh.
    """

    number: int
    folder: Path
    hosts: Mapping[str, range]
    is_further: bool = False

    def without(self, mesh: str, count: int) -> Allocation:
        """Return it without the hosts of a mesh from index ``count`` on."""
        left = {
            name: range(indices.start, max(indices.start, min(indices.stop, count))) if name == mesh else indices
            for name, indices in self.hosts.items()
        }
        return replace(self, hosts=left)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Mesh and index of each host."""
        return [(mesh, index) for mesh, indices in self.hosts.items() for index in indices]

    @property
    def is_empty(self) -> bool:
        return not any(self.hosts.values())


def read_allocations(file: JobFile) -> list[Allocation]:
    """Return the Slurm jobs of a job in the order of their submission. All hosts are in one until it is resized."""
    submitted = file.submitted
    if not submitted:
        return []
    meshes = file.description["meshes"]
    first = submitted.get("hosts", {name: [0, mesh["hosts"]] for name, mesh in meshes.items()})
    return [_decoded(submitted, first, is_further=False)] + [
        _decoded(each, each["hosts"], is_further=True) for each in submitted.get("further", ())
    ]


def write_allocations(file: JobFile, allocations: Sequence[Allocation]) -> None:
    """Replace the list in the content of a job's file."""
    first, *further = (_encoded(each) for each in allocations)
    file.submitted = {**file.submitted, **first, "further": further}


def _decoded(entry: Mapping[str, Any], hosts: Mapping[str, Any], *, is_further: bool) -> Allocation:
    ranges = {name: range(start, stop) for name, (start, stop) in hosts.items()}
    return Allocation(entry["job"], Path(entry["folder"]), ranges, is_further)


def _encoded(each: Allocation) -> dict[str, Any]:
    ranges = {name: [indices.start, indices.stop] for name, indices in each.hosts.items()}
    return {"job": each.number, "folder": str(each.folder), "hosts": ranges}
