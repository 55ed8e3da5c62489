"""Export by OpenTelemetry's protocol, decoded at a receiver: identities, parents, names, attributes and values."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry.program_recording import Unread
from monarch_backend._telemetry.subject import ThisMachine
from monarch_backend.cli import main
from tests.support.waiting import wait_until
from tests.telemetry.traced_program import traced_program

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from monarch_backend._telemetry.export import otlp
from tests.telemetry.otlp_receiver import Receiver, attributes, receiver
from tests.telemetry.recordings import recording_of

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with traced_program(tmp_path_factory.mktemp("otlp")) as process:
        yield process


@pytest.fixture(scope="module")
def received(program: subprocess.Popen[str]) -> Iterator[Receiver]:
    with receiver() as server:
        assert main(["export", "otlp", str(program.pid), "--endpoint", server.url + "/", "--once"]) == 0
        yield server


def test_spans_have_names_parents_and_attributes(received: Receiver) -> None:
    spans = {span.span_id: span for _, span in received.spans}
    assert len(spans) == len(received.spans)
    assert {(len(span.trace_id), len(span.span_id)) for span in spans.values()} == {(16, 8)}
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans.values())
    names = Counter(span.name for span in spans.values())
    assert names == {
        "worker.step": 11, "step": 11, "forward": 11, "worker.relay": 1, "relay": 1, "napper.nap": 6, "nap": 6,
        "after": 6, "worker.raises": 1, "victim.die": 1, "last": 1,
    }  # fmt: skip
    chains = Counter()
    for span in spans.values():
        chain, above = [span.name], span
        while above.parent_span_id in spans:
            assert spans[above.parent_span_id].trace_id == above.trace_id
            above = spans[above.parent_span_id]
            chain.append(above.name)
        assert not above.parent_span_id
        chains[" < ".join(chain)] += 1
    assert chains["forward < step < worker.step"] == 10
    assert chains["forward < step < worker.step < relay < worker.relay"] == 1
    assert chains["after < nap < napper.nap"] == 6


def test_ranks_that_handle_one_call_are_in_one_trace(received: Receiver) -> None:
    traces = Counter(span.trace_id for _, span in received.spans if span.name == "worker.step")
    assert sorted(traces.values()) == [1, 2, 2, 2, 2, 2]


def test_spans_and_resources_have_their_attributes(received: Receiver, program: subprocess.Popen[str]) -> None:
    about, step = next((about, span) for about, span in received.spans if span.name == "step")
    assert about["service.name"] == "traced_program.py" and about["host.name"] == socket.gethostname()
    assert about["monarch.mesh"] == "trainers" and about["monarch.rank"] in ("gpus 0", "gpus 1")
    assert about["process.pid"] != program.pid
    found = attributes(step)
    assert found["number"] in range(5) and found["monarch.actor"] == "worker"
    assert f"gpus {found['monarch.actor.rank']}" == about["monarch.rank"]
    by_name = {span.name: span for _, span in received.spans}
    assert by_name["worker.step"].kind == by_name["worker.step"].SPAN_KIND_SERVER
    assert attributes(by_name["worker.step"])["bytes"] > 0
    codes = {name: by_name[name].status.code for name in ("worker.step", "worker.raises", "last")}
    assert codes == {"worker.step": 1, "worker.raises": 2, "last": 2}
    assert attributes(by_name["last"])["monarch.status"] == "lost"  # its process was killed


def test_metrics_have_values_attributes_and_kinds(received: Receiver) -> None:
    found: dict[str, list[tuple[dict[str, Any], Any]]] = {}
    for about, metric in received.metrics:
        found.setdefault(metric.name, []).append((about, metric))
    samples = {about["monarch.rank"]: metric.sum for about, metric in found["samples"]}
    assert all(each.is_monotonic and each.aggregation_temporality == 2 for each in samples.values())
    assert {rank: each.data_points[0].as_double for rank, each in samples.items()} == {"gpus 0": 40, "gpus 1": 48}
    assert attributes(samples["gpus 0"].data_points[0]) == {"split": "train"}
    assert {about["monarch.rank"]: metric.gauge.data_points[0].as_double for about, metric in found["loss"]}[
        "gpus 0"
    ] == 0.2
    durations = [
        point
        for about, metric in found["monarch.message.duration"]
        for point in metric.histogram.data_points
        if attributes(point) == {"actor": "worker", "endpoint": "step"}
    ]
    assert sorted(point.count for point in durations) == [5, 6]
    assert all(sum(point.bucket_counts) == point.count and point.min <= point.max for point in durations)
    states = {attributes(p)["state"]: p.as_int for _, m in found["monarch.processes"] for p in m.gauge.data_points}
    assert states == {"running": 3, "ended": 1}


STEPS = """
import sys
from monarch_backend.actor import get_meter, span, this_host

