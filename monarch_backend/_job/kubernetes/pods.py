"""State of a host from its pod, as the API server describes it. Functions of dictionaries, without a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from monarch_backend._job.kubernetes.manifests import CONTAINER, NOTICE_ANNOTATION
from monarch_backend._job.scheduled import Replica

Json = dict[str, Any]

POD_INDEX = "apps.kubernetes.io/pod-index"
RANK_LABELS = (
    POD_INDEX,
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
    "volcano.sh/task-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
)
"""Labels with the index of a pod in its set.

StatefulSets have theirs since Kubernetes 1.28. Indexed Jobs, and with them JobSet and Kubeflow Trainer, since 1.27.
"""
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"

_CANNOT_START = frozenset(
    {"InvalidImageName", "ErrImageNeverPull", "ImagePullBackOff", "CrashLoopBackOff", "CreateContainerConfigError"}
)
"""Reasons of a waiting container that do not end by waiting. Kubernetes still retries them."""
_DISRUPTED = "DisruptionTarget"
DISRUPTIONS = ("Evicted", "Preempted")
"""Reasons of events that tell why a pod was ended. They exist for an hour, longer than the pod."""


def index_of(pod: Json, rank_label: str | None = None) -> int | None:
    """Return the index of a pod in its mesh: from a label or annotation, or from the end of its name."""
    meta = pod["metadata"]
    found = meta.get("labels") or {}
    names = RANK_LABELS if rank_label is None else (rank_label,)
    texts = [found[name] for name in names if name in found]
    texts += [value for name, value in (meta.get("annotations") or {}).items() if name in (*names, INDEX_ANNOTATION)]
    if not texts and rank_label is None and (ordinal := re.search(r"-(\d+)$", meta["name"])):
        texts = [ordinal[1]]
    return int(texts[0]) if texts and texts[0].isdecimal() else None


def incarnation_of(pod: Json) -> str:
    """Return the identity of this start of a pod's host: another one after each restart of its container."""
    return f"{pod['metadata']['uid']}/{_host_status(pod).get('restartCount', 0)}"


def replica_of(pod: Json, mesh: str, index: int, port: int, *, is_replaced: bool = True) -> Replica:
    """Return a pod as a host of a mesh. ``is_replaced``: a set makes a new pod in the place of one that has ended."""
    state, reason, is_final = _state_of(pod, is_replaced)
    address = pod.get("status", {}).get("podIP") or ""
    if ":" in address:
        address = f"[{address}]"
    where = pod["metadata"]["name"]
    node = pod.get("spec", {}).get("nodeName")
    return Replica(
        mesh, index, state, incarnation_of(pod), where, f"tcp://{address}:{port}" if state in ("up", "ending") else "",
        f"pod {where}{f' on node {node}' if node else ''}", reason, is_final,
    )  # fmt: skip


def _state_of(pod: Json, is_replaced: bool) -> tuple[str, str, bool]:
    status, meta = pod.get("status", {}), pod["metadata"]
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    node = pod.get("spec", {}).get("nodeName", "")
    if meta.get("deletionTimestamp"):
        is_ready = conditions.get("Ready", {}).get("status") == "True"
        return "ending" if is_ready and has_notice(pod) else "gone", _why_deleted(pod, conditions, node), False
    container = _host_status(pod)
    phase = status.get("phase", "Pending")
    if phase in ("Failed", "Succeeded"):
        return "gone", _why_ended(status, container), not is_replaced
    waiting = _waiting(status)
    if waiting is not None:
        why, is_final = _why_waiting(waiting, container)
        return "pending", why, is_final
    if not node:
        scheduled = conditions.get("PodScheduled", {})
        return "pending", _text(scheduled.get("reason", ""), scheduled.get("message", "")) or "not scheduled yet", False
    ready = conditions.get("Ready", {})
    last = (container.get("lastState") or {}).get("terminated")
    restarted = f"its container was restarted after {_ended(last)}" if last else ""
    if ready.get("status") == "True":
        return "up", restarted, False
    if container.get("ready"):
        return "gone", f"node {node} does not respond", False
    if ended := (container.get("state") or {}).get("terminated"):
        return "pending", f"its container has ended ({_ended(ended)}) and is restarted", False
    if (container.get("state") or {}).get("running") is not None:
        return "pending", f"{restarted or 'its container runs'} and does not listen yet", False
    return "pending", _text(status.get("reason", ""), status.get("message", "")) or f"starts on node {node}", False


