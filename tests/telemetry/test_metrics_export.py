"""Metrics of running programs as Prometheus's text: names, labels, values, the server, and sums over several looks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry.export import prometheus, series
from monarch_backend._telemetry.export.series import Collector, Distribution, Family, Point
from monarch_backend._telemetry.metrics import BOUNDS, InstrumentKind
from monarch_backend._telemetry.program_recording import Recording, Unread
from monarch_backend._telemetry.reader import EventFilter
from monarch_backend._telemetry.subject import ThisMachine
from monarch_backend.cli import main
from tests.telemetry.recordings import recording_of
from tests.telemetry.traced_program import traced_program

parser = pytest.importorskip("prometheus_client.parser")

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with traced_program(tmp_path_factory.mktemp("metrics")) as process:
        yield process


def _parse(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the samples by name, read by Prometheus's own parser."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def _where(samples: list[tuple[dict[str, str], float]], **labels: str) -> list[float]:
    return [value for found, value in samples if labels.items() <= found.items()]


def test_metrics_have_processes_messages_and_user_metrics(
    program: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["metrics", str(program.pid)]) == 0
    found = _parse(capsys.readouterr().out)
    assert _where(found["monarch_processes"], state="running") == [3]
    assert _where(found["monarch_processes"], state="ended") == [1]
    assert _where(found["monarch_actors"], process="gpus 1 of trainers", state="running") == [1]
    steps = {"actor": "worker", "endpoint": "step"}
    assert _where(found["monarch_messages_sent_total"], pid=str(program.pid), **steps) == [5]
    assert sorted(_where(found["monarch_messages_ended_total"], status="ok", **steps)) == [5, 6]
    assert sorted(_where(found["monarch_messages_started_total"], **steps)) == [5, 6]
    assert _where(found["monarch_messages_started_total"], actor="worker", endpoint="hang") == [1]
    assert _where(found["monarch_messages_ended_total"], endpoint="hang") == []
    assert _where(found["monarch_messages_failed_total"], endpoint="raises") == [1]
    assert sorted(_where(found["monarch_message_duration_seconds_count"], **steps)) == [5, 6]
    assert _where(found["samples_total"], process="gpus 1 of trainers", split="train") == [48]
    assert _where(found["loss"], process="gpus 0 of trainers") == [0.2]
    assert all(value > 1 << 20 for _, value in found["monarch_process_memory_bytes"])
    assert {labels["program"] for samples in found.values() for labels, _ in samples} == {"traced_program.py"}


def test_json_has_the_same_samples(program: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", str(program.pid), "--json"]) == 0
    made = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert made["samples_total"]["type"] == "counter"
    assert sorted(each["value"] for each in made["samples_total"]["samples"]) == [40, 48]


def test_unknown_program_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "no such program"]) == 1
    assert "no running program is 'no such program'" in capsys.readouterr().err


def _family(name: str, kind: InstrumentKind, *points: tuple[dict[str, str], float | Distribution]) -> Family:
    return Family(name, kind, "", points=[Point("p", None, *point) for point in points])


def test_names_and_labels_are_valid_and_unique() -> None:
    nasty = 'a "b"\\ \n c'
    text = prometheus.as_text(
        [
            _family("a.b", InstrumentKind.GAUGE, ({"x y": nasty}, 1), ({"program": "mine", "le": "5", "__x": "y"}, 2)),
            _family("a-b", InstrumentKind.GAUGE, ({}, math.nan)),
            _family("9 lives", InstrumentKind.COUNTER, ({}, math.inf)),
            _family("a_b", InstrumentKind.COUNTER, ({}, 2.5)),
            _family("steps_total", InstrumentKind.COUNTER, ({}, 3)),
            _family("steps", InstrumentKind.COUNTER, ({}, 4)),
            _family("h_count", InstrumentKind.GAUGE, ({}, 5)),
            _family("h", InstrumentKind.HISTOGRAM, ({}, Distribution())),
            _family("größe", InstrumentKind.UP_DOWN_COUNTER, ({"größe": "ü"}, -1)),
        ]
    )
    found = _parse(text)
    assert [labels for labels, _ in found["a_b"]] == [
        {"program": "p", "x_y": nasty},
        {"program": "p", "exported_program": "mine", "exported_le": "5", "_x": "y"},
    ]
    assert math.isnan(found["a_b_2"][0][1])
    assert found["_9_lives_total"] == [({"program": "p"}, math.inf)]
    assert found["a_b_total"] == [({"program": "p"}, 2.5)]
    assert (found["steps_total"][0][1], found["steps_2_total"][0][1]) == (3, 4)
    assert found["h_count"] == [({"program": "p"}, 5)] and found["h_2_count"] == [({"program": "p"}, 0)]
    assert found["gr__e"] == [({"program": "p", "gr__e": "ü"}, -1)]


def test_histogram_has_growing_buckets() -> None:
    values = Distribution()
    for value in (1e-9, 1.0, 1.5, 2.5, 1e9):
        values.add(value)
    found = _parse(prometheus.as_text([_family("h", InstrumentKind.HISTOGRAM, ({}, values))]))
    buckets = {float(labels["le"]): value for labels, value in found["h_bucket"]}
    assert len(buckets) == len(BOUNDS) + 1
    assert [buckets[each] for each in (1e-5, 1.0, 2.5, 50_000.0, math.inf)] == [1, 2, 4, 4, 5]
    assert found["h_sum"][0][1] == pytest.approx(1e9 + 5) and found["h_count"][0][1] == 5


MANY = """
import sys
from monarch_backend.actor import get_meter, this_host
from monarch_backend._telemetry.subject import ThisMachine

