"""Objects of a KubernetesJob, and states of hosts from pods, without a cluster."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from monarch_backend._job.kubernetes import pods
from monarch_backend._job.kubernetes.api import Api
from monarch_backend._job.kubernetes.permissions import NEEDED, OPTIONAL, OTHER_CONTROLLERS
from monarch_backend.cli import main
from monarch_backend.job import Job, JobError, KubernetesJob
from tests.support.kubernetes_api import api_server

ROOT = Path(__file__).parents[2]
IMAGE = "registry.example/train:1"


def manifest(*words: str) -> tuple[int, list[dict[str, Any]], str]:
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(["k8s", "manifest", *words])
    return code, list(yaml.safe_load_all(out.getvalue())), error.getvalue()


@pytest.mark.parametrize("version", ["1.25", "1.31", "1.37"])
def test_printed_manifest_follows_the_schemas_of_kubernetes(version: str) -> None:
    words = ["--name", "Train_1", "--mesh", "trainers=4", "--mesh", "data_loaders=2", "--image", IMAGE]
    code, made, _ = manifest(*words, "--resource", "nvidia.com/gpu=8", "--namespace", "team")
    assert code == 0
    kinds = [each["kind"] for each in made]
    assert kinds == ["Secret", "Service", "StatefulSet", "Service", "StatefulSet"]
    for each in [*made, *(yaml.safe_load(path.read_text()) for path in ROOT.glob("deploy/k8s/*.yaml"))]:
        kubernetes_validate.validate(each, version, strict=True)
    assert {each["metadata"]["namespace"] for each in made} == {"team"}
    [container] = made[2]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert made[2]["spec"]["replicas"] == 4


def test_printed_manifest_has_the_calls_that_attach_its_pods(tmp_path: Path) -> None:
    secret, out = tmp_path / "lm.secret", io.StringIO()
    secret.touch(0o600)
    secret.write_text("07" * 32)
    words = ["--name", "lm", "--mesh", "trainers=4", "--mesh", "loaders=1", "--image", IMAGE]
    with contextlib.redirect_stdout(out):
        assert main(["k8s", "manifest", *words, "--secret-file", str(secret)]) == 0
    [create, *attach] = [line.removeprefix("# ") for line in out.getvalue().splitlines() if line.startswith("#")]
    names: dict[str, Any] = {"KubernetesJob": KubernetesJob}
    exec("\n".join([create, *attach]), names)
    assert names["job"].name == "lm" and names["job"]._secret_file == secret
    sets = [each for each in yaml.safe_load_all(out.getvalue()) if each["kind"] == "StatefulSet"]
    for each, mesh in zip(sets, ("trainers", "loaders"), strict=True):
        described = names["job"]._meshes[mesh]
        assert described["replicas"] == each["spec"]["replicas"]
        wanted = dict(pair.split("=") for pair in described["selector"].split(","))
        assert wanted.items() <= each["spec"]["template"]["metadata"]["labels"].items()


def test_schema_check_finds_a_wrong_field() -> None:
    [*_, wrong] = KubernetesJob().add_mesh("trainers", 1, image=IMAGE).manifests("0123456789abcdef", bytes(32))
    wrong["spec"]["template"]["spec"]["nodeSelectors"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31", strict=True)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--mesh", "trainers", "--image", IMAGE], "'trainers' is not NAME=VALUE"),
        (["--mesh", "trainers=x", "--image", IMAGE], "'x' is not a number of pods"),
        (["--mesh", "a=1", "--mesh", "A=1", "--image", IMAGE], "differs in letters' case only"),
        (["--mesh", "trainers_=1", "--image", IMAGE], "cannot be the name of a mesh on Kubernetes"),
        (["--mesh", "a=1", "--image", IMAGE, "--resource", "limits=8"], "resources['limits'] is a dictionary"),
    ],
)
def test_wrong_arguments_of_manifest_are_named(words: list[str], error: str) -> None:
    code, made, text = manifest(*words)
    assert (code, made) == (1, []) and error in text


@pytest.mark.parametrize(
    ("file", "permissions"), [("role.yaml", (*NEEDED, *OTHER_CONTROLLERS)), ("role-shell.yaml", OPTIONAL)]
)
def test_role_has_exactly_the_needed_permissions(file: str, permissions: Any) -> None:
    role = yaml.safe_load((ROOT / "deploy/k8s" / file).read_text())
    allowed = {
        (verb, f"{group}:{resource}" if group else resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed == {(verb, resource) for verb, resource, _ in permissions}


def doctor(tmp_path: Path, lacking: Sequence[tuple[str, str]]) -> tuple[int, list[str], str]:
    """Return exit code, lines and errors of the command for a user without some permissions."""
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

    def answer(_method: str, path: str, _query: Any, body: Any) -> tuple[int, dict[str, Any]]:
        if path != reviews:
            return 200, {"gitVersion": "v1.31.0"}
        asked = body["spec"]["resourceAttributes"]
        resource = ":".join(filter(None, (asked["group"], asked["resource"])))
        return 201, {"status": {"allowed": (asked["verb"], resource) not in lacking}}

    out, error = io.StringIO(), io.StringIO()
    with api_server(tmp_path) as api, contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        api.answer = answer  # type: ignore[method-assign]
        code = main(["k8s", "doctor", "--kubeconfig", str(api.kubeconfig)])
    return code, out.getvalue().splitlines(), error.getvalue()


def test_permissions_of_other_controllers_are_reported_without_an_error(tmp_path: Path) -> None:
    code, lines, error = doctor(tmp_path, [(verb, resource) for verb, resource, _ in OTHER_CONTROLLERS])
    assert (code, error) == (0, "")
    reported = [line.partition("  no: ")[2] for line in lines if "  no: " in line]
    assert reported == [use for *_, use in OTHER_CONTROLLERS]
    assert "controller='job' cannot start a job" in reported


def test_missing_permission_of_the_default_controller_is_an_error(tmp_path: Path) -> None:
    code, lines, error = doctor(tmp_path, [("create", "apps:statefulsets")])
    assert code == 1 and "lacks 1 permissions in namespace team" in error
    assert next(line for line in lines if "  no: " in line).endswith("no: apply() cannot start a job")


def test_doctor_names_the_missing_kubeconfig(tmp_path: Path) -> None:
    error, missing = io.StringIO(), tmp_path / "nowhere"
    with contextlib.redirect_stderr(error):
        assert main(["k8s", "doctor", "--kubeconfig", str(missing)]) == 1
    assert f"no configuration for Kubernetes: {missing}: " in error.getvalue()


def test_pod_template_keeps_its_fields_and_gets_the_host() -> None:
    given = {
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}},
        "spec": {
            "securityContext": {"runAsUser": 1000},
            "containers": [{"name": "proxy", "image": "proxy:1"}, {"name": "monarch", "image": IMAGE}],
        },
    }
    job = KubernetesJob(name="train").add_mesh("trainers", 2, pod_template=given)
    made = job.manifests("0123456789abcdef", bytes(32))
    template = made[2]["spec"]["template"]
    assert template["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert template["spec"]["securityContext"] == {"runAsUser": 1000}
    proxy, host = template["spec"]["containers"]
    assert proxy == {"name": "proxy", "image": "proxy:1"}
    assert "up --address 0.0.0.0:26600" in host["command"][-1] and host["volumeMounts"]
    assert given["spec"]["containers"][1] == {"name": "monarch", "image": IMAGE}  # not changed


TOLERATION = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
GIVEN = {"spec": {"containers": [{"name": "monarch", "image": IMAGE}]}}


def rendered(**arguments: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return metadata and specification of the pods of a mesh, and their container."""
    made = KubernetesJob(name="train").add_mesh("trainers", 2, **arguments).manifests("0123456789abcdef", bytes(32))
    for version in ("1.25", "1.37"):
        kubernetes_validate.validate(made[2], version, strict=True)
    template = made[2]["spec"]["template"]
    return template["metadata"], template["spec"], template["spec"]["containers"][0]


