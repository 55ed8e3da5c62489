"""Placement groups of a `RayJob`: one for the hosts that were applied, and one for each host that `resize` has added.

A placement group has a fixed number of bundles, and Ray gives back all of them or none. So a host that `resize` adds
has a group of its own, and `resize` can give its resources back.

Ray keeps a strategy within one group only. Under STRICT_SPREAD the group of an added host has a label selector, which
excludes the nodes of the job's other hosts. Ray has no affinity between groups, and the selector does not change: Ray
may place two added hosts on one node, or move a host to the node of another one. `misplaced` finds both cases, and one
of the two hosts is then placed anew. Under STRICT_PACK the selector names the node of the other hosts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from monarch_backend._job.errors import JobError

NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives to each node."""
WITH_LABELS = "2.49"
"""First release of Ray whose placement groups have label selectors."""


class Group(NamedTuple):
    """A placement group. ``nodes``: the id of the node of each bundle, "" for a bundle that has none."""

    handle: Any
    state: str
    scheduling: str
    nodes: Mapping[int, str]

    @property
    def is_placed(self) -> bool:
        return self.state == "CREATED"


class Place(NamedTuple):
    """A bundle of a group, for one host."""

    group: Group
    bundle: int

    @property
    def node(self) -> str:
        return self.group.nodes.get(self.bundle, "")

    @property
    def is_lost(self) -> bool:
        return self.group.state == "RESCHEDULING" and not self.node


def find_groups(ray: Any, name: str) -> dict[str, Group]:
    """Return the groups of a job by their names: ``name``, and those that begin with it and a "-"."""
    from ray.util.placement_group import PlacementGroup

    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    found = {}
    for number, entry in ray.util.placement_group_table().items():
        if entry["state"] != "REMOVED" and (entry["name"] == name or entry["name"].startswith(f"{name}-")):
            handle = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number)))
            nodes = {bundle: node for bundle, node in entry["bundles_to_node_id"].items() if node in alive}
            found[entry["name"]] = Group(handle, entry["state"], entry["stats"]["scheduling_state"], nodes)
    return found


def create_group(
    ray: Any, name: str, bundles: Sequence[Mapping[str, float]], strategy: str, lifetime: str | None,
    selector: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """Return a new placement group. ``selector``: that of each bundle."""
    options: dict[str, Any] = {}
    if selector:
        options["bundle_label_selector"] = [dict(selector)] * len(bundles)
    return ray.util.placement_group([dict(each) for each in bundles], strategy, name=name, lifetime=lifetime, **options)


def selector_beside(strategy: str, nodes: Iterable[str]) -> dict[str, str] | None:
    """Return the label selector of an added host. ``nodes``: those of the job's other hosts.

    None if the host cannot be placed yet, because the node that it must share is not known.
    """
    known = sorted({node for node in nodes if node})
    if strategy == "STRICT_SPREAD" and known:
        return {NODE_LABEL: f"!in({','.join(known)})"}
    if strategy == "STRICT_PACK":
        return {NODE_LABEL: f"in({known[0]})"} if known else None
    return {}


def check_can_add(ray: Any, strategy: str) -> None:
    """Raise JobError if this release of Ray cannot keep the strategy for hosts that are added."""
    if strategy.startswith("STRICT_"):
        known = inspect.signature(ray.util.placement_group).parameters
        if "bundle_label_selector" not in known:
            raise JobError(
                f"Ray {ray.__version__} cannot keep {strategy} for a host that is added: it needs Ray {WITH_LABELS}, "
                "for label selectors of placement groups. Upgrade Ray, or use the strategy SPREAD or PACK"
            )


def misplaced(strategy: str, places: Mapping[Any, Place], own: Iterable[Any], kept: Iterable[Any]) -> dict[Any, str]:
    """Return the hosts whose place breaks the job's strategy, with the reason.

    ``places``: those of all hosts, in the job's order. ``own``: hosts with a group of their own. ``kept``: hosts that
    programs may use already, which are not moved for the sake of others.
    """
    if strategy == "STRICT_SPREAD":
        return _on_shared_nodes(places, set(kept))
    return _beside_others(places, set(own)) if strategy == "STRICT_PACK" else {}


def _on_shared_nodes(places: Mapping[Any, Place], kept: set[Any]) -> dict[Any, str]:
    taken: dict[str, Any] = {}
    wrong = {}
    for host in sorted(places, key=lambda host: host not in kept):  # stable: else in the job's order
        node = places[host].node
        if node and node in taken:
            wrong[host] = f"Ray has put it on the node of {taken[node]}, and STRICT_SPREAD allows one host on a node"
        elif node:
            taken[node] = host
    return wrong


def _beside_others(places: Mapping[Any, Place], own: set[Any]) -> dict[Any, str]:
    first = next((places[host].node for host in places if host not in own and places[host].group.is_placed), "")
    if not first:
        return {}
    return {
        host: "its node was lost, and Ray has moved the other hosts: STRICT_PACK puts all on one node"
        for host in places
        if host in own and places[host].node != first and places[host].group.state == "RESCHEDULING"
    }