procs = this_host().spawn_procs({"gpus": 1})
meter = get_meter("m")
values, size, queued = (
    meter.create_histogram("values"), meter.create_counter("size"), meter.create_up_down_counter("queued")
)
for _ in range(6000):
    values.record(1.0)
size.add(7), queued.add(3), queued.add(-1)
print("ready", flush=True)
sys.stdin.readline()
for number in range(6000):
    values.record(2.0, {"n": number} if number < 3000 else None)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_sums_continue_after_events_are_overwritten() -> None:
    child = subprocess.Popen([sys.executable, "-c", MANY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    with child:
        try:
            collector = Collector(ThisMachine(str(child.pid)).recording)
            for _ in range(2):
                assert child.stdout.readline() == "ready\n"
                families, _ = collector.look()
                child.stdin.write("\n")
                child.stdin.flush()
        finally:
            child.kill()
    found = _parse(prometheus.as_text(families))
    assert sum(value for _, value in found["values_count"]) == 12_000
    assert len(found["values_count"]) == 2001  # those that are bounded, and one for all others
    assert _where(found["values_count"], further_attributes="true") == [1001]
    assert _where(found["monarch_events_overwritten_total"], pid=str(child.pid)) == [0]
    assert found["size_total"][0][1] == 7 and found["queued"][0][1] == 2


def _sent(families: list[Family]) -> dict[int, float]:
    """Return the number of sent messages by pid."""
    [family] = [each for each in families if each.name == "monarch.messages.sent"]
    return {point.process.pid: float(point.value) for point in family.points if point.process is not None}  # type: ignore[arg-type]


def test_ended_processes_are_dropped_while_a_host_is_not_read() -> None:
    away = [Unread(0, "host b", "it has not answered")]
    looks = iter(
        [
            recording_of({"a": [1, 2], "b": [3]}, []),
            *(recording_of({"a": [2, pid]}, away) for pid in range(100, 200)),
            recording_of({"a": [2], "b": [3]}, []),
        ]
    )
    asked: list[EventFilter] = []

    def read(wanted: EventFilter) -> Recording:
        asked.append(wanted)
        return next(looks)

    collector = Collector(read)
    for _ in range(102):
        families, _ = collector.look()
    assert {pid for pid, _ in asked[-1].after} == {2, 3, 199}
    assert _sent(families) == {2: 102, 3: 2}  # the host that was away has not begun again


def test_number_of_processes_that_are_not_seen_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "MAX_UNSEEN", 2)
    unread = [Unread(7, "", "its recording cannot be read")]  # any process may be below it
    looks = iter([recording_of({"a": [pid]}, unread) for pid in range(1, 7)])
    asked: list[EventFilter] = []

    def read(wanted: EventFilter) -> Recording:
        asked.append(wanted)
        return next(looks)

    collector = Collector(read)
    for _ in range(6):
        collector.look()
    known = [sorted(pid for pid, _ in each.after) for each in asked]
    assert known == [[], [1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


COLLECTIVES = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("monarch", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
x = torch.ones(4)
for _ in range(3):
    time.sleep(0.002)
    dist.all_reduce(x)
if dist.get_rank() == 0:
    work = dist.broadcast(x, 0, async_op=True)
    work = dist.all_reduce(x, async_op=True)
print("ready", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def _ranks(tmp_path: Path, script: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a script as two ranks until each has printed a line."""
    path = tmp_path / "ranks.py"
    path.write_text(script)
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            command = [sys.executable, str(path), str(tmp_path / "store"), str(rank)]
            ranks.append(
                stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            )
            stack.callback(ranks[-1].kill)
        for each in ranks:
            assert each.stdout is not None and each.stdout.readline() == "ready\n"
        yield ranks


def test_collectives_are_counted_by_rank_and_operation(tmp_path: Path) -> None:
    with _ranks(tmp_path, COLLECTIVES) as ranks:
        found = _parse(prometheus.as_text(Collector(ThisMachine(str(ranks[0].pid)).recording).look()[0]))
    [entered], [left] = (_where(found[f"monarch_collectives_{what}_total"], rank="0") for what in ("entered", "left"))
    assert entered == left + 1
    reduced = {"operation": "all_reduce", "status": "ok"}
    assert _where(found["monarch_collectives_recorded_total"], **reduced) == [3]
    assert _where(found["monarch_collectives_recorded_size_bytes_total"], **reduced) == [48]


# ---- the server


@contextlib.contextmanager
def _server(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "monarch_backend.cli", "metrics", *words, "--serve", "0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line.startswith("metrics at http://127.0.0.1:"), line
            yield child, line.split()[2].rstrip(";")
        finally:
            child.kill()


def _get(url: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers={} if host is None else {"Host": host}, method=method), timeout=30
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_answers_get_of_metrics_only(program: subprocess.Popen[str], number: signal.Signals) -> None:
    with _server(str(program.pid)) as (child, url):
        status, text = _get(url)
        assert (status, _where(_parse(text)["samples_total"], process="gpus 0 of trainers")) == (200, [40])
        assert _get(url.replace("/metrics", "/other")) == (404, "only /metrics is here\n")
        for host in ("evil.example", "http://[", ""):
            assert _get(url, host=host) == (403, "ask for 127.0.0.1 or localhost\n")
        assert [_get(url, method)[0] for method in ("POST", "PUT", "DELETE", "HEAD")] == [405] * 4
        child.send_signal(number)
        out, err = child.communicate(timeout=30)
        assert (child.returncode, out, err) == (0, "", "")


def test_server_bounds_its_connections(program: subprocess.Popen[str]) -> None:
    with _server(str(program.pid)) as (_, url):
        address = ("127.0.0.1", int(url.split(":")[2].partition("/")[0]))
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(socket.create_connection(address)) for _ in range(prometheus.MAX_CONNECTIONS)]
            deadline = time.monotonic() + 60
            while True:  # until all of these are served, and a further one is closed
                assert time.monotonic() < deadline
                try:
                    _get(url)
                except (urllib.error.URLError, ConnectionError):
                    break
            silent[0].close()
            while True:
                assert time.monotonic() < deadline
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    assert _get(url)[0] == 200
                    break


def test_port_that_is_taken_is_an_error(program: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["metrics", str(program.pid), "--serve", str(port)]) == 1
    assert f"cannot serve on 127.0.0.1 port {port}: Address already in use: choose another one" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("address", ["x", "1:2:x", "70000", "-1", "localhost:"])
def test_wrong_address_is_an_error(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["metrics", f"--serve={address}"])
    assert ended.value.code == 2 and "is not [HOST:]PORT" in capsys.readouterr().err


def test_server_answers_with_the_reason_when_the_program_has_ended(tmp_path: Path) -> None:
    with traced_program(tmp_path) as process:
        with _server(str(process.pid)) as (_, url):
            process.kill()
            process.wait()
            deadline = time.monotonic() + 60
            while _get(url)[0] != 503:
                assert time.monotonic() < deadline
            assert "no running program is" in _get(url)[1]
    assert not os.path.exists(f"/proc/{process.pid}")