def is_stuck(pod: Json, now: datetime) -> bool:
    """Return whether a pod should have ended before ``now``, and its node does not respond."""
    until = pod["metadata"].get("deletionTimestamp")
    conditions = {each["type"]: each for each in pod.get("status", {}).get("conditions") or ()}
    if not until or not _is_unreachable(pod, conditions):
        return False
    return now > datetime.fromisoformat(until.replace("Z", "+00:00"))


def has_succeeded(pod: Json) -> bool:
    """Return whether the host has ended with exit code 0, after which a Job starts no other pod."""
    return bool(pod.get("status", {}).get("phase") == "Succeeded")


def has_notice(pod: Json) -> bool:
    """Return whether the host goes on for a while after the deletion of its pod was requested."""
    if (pod["metadata"].get("annotations") or {}).get(NOTICE_ANNOTATION):
        return True
    return any("preStop" in (each.get("lifecycle") or {}) for each in pod.get("spec", {}).get("containers", ()))


def _host_status(pod: Json) -> Json:
    found: Sequence[Json] = pod.get("status", {}).get("containerStatuses") or ()
    named = [each for each in found if each.get("name") == CONTAINER]
    return dict((named or found or [{}])[0])


def _waiting(status: Mapping[str, Any]) -> Json | None:
    """Return the state of a container that waits for more than its creation."""
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        found = (each.get("state") or {}).get("waiting")
        if found and found.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return {**found, "image": each.get("image", ""), "restarts": each.get("restartCount", 0)}
    return None


def _why_waiting(waiting: Json, container: Json) -> tuple[str, bool]:
    reason = waiting["reason"]
    why = _text(reason, waiting.get("message", ""))
    last = (container.get("lastState") or {}).get("terminated")
    if last and reason == "CrashLoopBackOff":
        why = f"{reason}: its container has ended {waiting['restarts']} times, last with {_ended(last)}"
    elif "Image" in reason and waiting["image"] not in why:
        why = f"{why} (image {waiting['image']})"
    return why, reason in _CANNOT_START


def _why_deleted(pod: Json, conditions: Mapping[str, Json], node: str) -> str:
    disrupted = conditions.get(_DISRUPTED, {})
    if disrupted.get("status") == "True":
        return _text(disrupted.get("reason", ""), disrupted.get("message", ""))
    if pod["status"].get("reason") == "NodeLost" or _is_unreachable(pod, conditions):
        return f"node {node} does not respond, and the pod stays until it does or is force-deleted"
    return "the pod is being deleted"


def _is_unreachable(pod: Json, conditions: Mapping[str, Json]) -> bool:
    """Return whether the node's controller has set the pod to not ready, while its kubelet has not."""
    ready = conditions.get("Ready", {})
    return ready.get("status") != "True" and bool(_host_status(pod).get("ready"))


def _why_ended(status: Mapping[str, Any], container: Json) -> str:
    if why := _text(status.get("reason", ""), status.get("message", "")):
        return why
    ended = (container.get("state") or {}).get("terminated")
    return f"its container has ended ({_ended(ended)})" if ended else f"its phase is {status.get('phase')}"


def _ended(terminated: Json) -> str:
    code, reason = terminated.get("exitCode"), terminated.get("reason", "")
    return f"{reason}, exit code {code}" if reason not in ("", "Error", "Completed") else f"exit code {code}"


def _text(reason: str, message: str) -> str:
    return f"{reason}: {message}" if reason and message else reason or message
