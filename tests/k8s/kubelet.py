"""Node agent for tests: runs the pods of a real Kubernetes control plane as processes in namespaces.

It registers nodes, sends their heartbeats, and runs the first container of each pod that the scheduler binds to them. A
pod has its own network, processes, hostname, mounts and /tmp. Its other files are those of its image, where the image
is known here, or the machine's. Images whose name contains "missing" cannot be pulled. Logs, port-forwarding and exec
are served over HTTPS.

`python -m tests.k8s.kubelet` reads a JSON object on its first line of input. Each further line is a command:

- ``crash NODE``: its heartbeats and pods end, silently for their peers; ``start NODE``
- ``cut POD``: no network for CUT_S seconds
- ``oom POD``: its container ends as without memory
- ``evict POD``: its container ends, and the pod fails, as on a node without memory
- ``kill POD``: SIGKILL for its youngest process
- ``drop``: all connections of port-forwarding break
- ``image NAME JSON``: an image with the folder ``root`` of its files, its ``user`` and its variables ``env``
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

from tests.k8s import exec_server, websocket

Json = dict[str, Any]

POLL_S = 0.2
HEARTBEAT_S = 1.0
PROBE_S = 0.5
READY_PROBE_S = 1.5
MAX_FAILED_PROBES = 2
CUT_S = 6.0
FIRST_PORT = 10250
EVICTION = "The node was low on resource: memory."

# Enter the pod: hostname, /tmp, the files of volumes. Then wait until the network is there. Arguments: name, folder,
# root and user of the image (empty: the machine's files), the container's command.
_ENTER = """
set -e
hostname "$1"; cd "$2"; root="$3"; user="$4"; shift 4
if [ -n "$root" ]; then
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    touch "$root/etc/hosts"
    set -- chroot --userspec="$user" "$root" "$@"
fi
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/run"
mount --bind hosts "$root/etc/hosts"
while read -r from to; do mkdir -p "$root$to"; mount --bind "$from" "$root$to"; done < mounts
exec 3>>log
cd /
echo ready
read -r go
exec "$@" </dev/null >&3 2>&1 3>&-
"""


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def condition(kind: str, holds: bool, reason: str = "") -> Json:
    found = {"type": kind, "status": "True" if holds else "False", "lastTransitionTime": now()}
    return {**found, "reason": reason} if reason else found


class Api:
    """Requests to the API server with JSON bodies. Each thread has its own connection."""

    def __init__(self, server: str, token: str) -> None:
        self._where, self._token = urllib.parse.urlsplit(server), token
        self._local = threading.local()

    def __call__(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        """Return the answer. Raises OSError if there is none, and ApiError for one that is not a success."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        for is_last in (False, True):
            if (connection := getattr(self._local, "connection", None)) is None:
                context = ssl._create_unverified_context()
                connection = self._local.connection = http.client.HTTPSConnection(
                    self._where.hostname or "", self._where.port, timeout=10, context=context
                )
            try:
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                data = json.loads(answer.read() or b"{}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                self._local.connection = None
                if is_last:
                    raise OSError(f"{method} {path}: {error}") from None
                continue
            if answer.status >= 400:
                raise ApiError(answer.status, data.get("message", ""))
            return dict(data)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close this thread's connection."""
        if (connection := getattr(self._local, "connection", None)) is not None:
            connection.close()


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Pod:
    """A pod that runs here. ``address`` is its own."""

    def __init__(self, spec: Json, address: str, folder: Path) -> None:
        self.spec, self.address, self.folder = spec, address, folder
        meta = spec["metadata"]
        self.namespace, self.name, self.uid = meta["namespace"], meta["name"], meta["uid"]
        self.node = spec["spec"]["nodeName"]
        self.container: Json = spec["spec"]["containers"][0]
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts, self.started, self.exit_code, self.began = 0, 0.0, 0, now()
        self.ended_at: float | None = None
        self.asked, self.is_ending = 0.0, False  # when its deletion was first seen; whether it had SIGTERM
        self.hook: subprocess.Popen[bytes] | None = None
        self.is_ready, self.probed, self.failed_probes = False, 0.0, 0
        self.problem: tuple[str, str] | None = None  # reason and message of a container that cannot start
        self.killed_for = ""  # reason of an end, such as OOMKilled
        self.evicted_for = ""  # message of an eviction: the pod fails, and its container is not restarted
        self.sent = ""

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self, number: int) -> None:
        """Send a signal to the container's first process, or end all processes of the pod with SIGKILL."""
        if self.process is None or self.process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            if number == signal.SIGKILL:
                self.process.kill()  # of unshare: --kill-child
            else:
                os.kill(self.first_pid(), number)

    def first_pid(self) -> int:
        """Return the pid of the container's first process. Raises OSError and ValueError if it has ended."""
        assert self.process is not None
        [child] = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def hook_has_ended(self) -> bool:
        """Start the command of the container's preStop hook at the first call. Return whether it is over."""
        command = self.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if command and self.hook is None:
            self.hook = subprocess.Popen(command)  # a plain `sleep`, which needs nothing of the pod
        return self.hook is None or self.hook.poll() is not None

    def kill_worker(self) -> None:
        """Kill the process of the pod that was started last."""
        first = self.first_pid()
        home = os.readlink(f"/proc/{first}/ns/pid")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns/pid") == home:
                    found.append((int((folder / "stat").read_text().rpartition(")")[2].split()[19]), int(folder.name)))
        os.kill(max(found)[1], signal.SIGKILL)


