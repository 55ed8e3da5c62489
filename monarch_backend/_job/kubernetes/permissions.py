"""Permissions that KubernetesJob uses: the rules of deploy/k8s, with their uses."""

NEEDED: tuple[tuple[str, str, str], ...] = (
    ("create", "secrets", "apply() cannot start a job"),
    ("create", "services", "apply() cannot start a job"),
    ("create", "apps:statefulsets", "apply() cannot start a job"),
    ("get", "apps:statefulsets", "the reason of missing pods is unknown"),
    ("list", "pods", "hosts cannot be found"),
    ("watch", "pods", "changes are noticed late"),
    ("list", "events", "reasons such as exceeded quotas are unknown"),
    ("get", "pods/log", "logs cannot be read"),
    ("get", "pods/portforward", "programs outside the cluster do not reach pods"),
    ("create", "pods/portforward", "programs outside the cluster do not reach pods from Kubernetes 1.35 on"),
    ("patch", "apps:statefulsets/scale", "resize() is not possible"),
    ("delete", "secrets", "kill() cannot end a job"),
    ("delete", "services", "kill() cannot end a job"),
    ("delete", "apps:statefulsets", "kill() cannot end a job"),
    ("delete", "pods", "force_delete=True has no effect"),
)
"""Verb, resource as GROUP:NAME, and what is not possible without it, for the default controller."""

OTHER_CONTROLLERS: tuple[tuple[str, str, str], ...] = (
    ("create", "jobset.x-k8s.io:jobsets", "controller='jobset' cannot start a job"),
    ("get", "jobset.x-k8s.io:jobsets", "the reason of missing pods is unknown with controller='jobset'"),
    ("delete", "jobset.x-k8s.io:jobsets", "kill() cannot end a job with controller='jobset'"),
    ("create", "batch:jobs", "controller='job' cannot start a job"),
    ("get", "batch:jobs", "the reason of missing pods is unknown with controller='job'"),
    ("delete", "batch:jobs", "kill() cannot end a job with controller='job'"),
)
"""Permissions for jobs with another ``controller``. deploy/k8s/role.yaml has them, too."""

OPTIONAL: tuple[tuple[str, str, str], ...] = (
    ("get", "pods/exec", "`k8s shell` is not possible: deploy/k8s/role-shell.yaml"),
    ("create", "pods/exec", "`k8s shell` is not possible from Kubernetes 1.35 on: deploy/k8s/role-shell.yaml"),
)
"""Permissions of deploy/k8s/role-shell.yaml. A command in a pod can read its Secrets, so they are not in role.yaml."""
