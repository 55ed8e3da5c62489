"""Places of the hosts of a `RayJob`: what strategies allow, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch_backend._job.errors import JobError
from monarch_backend._job.ray_placement import (
    NODE_LABEL,
    Group,
    Place,
    check_can_add,
    misplaced,
    selector_beside,
)  # fmt: skip


def place(node: str, state: str = "CREATED") -> Place:
    return Place(Group(None, state, state, {0: node} if node else {}), 0)


def test_strict_spread_excludes_known_nodes() -> None:
    assert selector_beside("STRICT_SPREAD", ["b", "", "a", "b"]) == {NODE_LABEL: "!in(a,b)"}
    assert selector_beside("STRICT_SPREAD", [""]) == {}


def test_strict_pack_waits_for_the_node_of_the_others() -> None:
    assert selector_beside("STRICT_PACK", ["a", "a"]) == {NODE_LABEL: "in(a)"}
    assert selector_beside("STRICT_PACK", [""]) is None


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_soft_strategies_allow_every_place(strategy: str) -> None:
    assert selector_beside(strategy, ["a"]) == {}
    assert misplaced(strategy, {"t[0]": place("a"), "t[1]": place("a")}, ["t[1]"], []) == {}


def test_two_hosts_on_a_node_break_strict_spread() -> None:
    places = {"t[0]": place("a"), "t[1]": place("a"), "t[2]": place("b"), "t[3]": place("")}
    assert list(misplaced("STRICT_SPREAD", places, [], [])) == ["t[1]"]
    [(host, reason)] = misplaced("STRICT_SPREAD", places, [], ["t[1]"]).items()
    assert host == "t[0]"
    assert "on the node of t[1]" in reason


def test_added_host_of_a_lost_node_breaks_strict_pack_when_the_others_have_moved() -> None:
    places = {"t[0]": place("b"), "t[1]": place("", "RESCHEDULING")}
    assert list(misplaced("STRICT_PACK", places, ["t[1]"], [])) == ["t[1]"]
    places["t[0]"] = place("", "RESCHEDULING")
    assert misplaced("STRICT_PACK", places, ["t[1]"], []) == {}
    places = {"t[0]": place("a"), "t[1]": place("", "PENDING")}
    assert misplaced("STRICT_PACK", places, ["t[1]"], []) == {}


def test_release_of_ray_without_label_selectors_cannot_add_hosts_strictly() -> None:
    ray: Any = SimpleNamespace(
        __version__="2.40.0", util=SimpleNamespace(placement_group=lambda bundles, strategy="PACK": (bundles, strategy))
    )
    check_can_add(ray, "SPREAD")
    with pytest.raises(JobError, match=r"Ray 2.40.0 cannot keep STRICT_PACK .*: it needs Ray 2.49"):
        check_can_add(ray, "STRICT_PACK")