procs = this_host().spawn_procs({"gpus": 1})
with span("outer"):
    for line in sys.stdin:
        with span("step"):
            get_meter("m").create_counter("steps").add(1)
        print("ready", flush=True)
"""


def test_interval_sends_each_span_once_until_the_program_ends() -> None:
    program = subprocess.Popen([sys.executable, "-c", STEPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdin is not None and program.stdout is not None
    with receiver() as server, program:
        try:
            for number in range(2):
                program.stdin.write("\n")
                program.stdin.flush()
                assert program.stdout.readline() == "ready\n"
                if number == 0:
                    words = ["otlp", str(program.pid), "--endpoint", server.url, "--interval", "0.1"]
                    command = [sys.executable, "-m", "monarch_backend.cli", "export", *words]
                    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                wait_until(lambda wanted=number + 1: len(server.spans) >= wanted)
            count = len(server.metrics)
            wait_until(lambda: len(server.metrics) > count + 20)
            program.kill()
            out, err = child.communicate(timeout=60)
            assert (child.returncode, err) == (0, "") and out.endswith("the program has ended\n")
        finally:
            program.kill()
            child.kill()
    first, second = (span for _, span in server.spans)  # "outer" was open when its process, the starter, was killed
    assert first.name == second.name == "step" and first.span_id != second.span_id
    assert (first.trace_id, first.parent_span_id) == (second.trace_id, second.parent_span_id)
    assert [m.sum.data_points[0].as_double for _, m in server.metrics if m.name == "steps"][-1] == 2


def test_interval_goes_on_after_a_failure_and_ends_with_a_signal(program: subprocess.Popen[str]) -> None:
    with receiver() as server:
        server.status = 400
        words = ["otlp", str(program.pid), "--endpoint", server.url, "--interval", "0.1"]
        command = [sys.executable, "-m", "monarch_backend.cli", "export", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            try:
                wait_until(lambda: len(server.headers) >= 2)
                server.status = 200
                wait_until(lambda: server.spans and server.metrics)
                child.send_signal(signal.SIGTERM)
                out, err = child.communicate(timeout=60)
            finally:
                child.kill()
    assert child.returncode == 0 and "spans and" in out and "did not take the data" in err


def test_spans_that_were_taken_before_a_failure_are_not_sent_again(
    program: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "SPANS_PER_REQUEST", 5)
    read = ThisMachine(str(program.pid)).recording
    with receiver() as server, contextlib.closing(otlp.Exporter(read, server.url)) as exporter:
        server.statuses = [200, 400]
        with pytest.raises(otlp.ExportError, match="did not take the data"):
            exporter.send(is_last=True)
        assert len(server.spans) == 5
        left = exporter.send(is_last=True).spans
        assert exporter.send(is_last=True).spans == 0
    sent = [span.span_id for _, span in server.spans]
    assert len(sent) == len(set(sent)) == 5 + left and left > 5


def test_number_of_processes_that_are_not_seen_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MAX_UNSEEN", 2)
    recordings = [recording_of({"a": [pid]}, [Unread(0, "host b", "away")]) for pid in range(6) for _ in range(2)]
    looks = iter(recordings)
    with receiver() as server, contextlib.closing(otlp.Exporter(lambda _: next(looks), server.url)) as exporter:
        for _ in range(6):
            exporter.send()
    assert [pid for pid, _ in exporter._exported] == [3, 4, 5]


@pytest.mark.parametrize("status", [401, 404])
def test_refusal_is_an_error_without_secrets(
    program: subprocess.Popen[str], status: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=hidden-token")
    with receiver() as server:
        server.status = status
        url = server.url.replace("http://", "http://user:hidden-password@")
        assert main(["export", "otlp", str(program.pid), "--endpoint", url, "--once"]) == 1
    assert any("hidden-token" in value for headers in server.headers for value in headers.values())
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "hidden" not in err
    assert f"export: {server.url} did not take the data: " in err and str(status) in err


@pytest.mark.parametrize("headers", ["x-key=hidden%0Atoken", "hidden-token", "x-key=a,hid den=hidden"])
def test_wrong_headers_are_not_printed(
    program: subprocess.Popen[str], headers: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    with receiver() as server:
        assert main(["export", "otlp", str(program.pid), "--endpoint", server.url, "--once"]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("monarch-backend export: ") and "hidden" not in err


def test_receiver_that_is_not_there_is_an_error(
    program: subprocess.Popen[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch_backend._telemetry.export.otlp.TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["export", "otlp", str(program.pid), "--endpoint", f"http://127.0.0.1:{port}", "--once"]) == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and f"http://127.0.0.1:{port} did not take the data: " in err
    assert "Connection refused" in err or "timeout" in err  # on a busy machine, before the first attempt


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("localhost:4318", "must be a URL such as http://localhost:4318"),
        ("http://h:x", "must be a URL such as http://localhost:4318"),
        ("", "must be a URL such as http://localhost:4318"),
        ("http://h/v1/traces", "give the endpoint http://h without /v1/traces"),
    ],
)
def test_wrong_url_is_an_error(
    program: subprocess.Popen[str], endpoint: str, text: str, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert main(["export", "otlp", str(program.pid), "--endpoint", endpoint, "--once"]) == 1
    assert text in capfd.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "x", "1e9"])
def test_wrong_interval_is_an_error(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "otlp", f"--interval={seconds}", "--endpoint", "http://h"])
    assert ended.value.code == 2 and "is not a number of seconds" in capsys.readouterr().err


def test_missing_extra_is_an_error(tmp_path: Path) -> None:
    code = "import sys\nsys.modules['opentelemetry'] = None\nfrom monarch_backend.cli import main\nsys.exit(main())"
    words = ["export", "otlp", "--endpoint", "http://h"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and 'pip install "monarch_backend[otlp]"' in done.stderr


REQUESTS = """
import asyncio, sys
from monarch_backend.actor import Actor, endpoint, span, this_host
from monarch_backend.telemetry import remote_parent
from monarch_backend._telemetry.subject import ThisMachine


