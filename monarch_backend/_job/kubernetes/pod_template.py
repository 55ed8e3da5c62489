"""Pod template of a mesh: the arguments of `KubernetesJob.add_mesh`, checked and merged into a given template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from monarch_backend._job.base import check_variables
from monarch_backend._job.kubernetes.manifests import CONTAINER, GRACE_PERIOD_S, NOTICE_ANNOTATION, host_container

Manifest = dict[str, Any]

_AMOUNT = re.compile(r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?")
"""A quantity of Kubernetes that is not negative, such as 8, 0.5, 500m, 64Gi or 1e3."""


def pod_template(
    given: Mapping[str, Any] | None, image: str | None, *, resources: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None, labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None, node_selector: Mapping[str, str] | None = None,
    tolerations: Sequence[Mapping[str, Any]] = (), priority_class: str | None = None,
    service_account: str | None = None, scheduler: str | None = None, image_pull_policy: str | None = None,
    image_pull_secrets: str | Sequence[str] = (), grace_period: int | None = None, notice: int = 0,
) -> Manifest:  # fmt: skip
    """Return ``given``, or a template with one container of ``image``, with the other arguments of `add_mesh`.

    Raises ValueError for an argument with a wrong type, and for an argument that contradicts ``given``.
    """
    made: Manifest = {"spec": {"containers": [{"name": CONTAINER, "image": _text("image", image)}]}}
    if given is not None:
        made = _without_nulls(_mapping("pod_template", given))
    for part in ("metadata", "spec"):
        made[part] = _mapping(f"{part} of the pod_template", made.get(part))
    meta, spec = made["metadata"], made["spec"]
    container = host_container(spec)
    meta["labels"] = _merged("labels", meta.get("labels"), _texts("labels", labels))
    noticed = {**_texts("annotations", annotations), **_notice(notice)}
    meta["annotations"] = _merged("annotations", meta.get("annotations"), noticed)
    spec["nodeSelector"] = _merged("node_selector", spec.get("nodeSelector"), _texts("node_selector", node_selector))
    for name, field, value in (
        ("priority_class", "priorityClassName", priority_class),
        ("service_account", "serviceAccountName", service_account),
        ("scheduler", "schedulerName", scheduler),
    ):
        _set(spec, field, name, _text(name, value))
    _set(container, "imagePullPolicy", "image_pull_policy", _text("image_pull_policy", image_pull_policy))
    spec["tolerations"] = _with("tolerations", spec.get("tolerations"), _tolerations(tolerations))
    secrets = [image_pull_secrets] if isinstance(image_pull_secrets, str) else image_pull_secrets
    pulls = [{"name": _text("image_pull_secrets", each)} for each in _list("image_pull_secrets", secrets)]
    spec["imagePullSecrets"] = _with("imagePullSecrets", spec.get("imagePullSecrets"), pulls)
    _set_env(container, _variables(env))
    _set_resources(container, _amounts(resources))
    default = GRACE_PERIOD_S if given is None else None
    _set_grace(meta, spec, default if grace_period is None else _seconds("grace_period", grace_period))
    made["metadata"] = {name: value for name, value in meta.items() if value}
    made["spec"] = {name: value for name, value in spec.items() if value not in ({}, [])}
    return {name: value for name, value in made.items() if value}


# ---- arguments


def _mapping(what: str, value: Any) -> Manifest:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{what} is a dictionary, not {value!r}")
    return dict(value or {})


def _list(what: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ValueError(f"{what} is a list, not {value!r}")
    return list(value)


def _text(what: str, value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{what}={value!r}: give a text that is not empty")
    return value


def _texts(what: str, value: Any) -> dict[str, str]:
    found = _mapping(what, value)
    for name, each in found.items():
        if not isinstance(name, str) or not isinstance(each, str):
            raise ValueError(f"{what}: {name!r}: {each!r} is not a pair of texts, such as {str(name)!r}: {str(each)!r}")
    return found


def _variables(env: Any) -> dict[str, str]:
    return check_variables(_texts("env", env))


def _tolerations(given: Any) -> list[Manifest]:
    return [_mapping("each of tolerations", each) for each in _list("tolerations", given)]


def _seconds(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what}={value!r}: give a number of seconds, 0 or more")
    return value


def _notice(notice: Any) -> dict[str, str]:
    return {NOTICE_ANNOTATION: str(notice)} if _seconds("notice", notice) else {}


def _amounts(resources: Any) -> dict[str, dict[str, str]]:
    """Return limits and requests. "limits" or "requests" is taken as it is. Other keys are both, as GPUs need them."""
    found = _mapping("resources", resources)
    given = {kind: found.pop(kind) for kind in ("limits", "requests") if kind in found}
    if given and found:
        raise ValueError(f"resources has limits or requests, so {', '.join(map(str, found))} must be in one of these")
    if not given:
        amounts = _checked("resources", found)
        return {"limits": amounts, "requests": dict(amounts)} if amounts else {}
    return {kind: _checked(f"resources[{kind!r}]", each) for kind, each in given.items()}


def _checked(what: str, amounts: Any) -> dict[str, str]:
    checked = {}
    for name, amount in _mapping(what, amounts).items():
        text = "" if isinstance(amount, bool) or not isinstance(amount, (str, int, float)) else str(amount)
        if not _AMOUNT.fullmatch(text):
            raise ValueError(f"{what}: {name}={amount!r} is not an amount, such as 8, 0.5, '500m' or '64Gi'")
        checked[str(name)] = text
    return checked


# ---- merging


def _without_nulls(value: Any) -> Any:
    """Return a copy without keys whose value is None. Kubernetes takes them as absent."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(each) for each in value]
    return value