ARGUMENTS: list[tuple[dict[str, Any], int, str, Any]] = [
    ({"labels": {"team": "a"}}, 0, "labels", {"team": "a"}),
    ({"annotations": {"queue": "a"}}, 0, "annotations", {"queue": "a"}),
    ({"grace_period": 60, "notice": 50}, 0, "annotations", {"monarch-backend/notice": "50"}),
    ({"node_selector": {"zone": "a"}}, 1, "nodeSelector", {"zone": "a"}),
    ({"tolerations": [TOLERATION]}, 1, "tolerations", [TOLERATION]),
    ({"priority_class": "urgent"}, 1, "priorityClassName", "urgent"),
    ({"service_account": "trainer"}, 1, "serviceAccountName", "trainer"),
    ({"scheduler": "volcano"}, 1, "schedulerName", "volcano"),
    ({"image_pull_secrets": ["a", "b"]}, 1, "imagePullSecrets", [{"name": "a"}, {"name": "b"}]),
    ({"image_pull_secrets": "regcred"}, 1, "imagePullSecrets", [{"name": "regcred"}]),
    ({"grace_period": 60}, 1, "terminationGracePeriodSeconds", 60),
    ({"grace_period": 0}, 1, "terminationGracePeriodSeconds", 0),
    ({}, 1, "terminationGracePeriodSeconds", 30),
    ({"image_pull_policy": "Always"}, 2, "imagePullPolicy", "Always"),
    ({"env": {"A": "1"}}, 2, "env", [{"name": "A", "value": "1"}]),
    ({"resources": {"cpu": 8, "memory": "64Gi"}}, 2, "resources",
     {"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "8", "memory": "64Gi"}}),
    ({"resources": {"limits": {"nvidia.com/gpu": 8}, "requests": {"cpu": 0.5, "nvidia.com/gpu": 8}}}, 2, "resources",
     {"limits": {"nvidia.com/gpu": "8"}, "requests": {"cpu": "0.5", "nvidia.com/gpu": "8"}}),
    ({"resources": {"requests": {"cpu": "500m"}}}, 2, "resources", {"requests": {"cpu": "500m"}}),
]  # fmt: skip


@pytest.mark.parametrize("base", [{"image": IMAGE}, {"pod_template": GIVEN}], ids=["image", "template"])
@pytest.mark.parametrize(
    ("arguments", "part", "field", "expected"), ARGUMENTS, ids=[" ".join(each[0]) or "none" for each in ARGUMENTS]
)
def test_argument_of_a_mesh_is_rendered_in_its_field(
    base: dict[str, Any], arguments: dict[str, Any], part: int, field: str, expected: Any
) -> None:
    found = rendered(**base, **arguments)[part][field]
    if field == "labels":
        assert expected.items() <= found.items()
    elif field == "env":
        assert found[:-1] == expected and found[-1]["name"] == "MONARCH_HOST_NAME"
    else:
        assert found == expected


def test_arguments_are_added_to_what_a_pod_template_has() -> None:
    container = {
        "name": "monarch", "image": IMAGE, "env": [{"name": "A", "value": "1"}],
        "resources": {"limits": {"cpu": 8}},
    }  # fmt: skip
    given = {
        "metadata": {"labels": {"team": "a"}, "annotations": None},
        "spec": {"tolerations": [TOLERATION], "terminationGracePeriodSeconds": 60, "containers": [container]},
    }
    other = {"key": "spot", "operator": "Exists"}
    meta, spec, host = rendered(
        pod_template=given, labels={"team": "a", "queue": "b"}, annotations={"x": "y"}, env={"A": "1", "B": "2"},
        tolerations=[TOLERATION, other], resources={"limits": {"nvidia.com/gpu": 8}}, notice=50, grace_period=60,
    )  # fmt: skip
    assert {"team": "a", "queue": "b"}.items() <= meta["labels"].items()
    assert meta["annotations"] == {"x": "y", "monarch-backend/notice": "50"}
    assert spec["tolerations"] == [TOLERATION, other] and spec["terminationGracePeriodSeconds"] == 60
    assert [each["name"] for each in host["env"]] == ["A", "B", "MONARCH_HOST_NAME"]
    assert host["resources"]["limits"] == {"cpu": "8", "nvidia.com/gpu": "8"}
    assert " --notice 50 <" in host["command"][-1]


def given_with(part: str, **fields: Any) -> dict[str, Any]:
    """Return a pod template with fields of its metadata, its specification or its container."""
    container = {"name": "monarch", "image": IMAGE, **(fields if part == "container" else {})}
    spec = {"containers": [container], **(fields if part == "spec" else {})}
    return {"metadata": fields if part == "metadata" else {}, "spec": spec}


@pytest.mark.parametrize(
    ("arguments", "template", "error"),
    [
        ({"labels": {"team": "b"}}, given_with("metadata", labels={"team": "a"}), "labels: .* team='a'"),
        ({"priority_class": "b"}, given_with("spec", priorityClassName="a"), "priority_class: .* priorityClassName"),
        ({"grace_period": 5}, given_with("spec", terminationGracePeriodSeconds=9), "grace_period: "),
        ({"notice": 30}, GIVEN, "notice=30 is not shorter than grace_period=30"),
        ({"env": {"A": "2"}}, given_with("container", env=[{"name": "A", "value": "1"}]), "env: .* A='1'"),
        (
            {"resources": {"cpu": 2}},
            given_with("container", resources={"limits": {"cpu": 1}}),
            "resources: .* cpu='1', and the argument '2'",
        ),
    ],
)
def test_argument_of_which_the_pod_template_has_another_value_is_refused(
    arguments: dict[str, Any], template: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=f"mesh 'trainers': {error}"):
        KubernetesJob().add_mesh("trainers", 1, pod_template=template, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"replicas": 0}, "1 or more"),
        ({"image": None}, "either an image or a pod_template"),
        ({"pod_template": {}}, "either an image or a pod_template"),
        ({"notice": 30}, "not shorter than grace_period=30"),
        ({"notice": "5"}, "notice='5': give a number of seconds"),
        ({"grace_period": -1}, "grace_period=-1: give a number of seconds"),
        ({"resources": "8"}, "resources is a dictionary, not '8'"),
        ({"resources": {"limits": "8"}}, r"resources\['limits'\] is a dictionary, not '8'"),
        ({"resources": {"limits": {"cpu": 1}, "cpu": 1}}, "cpu must be in one of these"),
        ({"resources": {"cpu": -1}}, "cpu=-1 is not an amount"),
        ({"resources": {"memory": "64 GB"}}, "memory='64 GB' is not an amount"),
        ({"env": {"A": 1}}, "env: 'A': 1 is not a pair of texts"),
        ({"env": {"A-B": "1"}}, "'A-B' is not a name of an environment variable"),
        ({"labels": {"a": True}}, "labels: 'a': True is not a pair of texts"),
        ({"tolerations": {"key": "gpu"}}, "tolerations is a list, not {'key': 'gpu'}"),
        ({"tolerations": ["gpu"]}, "each of tolerations is a dictionary, not 'gpu'"),
        ({"priority_class": 5}, "priority_class=5: give a text"),
        ({"image_pull_secrets": [5]}, "image_pull_secrets=5: give a text"),
        ({"image": 5}, "image=5: give a text"),
        ({"image": None, "pod_template": "pod.yaml"}, "pod_template is a dictionary, not 'pod.yaml'"),
        ({"image": None, "pod_template": {"spec": None}}, "has no containers"),
        ({"image": None, "pod_template": {"spec": {}}}, "has no containers"),
        ({"image": None, "pod_template": {"spec": []}}, r"spec of the pod_template is a dictionary, not \[\]"),
        ({"image": None, "pod_template": {"spec": {"containers": ["x"]}}}, "containers of the pod template are"),
        ({"image": None, "pod_template": {"spec": {"containers": [{"name": "x"}]}}}, "has no image"),
        ({"image": None, "pod_template": given_with("metadata", annotations={"monarch-backend/notice": "x"})},
         "'x' is not a number of seconds"),
    ],
)  # fmt: skip
def test_wrong_mesh_is_refused(arguments: dict[str, Any], error: str) -> None:
    given = {"replicas": 1, "image": IMAGE, **arguments}
    if given["image"] is None:
        del given["image"]
    with pytest.raises(ValueError, match=error):
        KubernetesJob().add_mesh("trainers", **given)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"port": "26600"}, "port='26600': give a whole number"),
        ({"port": 26600.5}, "port=26600.5: give a whole number"),
        ({"port": 0}, "port=0: give a whole number"),
        ({"namespace": 5}, "5 is not the name of a namespace"),
        ({"namespace": "A_b"}, "'A_b' is not the name of a namespace"),
        ({"kubeconfig": "config", "in_cluster": True}, "in_cluster=True uses the pod's service account"),
        ({"context": "lab", "in_cluster": True}, "in_cluster=True uses the pod's service account"),
    ],
)
def test_wrong_job_is_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        KubernetesJob(**arguments)


