"""The page in a real Chromium: each view shows what the program does, without an error on the console."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.dashboard.conftest import ask

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab with the dashboard. Errors and refused resources are collected."""

    def __init__(self, browser: Any, url: str) -> None:
        self.tab = browser.new_page(viewport={"width": 1200, "height": 760})
        self.errors: list[str] = []
        self.tab.on("console", lambda message: message.type in ("error", "warning") and self._add(message.text))
        self.tab.on("pageerror", lambda error: self._add(str(error)))
        self.tab.goto(url)

    def _add(self, text: str) -> None:
        self.errors.append(text)

    def show(self, view: str) -> None:
        self.tab.click(f"nav a[data-view={view}]")
        self.tab.wait_for_selector(f"nav a[data-view={view}][aria-current=page]")

    def wait(self, selector: str, text: str = "") -> Any:
        found = self.tab.locator(selector).filter(has_text=text).first
        found.wait_for(timeout=30_000)
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: the page is not tested"
    )
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed, so the page is not tested: apt-get install chromium")
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with contextlib.closing(browser):
            yield browser


@pytest.fixture
def page(browser: Any, served: dict[str, str]) -> Iterator[Page]:
    page = Page(browser, served["url"])
    yield page
    page.tab.close()
    assert page.errors == []


def test_ranks_are_a_grid_coloured_by_state(page: Page) -> None:
    page.wait(".rank.failed")
    assert page.tab.locator(".rank").count() == 5
    assert page.tab.locator(".rank.running").count() == 1
    page.wait("summary", "trainers 2 processes: 1 idle, 1 running")
    page.tab.click(".rank.running")
    page.wait(".detail table", "trainer: hang")
    page.wait(".detail", "gpus 1 of trainers")
    page.tab.fill("input[type=search]", "failed")
    page.wait("td", "cpus 0 of loaders")
    assert page.tab.locator(".wide tbody tr").count() == 1
    page.tab.click(".detail a:text('stack')")
    page.wait(".stacks h3", "gpus 1 of trainers (pid")
    assert page.tab.locator(".stacks pre").count() == 1


def test_ranks_of_torchrun_are_one_grid(page: Page, served: dict[str, str]) -> None:
    """Each one is a program of its own, with one process."""
    page.wait(".rank")
    tree = json.loads(ask(served["address"], "api/v1/tree", served["token"])[1])
    [program] = tree["programs"]
    ranks = [{**program["ranks"][0], "pid": pid, "label": f"rank {pid}", "mesh": ""} for pid in (10, 9)]
    programs = [{"pid": rank["pid"], "command": "train.py", "ranks": [rank]} for rank in ranks]
    answer = json.dumps({**tree, "programs": [program, *programs]})
    page.tab.route("**/api/v1/tree*", lambda route: route.fulfill(body=answer, content_type="application/json"))
    page.wait("summary", "ranks 2 processes")
    assert page.tab.locator("section").count() == 2
    labels = page.tab.locator("section").nth(1).locator(".rank").evaluate_all("all => all.map(each => each.ariaLabel)")
    assert [label.partition(":")[0] for label in labels] == ["rank 9", "rank 10"]


def test_token_leaves_the_address_and_survives_a_reload(page: Page) -> None:
    page.wait(".rank")
    assert "token" not in page.tab.url
    page.tab.reload()
    page.wait(".rank")
    assert page.tab.evaluate("document.cookie") == ""


def test_failures_have_a_chain_and_text_is_no_markup(page: Page) -> None:
    page.show("failures")
    page.wait(".failures summary", "the process has ended: by SIGKILL")
    page.tab.click(".failures summary:has-text('trainer.check failed')")
    page.wait(".failures details[open] li", "loader.load failed")
    page.tab.click(".failures summary:has-text('cpus 1 of loaders')")
    page.wait(".failures pre", "cannot open <b>shard</b>")


def test_timeline_is_painted_and_zoomed(page: Page) -> None:
    page.show("timeline")
    page.tab.select_option("main select", "600")
    canvas = page.wait("canvas[data-painted]:not([data-painted='0'])")
    picture = "canvas => canvas.toDataURL()"
    before = canvas.evaluate(picture)
    page.tab.click("text=Zoom in")
    assert canvas.evaluate(picture) != before
    page.tab.click("button:text-is('All')")
    box = canvas.bounding_box()
    rows = page.tab.evaluate("Number(document.querySelector('canvas').dataset.painted)")
    for row in range(rows):  # the hanging message reaches to the right end of one row
        page.tab.mouse.click(box["x"] + box["width"] * 0.97, box["y"] + 20 + 18 * row + 9)
        if "trainer.hang" in (page.tab.locator("main > pre").text_content() or ""):
            break
    page.wait("main > pre", "trainer.hang")


def test_stacks_are_folded(page: Page) -> None:
    page.show("stacks")
    page.wait(".stacks h3", "gpus 0 of trainers; cpus 1 of loaders (2 processes)")
    page.wait(".stacks pre", "in hang")


def test_logs_are_searched(page: Page) -> None:
    page.show("logs")
    page.wait(".lines div", "hangs")
    page.tab.fill("input[placeholder='text in the line']", "cannot")
    page.wait("main", "1 lines, 0 earlier ones")
    page.wait(".lines .stderr", "cannot open <b>shard</b>")


def test_sql_has_rows_and_errors(page: Page) -> None:
    page.show("sql")
    page.wait("td", "hang")
    page.tab.fill("textarea", "select 6 * 7 as answer")
    page.tab.press("textarea", "Control+Enter")
    page.wait("th", "answer")
    page.wait("td", "42")


def test_wrong_sql_shows_what_is_wrong(page: Page) -> None:
    page.show("sql")
    page.wait("td", "hang")
    page.tab.fill("textarea", "select wrong from actors")
    page.tab.click("button:text-is('Run')")
    page.wait("#problem", "no such column: wrong; actors has the columns")
    page.errors[:] = [each for each in page.errors if "400 (Bad Request)" not in each]


def test_metrics_are_curves(page: Page) -> None:
    page.show("metrics")
    page.wait(".chart h3", "loss (gauge)")
    page.wait(".chart canvas")
    page.wait(".u-legend", "gpus 0 of trainers")
    page.wait(".chart h3", "samples (counter)")


def test_collectives_say_that_there_are_none(page: Page) -> None:
    page.show("collectives")
    page.wait(".collectives", "No collective is in flight.")


def test_page_without_the_token_says_what_to_do(browser: Any, served: dict[str, str]) -> None:
    page = Page(browser, served["address"])
    page.wait("#problem", "the token is missing or wrong")
    page.tab.close()
    assert page.errors and all("401 (Unauthorized)" in each for each in page.errors)


def test_other_site_cannot_read_an_answer(browser: Any, served: dict[str, str]) -> None:
    """A page of another origin gets neither the answer nor an error that it can read."""
    page = browser.new_page()
    page.route("http://evil.example/", lambda route: route.fulfill(body="<p>other site</p>", content_type="text/html"))
    page.goto("http://evil.example/")
    ask = """([url, token]) => fetch(url, {headers: {Authorization: `Bearer ${token}`}})
        .then(() => "read", () => "refused")"""
    assert page.evaluate(ask, [f"{served['address']}api/v1/programs", served["token"]]) == "refused"
    page.close()
