"""A user whose token expires and is renewed: the service account of deploy/k8s, in a kubeconfig."""

from __future__ import annotations

import base64
from pathlib import Path

from tests.k8s.cluster import ADMIN, USER
from tests.k8s.kubelet import Api, ApiError
from tests.support.waiting import wait_until


class ServiceAccountToken:
    """The token of a kubeconfig, which expires when its Secret is deleted. Then the control plane makes another one."""

    def __init__(self, server: str, namespace: str, kubeconfig: Path) -> None:
        self._admin, self._server, self._kubeconfig = Api(server, ADMIN), server, kubeconfig
        self._secrets, self._pods = (f"/api/v1/namespaces/{namespace}/{each}" for each in ("secrets", "pods"))
        self._name, self._token = self._wait_for_another("")
        kubeconfig.write_text(kubeconfig.read_text().replace(USER, self._token))

    def _wait_for_another(self, former: str) -> tuple[str, str]:
        found: dict[str, str] = {}

        def find() -> bool:
            for each in self._admin("GET", self._secrets)["items"]:
                name = each["metadata"]["name"]
                if name.startswith("monarch-backend-token") and name != former and "token" in each.get("data", {}):
                    found[name] = base64.b64decode(each["data"]["token"]).decode()
            return bool(found)

        wait_until(find)
        return next(iter(found.items()))

    def expire(self) -> None:
        """Return when the API server, which remembers valid tokens for 10 s, refuses the kubeconfig's."""
        self._admin("DELETE", f"{self._secrets}/{self._name}")
        user = Api(self._server, self._token)

        def is_refused() -> bool:
            try:
                user("GET", self._pods)
            except ApiError as error:
                return error.status == 401
            return False

        wait_until(is_refused)

    def renew(self) -> None:
        self._name, token = self._wait_for_another(self._name)
        self._kubeconfig.write_text(self._kubeconfig.read_text().replace(self._token, token))
        self._token = token
