"""Client of the Kubernetes API for one namespace: configuration, retries, and errors with reasons.

It uses the package `kubernetes` (the extra of this name), which is imported at the first use.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._job.errors import JobError
from monarch_backend._job.kubernetes.manifests import JOBSET_VERSION

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

log = logging.getLogger("monarch_backend")

Json = dict[str, Any]

RETRY_S = 30.0
"""Seconds in which a request is repeated while the API server does not answer."""
REQUEST_TIMEOUT_S = 20.0
_RETRY_INTERVAL_S = 0.5
_RESOURCES = {
    "StatefulSet": "statefulsets",
    "Service": "services",
    "Secret": "secrets",
    "Job": "jobs",
    "JobSet": "jobsets",
}
_GROUPS = {"statefulsets": "apis/apps/v1", "jobs": "apis/batch/v1", "jobsets": f"apis/{JOBSET_VERSION}"}
_BUSY = frozenset({429, 500, 502, 503, 504})


class ApiRefusal(JobError):
    """The API server has refused a request. ``status`` is HTTP's: 404 for an object that does not exist."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """The API of a cluster, for the objects of one namespace.

    ``kubeconfig`` and ``context`` are as for kubectl, with its defaults. With ``in_cluster`` the service account of
    this pod is used. Raises JobError, with the reason, if there is no usable configuration.
    """

    def __init__(
        self, namespace: str | None, kubeconfig: str | None, context: str | None, in_cluster: bool,
        retry: float = RETRY_S,
    ) -> None:  # fmt: skip
        self._given = (kubeconfig, context, in_cluster)
        self._retry = retry
        self.client, found = self._load()
        self.namespace = namespace or found or "default"

    def _load(self) -> tuple[ApiClient, str | None]:
        try:
            import yaml
            from kubernetes import client, config
        except ImportError as error:
            raise JobError(f"{error}: install the extra, pip install 'monarch_backend[kubernetes]'") from None
        kubeconfig, context, in_cluster = self._given
        configuration, namespace = client.Configuration(), None
        where = "the pod" if in_cluster else kubeconfig or config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION
        try:
            if in_cluster:
                config.load_incluster_config(client_configuration=configuration)
                with contextlib.suppress(OSError), open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as f:
                    namespace = f.read().strip()
            else:
                config.load_kube_config(kubeconfig, context, client_configuration=configuration, persist_config=False)
                contexts, current = config.list_kube_config_contexts(kubeconfig)
                chosen = current if context is None else next(each for each in contexts if each["name"] == context)
                namespace = chosen["context"].get("namespace")
        except (config.ConfigException, OSError, StopIteration) as error:
            raise JobError(f"no configuration for Kubernetes: {where}: {error}") from None
        except (yaml.YAMLError, TypeError, ValueError, KeyError) as error:
            raise JobError(f"no configuration for Kubernetes: {where} is not valid: {error!r}") from None
        configuration.retries = False  # the retries are here
        return client.ApiClient(configuration), namespace

    def _renew(self) -> None:
        """Read the configuration again: the token may have been replaced in its file."""
        self.client, _ = self._load()

    def request(
        self, method: str, path: str, body: Any = None, *, query: Json | None = None, kind: str = "",
        timeout: float = 0,
    ) -> Json:  # fmt: skip
        """Return the answer to a request, as JSON. Repeat it for some seconds while the server does not answer.

        ``timeout``: seconds for a single attempt, without repetition. 0 stands for the usual limits.

        Raises ApiRefusal with the server's message if it refuses, and JobError if it cannot be reached.
        """
        from urllib3.exceptions import HTTPError

        until, renewed, was_down = time.monotonic() + (0 if timeout else self._retry), False, False
        while True:
            try:
                with self._open(method, path, body, query, kind, timeout=timeout or REQUEST_TIMEOUT_S) as answer:
                    data = answer.data
                    status = answer.status
            except (HTTPError, OSError) as error:
                status, data = 0, f"the API server can't be reached: {error}".encode()
            if 200 <= status < 300:
                return self._content(data)
            if status == 401 and not renewed:
                renewed = True
                self._renew()
                continue
            is_down = status == 0 or status in _BUSY
            was_down = was_down or is_down
            # A server that has just started refuses users until it has read their permissions.
            if (is_down or (was_down and status == 403)) and time.monotonic() < until:
                time.sleep(_RETRY_INTERVAL_S)
                continue
            raise self._error(status, data, f"{method} {path}")

    def _content(self, data: bytes) -> Json:
        try:
            return dict(json.loads(data or b"{}"))
        except (ValueError, TypeError):
            start = data[:60].decode(errors="replace")
            raise JobError(f"{self.server} does not answer as a Kubernetes API server: {start!r}") from None

    @staticmethod
    def _error(status: int, data: bytes, what: str) -> JobError:
        text = data.decode(errors="replace")
        if status == 0:
            return JobError(text)
        with contextlib.suppress(ValueError, AttributeError):
            text = json.loads(text).get("message", text)
        if status == 401:
            text = f"the API server does not accept the credentials, or they have expired ({text})"
        return ApiRefusal(status, f"{text.strip()} ({what})" if status in (401, 403) else text.strip())

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: Any, query: Json | None, kind: str, read: float = 0,
        timeout: float = REQUEST_TIMEOUT_S,
    ) -> Iterator[Any]:  # fmt: skip
        """Yield the response of urllib3. With ``read``, the seconds for all of it, it is read only on demand."""
        import urllib3

        configuration = self.client.configuration
        headers = {"Accept": "application/json"}
        if token := configuration.auth_settings().get("BearerToken", {}).get("value"):
            headers["Authorization"] = token
        elif configuration.username:
            headers["Authorization"] = configuration.get_basic_auth_token()
        if body is not None:
            headers["Content-Type"] = kind or "application/json"
        limits = urllib3.Timeout(connect=timeout, read=read or timeout)
        url = f"{configuration.host}{path}"
        if query:
            from urllib.parse import urlencode

            url = f"{url}?{urlencode(query)}"
        answer = self.client.rest_client.pool_manager.request(
            method, url, body=None if body is None else json.dumps(body), headers=headers, timeout=limits,
            preload_content=not read, retries=False, redirect=False,
        )  # fmt: skip
        try:
            yield answer
        finally:
            if read:
                answer.close()
            answer.release_conn()

    # ---- objects of the namespace

    def path_of(self, kind: str, name: str = "") -> str:
        """Return the path of objects of a kind, such as "Job", or of one of them."""
        return self.path(_RESOURCES[kind], name)

    def path(self, resource: str, name: str = "") -> str:
        """Return the path of objects, such as "pods", or of one of them."""
        group = _GROUPS.get(resource.partition("/")[0], "api/v1")
        return f"/{group}/namespaces/{self.namespace}/{resource}{f'/{name}' if name else ''}"

    def list(
        self, resource: str, selector: str = "", fields: str = "", *, timeout: float = 0
    ) -> tuple[list[Json], str]:
        """Return the objects with these labels and fields, and the version of the list for `wait`.

        ``timeout`` is as for `request`.
        """
        query = {name: value for name, value in (("labelSelector", selector), ("fieldSelector", fields)) if value}
        answer = self.request("GET", self.path(resource), query=query, timeout=timeout)
        return list(answer.get("items") or ()), str(answer.get("metadata", {}).get("resourceVersion", ""))

    def create(self, manifest: Json) -> Json:
        """Create an object, unless there is one of its name. Return it, or if there is a Secret, the manifest."""
        kind = manifest["kind"]
        try:
            return self.request("POST", self.path_of(kind), manifest)
        except ApiRefusal as refusal:
            if refusal.status != 409:
                raise
        if kind in ("Secret", "Service"):  # which a user may not be allowed to read
            return manifest
        return self.request("GET", self.path_of(kind, manifest["metadata"]["name"]))

    def delete_kind(self, kind: str, name: str) -> None:
        """Delete an object of a kind, such as "Job", if it exists, and what belongs to it."""
        self.delete(_RESOURCES[kind], name)

    def delete(self, resource: str, name: str, options: Json | None = None) -> None:
        """Delete an object, if it exists and ``options["preconditions"]`` hold."""
        try:
            self.request("DELETE", self.path(resource, name), options or {"propagationPolicy": "Background"})
        except ApiRefusal as refusal:
            if refusal.status not in (404, 409):
                raise

    def wait(self, resource: str, selector: str, version: str, seconds: float) -> None:
        """Return at the first change of these objects after ``version``, or after ``seconds``.

        The time is over earlier if the server ends the watch.
        """
        from urllib3.exceptions import HTTPError

        until = time.monotonic() + seconds
        query = {"watch": "true", "labelSelector": selector, "resourceVersion": version}
        query["timeoutSeconds"] = str(max(1, round(seconds)))
        try:
            with self._open("GET", self.path(resource), None, query, "", read=max(0.1, seconds)) as answer:
                if answer.status == 200:
                    next(answer.stream(1, decode_content=True), b"")
                    return
        except (HTTPError, OSError):
            pass
        time.sleep(max(0.0, min(_RETRY_INTERVAL_S, until - time.monotonic())))

    def log(self, pod: str, lines: int, *, previous: bool = False) -> str:
        """Return the last lines of a pod's log. Raises JobError if it cannot be read."""
        from urllib3.exceptions import HTTPError

        query = {"tailLines": str(lines), **({"previous": "true"} if previous else {})}
        for is_renewed in (False, True):
            try:
                with self._open("GET", f"{self.path('pods', pod)}/log", None, query, "") as answer:
                    status, data = answer.status, answer.data
            except (HTTPError, OSError) as error:
                raise JobError(f"log of {pod}: the API server can't be reached: {error}") from None
            if status == 401 and not is_renewed:
                self._renew()
            else:
                break
        if status != 200:
            raise self._error(status, data, f"log of {pod}")
        return str(data.decode(errors="replace"))

    def _stream(self, start: Callable[[Any], Any], what: str) -> Any:
        """Return the WebSocket of ``start(CoreV1Api)``. Raises ApiException of kubernetes, or JobError after 401."""
        from kubernetes import client

        is_renewed = False
        while True:
            try:
                return start(self._core()).sock
            except client.ApiException as error:
                if _status_of(error) != 401:
                    raise
                if is_renewed:
                    raise self._error(401, str(error.reason).strip().encode(), what) from None
            is_renewed = True
            self._renew()

    def _core(self) -> Any:
        from kubernetes import client

        return client.CoreV1Api(client.ApiClient(self.client.configuration))  # of its own: `stream` changes it

    def port_forward(self, pod: str, port: int) -> Any:
        """Return a new connection to a port of a pod, kubernetes's PortForward."""
        from kubernetes import stream
        from kubernetes.stream import ws_client

        class Forward(ws_client.PortForward):
            """Its socket ends with its WebSocket. After an error, such as a reset, kubernetes's own stays open."""

            def _proxy(self) -> None:
                try:
                    super()._proxy()  # type: ignore[no-untyped-call]
                except Exception as error:
                    log.info("port-forward to pod %s: %s", pod, error)
                finally:
                    for each in self.local_ports.values():
                        each.python.close()
                    self.websocket.shutdown()

        def start(core: Any) -> Any:
            forward = core.connect_get_namespaced_pod_portforward
            return stream.stream(forward, pod, self.namespace, ports=str(port), _preload_content=False)

        return Forward(self._stream(start, f"port-forward to pod {pod}"), [port])  # type: ignore[no-untyped-call]

    def execute(self, pod: str, container: str, command: Sequence[str], *, stdin: bool, is_tty: bool) -> Any:
        """Start a command in a container. Return the connection, websocket-client's WebSocket."""
        from kubernetes import client, stream

        def start(core: Any) -> Any:
            return stream.stream(
                core.connect_get_namespaced_pod_exec, pod, self.namespace, container=container, command=list(command),
                stdin=stdin, stdout=True, stderr=not is_tty, tty=is_tty, _preload_content=False, binary=True,
            )  # fmt: skip

        try:
            return self._stream(start, f"command in pod {pod}")
        except client.ApiException as error:
            raise JobError(f"pod {pod}: no command can be started: {str(error.reason).strip()}") from None

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return str(self.client.configuration.host)

    def may(self, verb: str, resource: str) -> bool:
        """Return whether the user may do this in the namespace. ``resource``: such as "pods" or "apps/statefulsets"."""
        group, _, rest = resource.rpartition(":")
        name, _, sub = rest.partition("/")
        attributes = {"namespace": self.namespace, "verb": verb, "group": group, "resource": name, "subresource": sub}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        answer = self.request(
            "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            {**review, "spec": {"resourceAttributes": attributes}},
        )  # fmt: skip
        return bool(answer["status"]["allowed"])


def _status_of(error: Exception) -> int:
    """Return HTTP's status of kubernetes's ApiException. A WebSocket's has it only in the error that has caused it."""
    return int(getattr(error.__context__, "status_code", None) or getattr(error, "status", None) or 0)


def until_true(holds: Callable[[], bool], seconds: float, interval: float = 0.2) -> bool:
    """Wait until ``holds()`` is true. Return whether this happened in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(interval)
    return True
