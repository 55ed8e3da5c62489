"""API server of Kubernetes in memory, over HTTP: it keeps objects, and runs no controllers.

`ApiServer.objects` has all objects by path. A path below one of ``missing`` is unknown to the server, as a CRD that is
not installed. One below ``forbidden`` is refused, as for a user without the permission.
"""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class ApiServer:
    """The server. ``on_connect`` serves requests for a WebSocket: it gets the request, its path and its query."""

    def __init__(self, folder: Path) -> None:
        self.objects: dict[str, Json] = {}
        self.requests: list[tuple[str, str]] = []
        self.missing: list[str] = []
        self.forbidden: list[str] = []
        self.token = "secret-token"  # the only valid one
        self.on_connect: Callable[[http.server.BaseHTTPRequestHandler, str, dict[str, list[str]]], None] | None = None
        self._uids = itertools.count(1)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = False  # close() waits for them
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.kubeconfig = folder / "kubeconfig"
        self.write_kubeconfig(self.token)

    def write_kubeconfig(self, token: str) -> None:
        context = {"cluster": "c", "user": "u", "namespace": "team"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def close(self) -> None:
        self._server.shutdown()
        self.on_connect = None  # it may hold what has connections to this server
        for each in list(self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def names(self) -> list[str]:
        """Return kinds and names of the objects."""
        return sorted(f"{each['kind']}/{each['metadata']['name']}" for each in self.objects.values())

    def add_pod(self, name: str, labels: dict[str, str], **fields: Any) -> None:
        """Add a pod that runs and is ready."""
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": conditions, **fields}
        meta = {"name": name, "uid": f"uid-{name}", "labels": labels}
        spec = {"nodeName": "n1", "containers": [{"name": "monarch"}]}
        pod = {"kind": "Pod", "metadata": meta, "spec": spec, "status": status}
        self.objects[f"/api/v1/namespaces/team/pods/{name}"] = pod

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Json | None) -> tuple[int, Json]:
        """Return status and content of the answer to a request."""
        if any(path.startswith(each) for each in self.missing):
            return 404, {}
        if any(path.startswith(each) for each in self.forbidden):
            return 403, {"message": f"{path} is forbidden"}
        if method == "POST":
            assert body is not None
            where = f"{path}/{body['metadata']['name']}"
            if where in self.objects:
                return 409, {"message": f"{where} already exists"}
            body["metadata"]["uid"] = f"uid-{next(self._uids)}"
            self.objects[where] = body
            return 201, body
        if method == "GET" and path.rpartition("/")[2] in ("pods", "events"):
            wanted = dict(each.split("=") for each in query.get("labelSelector", [""])[0].split(",") if each)
            found = [each for where, each in self.objects.items() if where.rpartition("/")[0] == path]
            chosen = [each for each in found if wanted.items() <= each["metadata"].get("labels", {}).items()]
            for field in filter(None, query.get("fieldSelector", [""])[0].split(",")):
                where, _, value = field.partition("=")
                chosen = [each for each in chosen if _value(each, where) == value]
            return 200, {"items": chosen, "metadata": {"resourceVersion": "1"}}
        if path not in self.objects:
            return 404, {"message": f"{path} not found"}
        if method == "DELETE":
            return 200, self.objects.pop(path)
        return 200, self.objects[path]

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                api._connections.add(self.request)
                super().setup()

            def finish(self) -> None:
                with contextlib.suppress(OSError):
                    super().finish()
                api._connections.discard(self.request)

            def _serve(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                query = urllib.parse.parse_qs(url.query)
                api.requests.append((self.command, url.path))
                if self.headers.get("Authorization") != f"Bearer {api.token}":
                    self.send_error(401, "Unauthorized")
                    return
                if self.headers.get("Upgrade", "").lower() == "websocket" and api.on_connect is not None:
                    api.on_connect(self, url.path, query)
                    return
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                status, content = api.answer(self.command, url.path, query, body)
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = do_PATCH = _serve

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def _value(found: Any, path: str) -> Any:
    for name in path.split("."):
        found = found.get(name, {})
    return found


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Run a server, which ends with the block."""
    made = ApiServer(folder)
    try:
        yield made
    finally:
        made.close()
