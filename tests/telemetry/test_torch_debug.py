"""The handler in torch's debug server: its answers, and that a rank with it ends without an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from monarch_backend._core import platform

c10d = pytest.importorskip("torch._C._distributed_c10d")
pytestmark = [
    pytest.mark.skipif(not platform.HAS_MEMFD, reason="programs are found in /proc"),
    pytest.mark.skipif(not hasattr(c10d, "_register_handler"), reason="this torch has no debug server"),
]

PROGRAM = """
import json, urllib.error, urllib.parse, urllib.request
from torch._C._distributed_c10d import _WorkerServer
from monarch_backend._telemetry import recorder
from monarch_backend._telemetry.export import torch_debug
from monarch_backend.telemetry import add_torch_debug_handler, span

recorder.area()
with span("load"):
    pass
for _ in range(2):
    add_torch_debug_handler()
answer_query = torch_debug.query
torch_debug.query = lambda query: answer_query(query) if "spans" in query else 1 / 0
server = _WorkerServer("::", 0)
for query in ("select name from spans", "select wrong from spans", "fails"):
    path = f"/handler/monarch_sql?query={urllib.parse.quote(query)}"
    try:
        with urllib.request.urlopen(f"http://localhost:{server.port}{path}", data=b"") as answer:
            print(answer.status, json.load(answer)["rows"])
    except urllib.error.HTTPError as error:
        print(error.code, json.load(error)["error"].partition(";")[0])
server.shutdown()
"""


def test_debug_server_answers_queries_and_the_process_ends() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    answers = "200 [['load']]", "400 no such column: wrong", "500 ZeroDivisionError: division by zero"
    assert done.stdout.splitlines() == list(answers), done.stderr
    assert done.returncode == 0, done.stderr
