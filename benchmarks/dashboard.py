"""Benchmark of the dashboard with many ranks: how long the server and the page take for a refresh.

    python benchmarks/dashboard.py [--ranks 10 100 1000] [--repetitions 7] [--out FILE]

The ranks are real processes with real recordings, of _dashboard_program.py. They record as a training would, without
torch and actors, so that a thousand of them fit on one machine.

Server: milliseconds of each route, from the call to the JSON text, and the size of the text. Each call reads anew.

Page: milliseconds in Chromium for each view. "load" is from the request to the parsed answers, "draw" is the page's own
work, and "longest gap" is the longest time between two frames in five seconds of refreshes. It needs playwright and
Chromium, and is left out without them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from _machine_report import Others, machine
from checkouts import ROOT

from monarch_backend._dashboard import source
from monarch_backend._dashboard.api import ROUTES, Query
from monarch_backend._dashboard.source import Source
from monarch_backend._telemetry.subject import ThisMachine

PROGRAM = Path(__file__).with_name("_dashboard_program.py")
QUERY = "select process, name, detail, state, duration_us from activities order by duration_us desc"
VIEWS = ("ranks", "failures", "timeline", "logs", "sql", "collectives", "metrics")
SECONDS = 5.0


@contextlib.contextmanager
def program_of(ranks: int) -> Iterator[int]:
    """Run a program with this many ranks, and yield its pid."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MONARCH_TELEMETRY": "1"}
    command = [sys.executable, str(PROGRAM), str(ranks)]
    program = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None
    with program:
        if program.stdout.readline() != "ready\n":
            raise SystemExit("the program with many ranks has failed; its error is above")
        time.sleep(3)  # the ranks record what was before
        yield program.pid
        program.stdin.close()


def measure_server(pid: int, repetitions: int) -> dict[str, tuple[float, int]]:
    """Return the median seconds and the bytes of each route."""
    found: dict[str, tuple[float, int]] = {}
    source.LOOK_AGE_S = 0.0
    reader = Source(ThisMachine(str(pid)))
    for route in ROUTES:
        if route.path in ("/process", "/stacks"):  # of one process; and a program of this sort answers no signal soon
            continue
        parameters = Query(QUERY) if route.method == "POST" else route.parameters()
        times, size = [], 0
        for _ in range(repetitions):
            start = time.perf_counter()
            size = len(msgspec.json.encode(route.call(reader, parameters)))
            times.append(time.perf_counter() - start)
        found[route.path] = statistics.median(times), size
    return found


FRAMES = """seconds => new Promise(resolve => {
    const begin = performance.now();
    let last = begin, longest = 0;
    const measures = {load: [], draw: []};
    let seen = -1;
    const frame = now => {
        longest = Math.max(longest, now - last);
        last = now;
        const [load] = performance.getEntriesByName("load");
        if (load && load.startTime !== seen) {
            seen = load.startTime;
            measures.load.push(load.duration);
            measures.draw.push(performance.getEntriesByName("draw")[0].duration);
        }
        if (now - begin < seconds * 1000) requestAnimationFrame(frame);
        else resolve({longest, ...measures});
    };
    requestAnimationFrame(frame);
})"""


def measure_page(pid: int) -> dict[str, dict[str, Any]] | None:
    """Return for each view the milliseconds of its refreshes and the longest gap. None without a browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    command = [sys.executable, "-m", "monarch_backend.cli", "dashboard", str(pid), "--no-open", "--json"]
    found: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as api:
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"]
            browser = api.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.goto(url)
            for view in VIEWS:
                page.wait_for_selector("nav a")
                page.evaluate("performance.clearMeasures()")
                page.click(f"nav a[data-view={view}]")
                end = time.monotonic() + 60
                while not page.evaluate("performance.getEntriesByName('draw').length") and time.monotonic() < end:
                    time.sleep(0.05)
                found[view] = page.evaluate(FRAMES, SECONDS)
            browser.close()
        finally:
            server.terminate()
    return found


def server_table(found: dict[int, dict[str, tuple[float, int]]]) -> str:
    """Return the table of routes."""
    sizes = list(found)
    lines = [
        f"| route | {' | '.join(f'{size} ranks, ms | KiB' for size in sizes)} |",
        "| --- |" + " ---: | ---: |" * len(sizes),
    ]
    for path in found[sizes[0]]:
        cells = [f"{found[size][path][0] * 1e3:.0f} | {found[size][path][1] / 1024:.0f}" for size in sizes]
        lines.append(f"| {path} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page_table(found: dict[int, dict[str, dict[str, Any]]]) -> str:
    """Return the table of views."""
    sizes = list(found)
    lines = [
        f"| view | {' | '.join(f'{size} ranks: load, ms | draw, ms | longest gap, ms' for size in sizes)} |",
        "| --- |" + " ---: | ---: | ---: |" * len(sizes),
    ]
    for view in VIEWS:
        cells = []
        for size in sizes:
            of = found[size][view]
            load, draw = (f"{statistics.median(of[name]):.0f}" if of[name] else "-" for name in ("load", "draw"))
            cells.append(f"{load} | {draw} | {of['longest']:.0f}")
        lines.append(f"| {view} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print the tables; with --out also write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[10, 100, 1000], help="numbers of ranks")
    parser.add_argument("--repetitions", type=int, default=7, help="calls of each route")
    parser.add_argument("--out", type=Path, help="write a page with the tables to this file")
    args = parser.parse_args()
    others = Others()
    server: dict[int, dict[str, tuple[float, int]]] = {}
    pages: dict[int, dict[str, dict[str, Any]]] = {}
    for ranks in args.ranks:
        with program_of(ranks) as pid:
            server[ranks] = measure_server(pid, args.repetitions)
            page = measure_page(pid)
            if page is not None:
                pages[ranks] = page
    sections = [f"## Server\n\n{server_table(server)}"]
    if pages:
        sections.append(f"## Page\n\n{page_table(pages)}")
    sections.append(f"- {machine()}; load {os.getloadavg()[0]:.1f}; {others.note()}")
    text = "\n\n".join(sections)
    print(text)
    if args.out:
        title = (
            "# Measured: the dashboard with many ranks\n\nFrom `benchmarks/dashboard.py`, which says how it measures."
        )
        args.out.write_text(f"{title}\n\n{text}\n")


if __name__ == "__main__":
    main()