@pytest.mark.parametrize("name", ["7b-sft", "9", "train"])
def test_objects_of_a_job_have_names_that_kubernetes_takes(name: str) -> None:
    job = KubernetesJob(name=name).add_mesh("trainers", 1, image=IMAGE)
    for each in job.manifests("0123456789abcdef", bytes(32)):
        assert re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", each["metadata"]["name"])  # DNS-1035, as of a Service


def test_attached_mesh_needs_a_secret_and_a_selector() -> None:
    with pytest.raises(ValueError, match="secret_file"):
        KubernetesJob().attach_mesh("trainers", 2, "app=x")
    with pytest.raises(ValueError, match="label selector"):
        KubernetesJob(secret_file="secret").attach_mesh("trainers", 2, "")


def test_dumped_job_is_loaded_with_its_description(tmp_path: Path) -> None:
    job = KubernetesJob("team", name="train", context="lab", force_delete=True)
    job.add_mesh("trainers", 2, image=IMAGE, tolerations=[{"key": "gpu", "operator": "Exists"}])
    job.dump(tmp_path / "job.json")
    again = Job.load(tmp_path / "job.json")
    assert isinstance(again, KubernetesJob) and again.can_run(job)
    assert not again.active


# ---- states


def pod(
    phase: str = "Running", container: dict[str, Any] | None = None, conditions: dict[str, Any] | None = None,
    deleted: str = "", **status: Any,
) -> dict[str, Any]:  # fmt: skip
    found = [
        {"type": kind, **({"status": each} if isinstance(each, str) else each)}
        for kind, each in (conditions or {}).items()
    ]
    meta = {"name": "train-0123-trainers-1", "uid": "u1", **({"deletionTimestamp": deleted} if deleted else {})}
    full = {"phase": phase, "podIP": "10.0.0.7", "conditions": found, **status}
    if container is not None:
        full["containerStatuses"] = [{"name": "monarch", "image": IMAGE, "restartCount": 0, **container}]
    return {"metadata": meta, "spec": {"nodeName": "" if phase == "New" else "n1"}, "status": full}


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}, **more}