class Worker(Actor):
    @endpoint
    def echo(self, number):
        return number


async def request(number, worker, answered, release):
    with remote_parent(f"00-{number:032x}-{number:016x}-01"), span("request"):
        await worker.echo.call_one(number)
        answered.release()
        await release.wait()


async def main():
    worker = this_host().spawn_procs({"gpus": 1}).spawn("worker", Worker)
    answered, release = asyncio.Semaphore(0), asyncio.Event()
    tasks = [asyncio.create_task(request(number, worker, answered, release)) for number in range(1, 41)]
    for _ in tasks:
        await answered.acquire()
    print("answered", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    release.set()
    await asyncio.gather(*tasks)
    print("ended", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


asyncio.run(main())
"""


def test_messages_wait_for_the_spans_above_them() -> None:
    """Of 80 open spans most are not visible, so the traces of their messages are not known yet."""
    program = subprocess.Popen(
        [sys.executable, "-c", REQUESTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdin is not None and program.stdout is not None
    with receiver() as server, program:
        try:
            assert program.stdout.readline() == "answered\n"
            words = ["otlp", str(program.pid), "--endpoint", server.url, "--interval", "0.1"]
            command = [sys.executable, "-m", "monarch_backend.cli", "export", *words]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            with child:
                try:
                    wait_until(lambda: sum(metric.name == "monarch.processes" for _, metric in server.metrics) >= 3)
                    early = len(server.spans)
                    program.stdin.write("\n")
                    program.stdin.flush()
                    assert program.stdout.readline() == "ended\n"
                    wait_until(lambda: len(server.spans) >= 80)
                finally:
                    child.kill()
        finally:
            program.kill()
    assert early < 40
    spans = {span.span_id: span for _, span in server.spans}
    assert len(server.spans) == len(spans) == 80
    for name in ("request", "worker.echo"):
        found = [int.from_bytes(span.trace_id, "big") for span in spans.values() if span.name == name]
        assert sorted(found) == list(range(1, 41))
    for span in spans.values():
        number = int.from_bytes(span.trace_id, "big")
        if span.name == "request":
            assert int.from_bytes(span.parent_span_id, "big") == number
            assert not attributes(span)
        else:
            assert spans[span.parent_span_id].name == "request"