class Kubelet:
    """All nodes of a test cluster. ``switch``: pid of a process in the network namespace with the bridge br0."""

    def __init__(self, plan: Json) -> None:
        self.api = Api(plan["server"], plan["token"])
        self.address, self.switch = plan["address"], int(plan["switch"])
        self.nodes: dict[str, Json] = plan["nodes"]
        self.network, self.first, self.last = plan["network"], int(plan["first"]), int(plan["last"])
        self.folder = Path(plan["folder"])
        self.certificate = plan["certificate"]
        self.environment: dict[str, str] = plan["environment"]
        self.ports = {name: FIRST_PORT + index for index, name in enumerate(self.nodes)}
        self.pods: dict[str, Pod] = {}
        self.images: dict[str, Json] = {}
        self.crashed: set[str] = set()
        self.forwarded: set[socket.socket] = set()
        self.stop = threading.Event()
        self.lock = threading.RLock()
        self._used = 0

    # ---- nodes

    def heartbeats(self) -> None:
        while not self.stop.is_set():
            for name, capacity in self.nodes.items():
                if name not in self.crashed:
                    with contextlib.suppress(OSError, ApiError):
                        self._heartbeat(name, capacity)
            self.stop.wait(HEARTBEAT_S)

    def _heartbeat(self, name: str, capacity: Json) -> None:
        size = {"cpu": "64", "memory": "256Gi", "pods": "110", **capacity}
        ready = {**condition("Ready", True, "KubeletReady"), "lastHeartbeatTime": now()}
        status = {
            "capacity": size,
            "allocatable": size,
            "addresses": [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": name}],
            "conditions": [ready],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.ports[name]}},
        }
        try:
            self._patch(f"/api/v1/nodes/{name}/status", {"status": status})
        except ApiError as error:
            if error.status != 404:
                raise
            meta = {"name": name, "labels": {"kubernetes.io/hostname": name}}
            self.api("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": meta})

    def _patch(self, path: str, body: Json) -> None:
        self.api("PATCH", path, body, "application/strategic-merge-patch+json")

    def command(self, line: str) -> None:
        what, _, node = line.strip().partition(" ")
        with self.lock:
            if what == "crash":
                self.crashed.add(node)
                for pod in [each for each in self.pods.values() if each.node == node]:
                    self._ip(f"link set {self._link(pod)} down")  # first: peers then see silence
                    pod.end(signal.SIGKILL)
            elif what == "start":
                self.crashed.discard(node)
            elif what in ("cut", "kill"):
                [pod] = [each for each in self.pods.values() if each.name == node]
                if what == "cut":
                    self._ip(f"link set {self._link(pod)} down")
                    heal = threading.Timer(CUT_S, self._ip, [f"link set {self._link(pod)} up"])
                    heal.daemon = True
                    heal.start()
                else:
                    pod.kill_worker()
            elif what == "image":
                name, _, text = node.partition(" ")
                self.images[name] = json.loads(text)
            elif what == "drop":
                for each in list(self.forwarded):
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
            elif what == "oom":  # the container's processes end as the kernel ends them, with this reason
                for pod in self.pods.values():
                    if pod.name == node:
                        pod.killed_for = "OOMKilled"
                        pod.end(signal.SIGKILL)
            elif what == "evict":
                [pod] = [each for each in self.pods.values() if each.name == node]
                self._evict(pod)

    def _evict(self, pod: Pod) -> None:
        """End the pod as the real agent does: an event, the end of the container, and then the phase."""
        pod.evicted_for = EVICTION
        subject = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid}
        event = {
            "metadata": {"name": f"{pod.name}.evicted", "namespace": pod.namespace},
            "involvedObject": subject,
            "reason": "Evicted",
            "message": EVICTION,
            "type": "Warning",
            "source": {"component": "kubelet", "host": pod.node},
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
        }
        self.api("POST", f"/api/v1/namespaces/{pod.namespace}/events", event)
        pod.end(signal.SIGKILL)

    # ---- pods

    def run(self) -> None:
        while not self.stop.is_set():
            with contextlib.suppress(OSError, ApiError), self.lock:
                self._round()
            self.stop.wait(POLL_S)
        for pod in self.pods.values():
            pod.end(signal.SIGKILL)

    def _round(self) -> None:
        listed = self.api("GET", "/api/v1/pods?fieldSelector=" + urllib.parse.quote("spec.nodeName!="))["items"]
        known = {each["metadata"]["uid"]: each for each in listed if each["spec"]["nodeName"] in self.nodes}
        for uid, spec in known.items():
            if spec["spec"]["nodeName"] in self.crashed:
                continue
            try:
                self._advance(uid, spec)
            except ApiError as error:
                if error.status not in (404, 409):
                    print(f"kubelet: {error}", file=sys.stderr)
        for uid in [uid for uid in self.pods if uid not in known]:
            self._drop(uid)

    def _advance(self, uid: str, spec: Json) -> None:
        pod, meta = self.pods.get(uid), spec["metadata"]
        if "deletionTimestamp" in meta:
            if pod is not None and pod.is_alive:
                pod.asked = pod.asked or time.monotonic()
                deadline = pod.asked + meta.get("deletionGracePeriodSeconds", 30)  # may become shorter
                if not pod.is_ending and (pod.hook_has_ended() or time.monotonic() > deadline - 1):
                    pod.is_ending, pod.is_ready = True, False
                    pod.end(signal.SIGTERM)
                elif time.monotonic() > deadline:
                    pod.end(signal.SIGKILL)
                return
            if pod is not None and pod.process is not None and not self._restarts_always(pod):
                # A newer Job takes a deleted pod that has succeeded as done.
                pod.ended_at, pod.exit_code, pod.is_ready = time.monotonic(), pod.process.returncode, False
                self._report(pod)
            self._drop(uid)
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            self.api("DELETE", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", options)
            return
        if spec["status"].get("phase") in ("Failed", "Succeeded"):
            return
        if pod is None:
            folder = self.folder / uid
            folder.mkdir()
            pod = self.pods[uid] = Pod(spec, self._free_address(), folder)
            if "missing" in pod.container["image"]:
                pod.problem = ("ErrImagePull", f'pull access denied for "{pod.container["image"]}": manifest unknown')
                self._report(pod)
                pod.problem = ("ImagePullBackOff", f'Back-off pulling image "{pod.container["image"]}"')
                return
        ready = [each["status"] for each in spec["status"].get("conditions", ()) if each["type"] == "Ready"]
        if ready not in ([], ["True" if pod.is_ready else "False"]):
            pod.sent = ""  # another controller has changed it, such as the one of lost nodes
        if pod.problem is None:
            self._run_container(pod)
        self._report(pod)

    def _run_container(self, pod: Pod) -> None:
        if pod.process is None:
            self._start(pod)
        elif not pod.is_alive:
            if pod.ended_at is None:
                pod.ended_at, pod.exit_code, pod.is_ready = time.monotonic(), pod.process.returncode, False
                return
            # The first restart follows at once, the others wait longer each time, as the real one's.
            if self._restarts_always(pod) and time.monotonic() - pod.ended_at > min(2.0 * pod.restarts, 10.0):
                pod.restarts += 1
                (pod.folder / "log").replace(pod.folder / "log.previous")
                self._start(pod)

    @staticmethod
    def _restarts_always(pod: Pod) -> bool:
        return not pod.evicted_for and bool(pod.spec["spec"].get("restartPolicy", "Always") == "Always")

    def _free_address(self) -> str:
        taken = {pod.address for pod in self.pods.values()}
        size = self.last - self.first
        for _ in range(size):  # a replaced pod gets another address, as on a real network
            self._used = (self._used + 1) % size
            if (address := f"{self.network}.{self.first + self._used}") not in taken:
                return address
        raise OSError("no free address")

    def _link(self, pod: Pod) -> str:
        return f"q{pod.address.rpartition('.')[2]}"

    def _ip(self, *lines: str, pid: int | None = None, quiet: bool = False) -> None:
        command = ["nsenter", f"--net=/proc/{pid or self.switch}/ns/net", "ip", "-batch", "-"]
        done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True, check=False)
        if done.returncode and not quiet:
            print(f"kubelet: {lines}: {done.stderr}", file=sys.stderr)

    def _start(self, pod: Pod) -> None:
        self._write_files(pod)
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = [*pod.container.get("command", ()), *pod.container.get("args", ())]
        image = self.images.get(pod.container["image"], {})
        words = [pod.name, str(pod.folder), image.get("root", ""), image.get("user", ""), *words]
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces]  # it ends also if this process is killed
        with open(pod.folder / "log", "ab") as log:
            pod.process = subprocess.Popen(
                [*command, "sh", "-c", _ENTER, "sh", *words],
                env=self._variables(pod), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        assert pod.process.stdin is not None and pod.process.stdout is not None
        if pod.process.stdout.readline() == b"ready\n":
            link = self._link(pod)
            # The kernel removes the link of a container's earlier start only after its namespace.
            self._ip(f"link del {link}", quiet=True)
            self._ip(
                # One hardware address for all starts, because others keep it for a minute.
                f"link add {link} type veth peer name eth0 address 02:00:00:00:01:{int(link[1:]):02x} "
                f"netns {pod.process.pid}",
                f"link set {link} master br0 up",
            )  # fmt: skip
            self._ip("link set lo up", "link set eth0 up", f"addr add {pod.address}/24 dev eth0", pid=pod.process.pid)
        with contextlib.suppress(BrokenPipeError):
            pod.process.stdin.write(b"go\n")
            pod.process.stdin.close()
        pod.process.stdout.close()
        pod.started, pod.ended_at, pod.is_ready = time.monotonic(), None, False

    def _write_files(self, pod: Pod) -> None:
        pod.folder.joinpath("log").touch()
        pod.folder.joinpath("hosts").write_text(f"127.0.0.1 localhost\n{pod.address} {pod.name}\n")
        mounts, volumes = [], {each["name"]: each for each in pod.spec["spec"].get("volumes", ())}
        for mount in pod.container.get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            folder = pod.folder / f"volume-{mount['name']}"
            folder.mkdir(exist_ok=True)
            if secret := volume.get("secret"):
                found = self.api("GET", f"/api/v1/namespaces/{pod.namespace}/secrets/{secret['secretName']}")
                for key, value in found["data"].items():
                    (folder / key).write_bytes(base64.b64decode(value))
                    (folder / key).chmod(secret.get("defaultMode", 0o644))
            mounts.append(f"{folder.name} {mount['mountPath']}\n")
        pod.folder.joinpath("mounts").write_text("".join(mounts))

    def _variables(self, pod: Pod) -> dict[str, str]:
        fields = {
            "metadata.name": pod.name,
            "metadata.namespace": pod.namespace,
            "metadata.uid": pod.uid,
            "status.podIP": pod.address,
            "spec.nodeName": pod.node,
        }
        image = self.images.get(pod.container["image"])
        found = dict(self.environment if image is None else image["env"])
        for each in pod.container.get("env", ()):
            source = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            found[each["name"]] = fields[source] if source else each.get("value", "")
        return found

    def _probe(self, pod: Pod) -> None:
        probe = pod.container.get("readinessProbe", {}).get("tcpSocket")
        if not pod.is_alive or (probe is None and pod.is_ready):
            return
        if probe is None:
            pod.is_ready = True
        elif time.monotonic() - pod.probed > (READY_PROBE_S if pod.is_ready else PROBE_S):
            pod.probed = time.monotonic()
            try:
                socket.create_connection((pod.address, int(probe["port"])), 0.3).close()
                pod.is_ready, pod.failed_probes = True, 0
            except OSError:
                pod.failed_probes += 1
                pod.is_ready = pod.is_ready and pod.failed_probes < MAX_FAILED_PROBES

    def _report(self, pod: Pod) -> None:
        self._probe(pod)
        container, restarts = pod.container, self._restarts_always(pod)
        state: Json
        last: Json = {}
        phase = "Running"
        ended = {"exitCode": _exit_code(pod.exit_code), "reason": pod.killed_for or "Error", "finishedAt": now()}
        if pod.problem is not None:
            state, phase = {"waiting": {"reason": pod.problem[0], "message": pod.problem[1]}}, "Pending"
        elif pod.is_alive:
            state = {"running": {"startedAt": pod.began}}
        elif pod.ended_at is None:
            return  # its end is noticed in the next round
        elif not restarts:
            state, phase = {"terminated": ended}, "Failed" if pod.exit_code else "Succeeded"
        elif pod.restarts:
            message = f"back-off restarting failed container {container['name']}"
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}
        else:
            state = {"terminated": ended}
        if pod.restarts or (restarts and not pod.is_alive and pod.problem is None):
            last = {"terminated": ended}
        status = {
            "phase": phase,
            "hostIP": self.address,
            "startTime": pod.began,
            "podIP": pod.address,
            "podIPs": [{"ip": pod.address}],
            "conditions": [
                condition("Initialized", True),
                condition("PodScheduled", True),
                condition("ContainersReady", pod.is_ready),
                condition("Ready", pod.is_ready),
            ],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": pod.is_ready,
                    "restartCount": pod.restarts,
                    "state": {**dict.fromkeys(("waiting", "running", "terminated")), **state},
                    "lastState": last,
                }
            ],
        }
        if pod.evicted_for and phase == "Failed":
            status |= {"reason": "Evicted", "message": pod.evicted_for}
        key = json.dumps([phase, pod.is_ready, pod.restarts, sorted(state), pod.problem, bool(last)])
        if key != pod.sent:
            self._patch(f"{pod.path}/status", {"metadata": {"uid": pod.uid}, "status": status})
            pod.sent = key

    def _drop(self, uid: str) -> None:
        if (pod := self.pods.pop(uid, None)) is not None:
            pod.end(signal.SIGKILL)
            for process in (pod.process, pod.hook):
                if process is not None:
                    process.kill()
                    process.wait()
            shutil.rmtree(pod.folder, ignore_errors=True)

    # ---- the API server's requests

    def serve(self, node: str) -> http.server.ThreadingHTTPServer:
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                kubelet.answer(self, node)

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        server = http.server.ThreadingHTTPServer((self.address, self.ports[node]), Handler)
        server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def answer(self, request: http.server.BaseHTTPRequestHandler, node: str) -> None:
        url = urllib.parse.urlsplit(request.path)
        what, namespace, name, *_ = [*url.path.strip("/").split("/"), "", "", ""]
        query = urllib.parse.parse_qs(url.query)
        with self.lock:
            found = [p for p in self.pods.values() if (p.namespace, p.name, p.node) == (namespace, name, node)]
        if not found or node in self.crashed:
            request.send_error(404)
        elif what == "containerLogs":
            file = found[0].folder / ("log.previous" if query.get("previous") == ["true"] else "log")
            lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
            body = b"".join(lines[-int(query.get("tailLines", ["1000000"])[0]) :])
            request.send_response(200)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
        elif what == "exec":
            command = [
                "nsenter",
                f"--target={found[0].first_pid()}",
                "--mount",
                "--uts",
                "--ipc",
                "--net",
                "--pid",
                "--root",
            ]
            is_tty = query.get("tty", [""])[0] in ("1", "true")
            exec_server.serve(request, [*command, *query["command"]], is_tty=is_tty, protocols=(exec_server.V4,))
        elif what == "portForward":
            self.forwarded.add(request.connection)
            try:
                websocket.forward(request, found[0].address, [int(port) for port in query["port"]])
            finally:
                self.forwarded.discard(request.connection)
        else:
            request.send_error(404)


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def main() -> None:
    kubelet = Kubelet(json.loads(sys.stdin.readline()))
    signal.signal(signal.SIGTERM, lambda *_: kubelet.stop.set())
    for node in kubelet.nodes:
        kubelet.serve(node)
    threading.Thread(target=kubelet.heartbeats, daemon=True).start()

    def commands() -> None:
        for line in sys.stdin:
            kubelet.command(line)
            print("done", flush=True)
        kubelet.stop.set()

    threading.Thread(target=commands, daemon=True).start()
    kubelet.run()


if __name__ == "__main__":
    main()