RUNNING = {"state": {"running": {}}, "ready": True}
READY, NOT_READY = {"Ready": "True"}, {"Ready": "False"}
PAST = "2026-01-01T00:00:00Z"
NO_GPU = {
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}
GATED = {
    "status": "False",
    "reason": "SchedulingGated",
    "message": "Scheduling is blocked due to non-empty scheduling gates",
}
PREEMPTED = {
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "preempting to accommodate a higher priority pod",
}
OOM = {"exitCode": 137, "reason": "OOMKilled"}


@pytest.mark.parametrize(
    ("given", "state", "reason", "is_final"),
    [
        (pod(container=RUNNING, conditions=READY), "up", "", False),
        (
            pod(container={**RUNNING, "ready": False}, conditions=NOT_READY),
            "pending",
            "its container runs and does not listen yet",
            False,
        ),
        (
            pod("New", conditions={"PodScheduled": NO_GPU}),
            "pending",
            "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
            False,
        ),
        (pod("New", conditions={"PodScheduled": GATED}), "pending", "SchedulingGated: Scheduling is blocked", False),
        (pod("Pending", waiting("ContainerCreating")), "pending", "starts on node n1", False),
        (
            pod("Pending", waiting("ErrImagePull", "not found")),
            "pending",
            f"ErrImagePull: not found (image {IMAGE})",
            False,
        ),
        (
            pod("Pending", waiting("ImagePullBackOff", f'Back-off pulling image "{IMAGE}"')),
            "pending",
            "ImagePullBackOff: Back-off",
            True,
        ),
        (
            pod("Pending", waiting("CreateContainerConfigError", 'secret "x" not found')),
            "pending",
            'CreateContainerConfigError: secret "x" not found',
            True,
        ),
        (
            pod(container=waiting("CrashLoopBackOff", "back-off", restartCount=3, lastState={"terminated": OOM})),
            "pending",
            "CrashLoopBackOff: its container has ended 3 times, last with OOMKilled, exit code 137",
            True,
        ),
        (
            pod(container={**RUNNING, "restartCount": 1, "lastState": {"terminated": OOM}}, conditions=READY),
            "up",
            "its container was restarted after OOMKilled, exit code 137",
            False,
        ),
        (
            pod("Failed", reason="Evicted", message="The node was low on resource: memory."),
            "gone",
            "Evicted: The node was low on resource: memory.",
            False,
        ),
        (
            pod("Failed", {"state": {"terminated": OOM}}),
            "gone",
            "its container has ended (OOMKilled, exit code 137)",
            False,
        ),
        (
            pod("Succeeded", {"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}),
            "gone",
            "its container has ended (exit code 0)",
            False,
        ),
        (pod(container=RUNNING, conditions=READY, deleted=PAST), "gone", "the pod is being deleted", False),
        (
            pod(container=RUNNING, conditions={"Ready": "True", "DisruptionTarget": PREEMPTED}, deleted=PAST),
            "gone",
            "PreemptionByScheduler: preempting",
            False,
        ),
        (pod(container=RUNNING, conditions=NOT_READY), "gone", "node n1 does not respond", False),
        (
            pod(container=RUNNING, conditions=NOT_READY, deleted=PAST),
            "gone",
            "node n1 does not respond, and the pod stays",
            False,
        ),
    ],
)
def test_state_of_a_pod_has_the_reason_of_kubernetes(
    given: dict[str, Any], state: str, reason: str, is_final: bool
) -> None:
    found = pods.replica_of(given, "trainers", 1, 26600)
    assert (found.state, found.is_final) == (state, is_final)
    assert found.reason.startswith(reason) and bool(found.reason) == bool(reason)
    assert found.address == ("tcp://10.0.0.7:26600" if state == "up" else "")


def test_notice_is_an_option_of_the_host_and_an_annotation() -> None:
    job = KubernetesJob(name="train").add_mesh("trainers", 2, image=IMAGE, grace_period=60, notice=50)
    template = job.manifests("0123456789abcdef", bytes(32))[2]["spec"]["template"]
    assert template["metadata"]["annotations"] == {"monarch-backend/notice": "50"}
    assert " --notice 50 <" in template["spec"]["containers"][0]["command"][-1]
    assert template["spec"]["terminationGracePeriodSeconds"] == 60


@pytest.mark.parametrize("how", ["hook", "annotation"])
def test_deleted_pod_with_notice_is_ending_while_it_listens(how: str) -> None:
    given = pod(container=RUNNING, conditions={**READY, "DisruptionTarget": PREEMPTED}, deleted=PAST)
    if how == "hook":
        given["spec"]["containers"] = [{"name": "x", "lifecycle": {"preStop": {"exec": {"command": ["sleep"]}}}}]
    else:
        given["metadata"]["annotations"] = {"monarch-backend/notice": "50"}
    found = pods.replica_of(given, "trainers", 1, 26600)
    assert (found.state, found.address) == ("ending", "tcp://10.0.0.7:26600")
    given["status"]["conditions"][0]["status"] = "False"
    assert pods.replica_of(given, "trainers", 1, 26600).state == "gone"


def test_pods_of_others_that_have_ended_are_final() -> None:
    assert pods.replica_of(pod("Failed"), "trainers", 1, 26600, is_replaced=False).is_final


def test_restarted_container_is_another_incarnation_and_ipv6_has_brackets() -> None:
    first = pod(container=RUNNING, conditions=READY)
    again = pod(container={**RUNNING, "restartCount": 1}, conditions=READY, podIP="fd00::7")
    assert pods.incarnation_of(first) != pods.incarnation_of(again)
    assert pods.replica_of(again, "trainers", 1, 1).address == "tcp://[fd00::7]:1"


@pytest.mark.parametrize(
    ("meta", "rank_label", "index"),
    [
        ({"name": "a-12"}, None, 12),
        ({"name": "a", "labels": {"batch.kubernetes.io/job-completion-index": "3"}}, None, 3),
        ({"name": "a-x7k2p", "annotations": {"batch.kubernetes.io/job-completion-index": "4"}}, None, 4),
        ({"name": "a-worker-9", "labels": {"training.kubeflow.org/replica-index": "5"}}, None, 5),
        ({"name": "a-0", "labels": {"volcano.sh/task-index": "6"}}, None, 6),
        ({"name": "a-0", "labels": {"rank": "7"}}, "rank", 7),
        ({"name": "a-0"}, "rank", None),
        ({"name": "a-x7k2p"}, None, None),
    ],
)
def test_index_of_a_pod(meta: dict[str, Any], rank_label: str | None, index: int | None) -> None:
    assert pods.index_of({"metadata": meta}, rank_label) == index


def test_only_pods_of_lost_nodes_are_stuck_after_their_grace_period() -> None:
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=timezone.utc)
    lost = {"container": RUNNING, "conditions": {"Ready": "False"}}
    assert pods.is_stuck(pod(**lost, deleted="2026-01-01T00:00:29Z"), now)
    assert not pods.is_stuck(pod(**lost, deleted="2026-01-01T00:00:31Z"), now)
    assert not pods.is_stuck(pod(**lost), now)
    assert not pods.is_stuck(pod(container=RUNNING, conditions=READY, deleted=PAST), now)


def test_log_of_an_unreachable_server_is_an_error_of_the_job(tmp_path: Path) -> None:
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {
        "clusters": [cluster],
        "contexts": [context],
        "current-context": "c",
        "users": [{"name": "u", "user": {}}],
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **config}))
    with pytest.raises(JobError, match="log of pod-0: the API server can't be reached"):
        Api(None, str(path), None, False).log("pod-0", 3)


@pytest.mark.parametrize("content", ["a: [", "- 1", "clusters: 7"])
def test_kubeconfig_that_is_not_one_is_an_error_of_the_job(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(JobError, match="no configuration for Kubernetes"):
        Api(None, str(path), None, False)