def _conflict(argument: str, field: str, there: Any, here: Any) -> ValueError:
    return ValueError(
        f"{argument}: the pod_template has {field}={there!r}, and the argument {here!r}: give it in one of both"
    )


def _set(target: Manifest, field: str, argument: str, value: Any) -> None:
    if value is None:
        return
    there = target.setdefault(field, value)
    if there != value:
        raise _conflict(argument, field, there, value)


def _merged(argument: str, there: Any, values: Mapping[str, Any]) -> Manifest:
    made = _mapping(f"{argument} of the pod_template", there)
    for name, value in values.items():
        _set(made, name, argument, value)
    return made


def _with(field: str, there: Any, values: Sequence[Manifest]) -> list[Manifest]:
    found = _list(f"{field} of the pod_template", there)
    return [*found, *(each for each in values if each not in found)]


def _set_env(container: Manifest, variables: Mapping[str, str]) -> None:
    found = _list("env of the pod_template", container.get("env"))
    there = {each.get("name"): each for each in (_mapping("each of env", each) for each in found)}
    for name, value in variables.items():
        made = {"name": name, "value": value}
        if there.setdefault(name, made) != made:
            raise _conflict("env", name, there[name].get("value", "of another object"), value)
    if there:
        container["env"] = list(there.values())


def _set_resources(container: Manifest, amounts: Mapping[str, Mapping[str, str]]) -> None:
    if not amounts:
        return
    there = _mapping("resources of the pod_template", container.get("resources"))
    for kind, values in amounts.items():
        texts = {name: str(each) for name, each in _mapping(f"{kind} of the pod_template", there.get(kind)).items()}
        there[kind] = _merged("resources", texts, values)
    container["resources"] = there


def _set_grace(meta: Manifest, spec: Manifest, grace_period: int | None) -> None:
    _set(spec, "terminationGracePeriodSeconds", "grace_period", grace_period)
    grace = _seconds("terminationGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", GRACE_PERIOD_S))
    if (text := meta["annotations"].get(NOTICE_ANNOTATION)) is None:
        return
    try:
        is_shorter = 0 <= float(text) < grace
    except (TypeError, ValueError):
        raise ValueError(f"annotation {NOTICE_ANNOTATION}={text!r} is not a number of seconds") from None
    if not is_shorter:
        raise ValueError(f"notice={text} is not shorter than grace_period={grace}")
