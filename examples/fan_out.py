"""Crawl a web of pages with 16 actors: ten thousand small tasks, whose results are streamed to the program.

    python examples/fan_out.py
    python examples/fan_out.py --pages 2000 --workers 4

The web is generated from a seed. A page is text with links, and pages are found only through links. The crawl goes
breadth first. The program sends each wave of pages to all crawlers. Every crawler fetches its share, by rank, and
yields one page at a time. One fetch in 500 fails. The program fetches such pages again with `choose`, which picks the
crawler with the fewest outstanding calls. At the end it compares the pages found with those of a search without actors.

The example shows:

- `stream` over a generator endpoint: an actor waits while the program has not taken 64 of its pages (back-pressure)
- `choose`
- an exception of an endpoint, which the caller receives as `ActorError`
- a progress bar
"""

import argparse
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from monarch_backend.actor import Actor, ActorError, ActorMesh, current_rank, endpoint, this_host

WORDS = ("actor", "mesh", "rank", "page", "link", "crawl", "stream", "port", "slice", "host", "message", "reply")
LINK = re.compile(r'<a href="/(\d+)">')


# ---- web


class PageError(Exception):
    """The page is not available now. A later attempt may succeed."""


@dataclass(frozen=True)
class Web:
    """Numbered pages. Each page is generated from the seed when it is fetched."""

    pages: int
    seed: int
    one_fails_in: int

    def links(self, page: int) -> list[int]:
        rng = random.Random(f"{self.seed} links {page}")
        return [rng.randrange(self.pages) for _ in range(rng.randint(1, 8))]

    def fetch(self, page: int, attempt: int) -> str:
        """Return the text of a page. One fetch in `one_fails_in` raises PageError."""
        rng = random.Random(f"{self.seed} text {page} {attempt}")
        if rng.randrange(self.one_fails_in) == 0:
            raise PageError(f"page {page} is not available at attempt {attempt}")
        text = rng.choices(WORDS, k=200)
        for link in self.links(page):
            text.insert(rng.randrange(len(text)), f'<a href="/{link}">{rng.choice(WORDS)}</a>')
        return " ".join(text)

    def reachable(self, root: int) -> set[int]:
        """Return the pages reachable from `root`, found by a search in this process."""
        found, wave = {root}, [root]
        while wave:
            wave = list({link for page in wave for link in self.links(page)} - found)
            found.update(wave)
        return found


# ---- actors


class Crawler(Actor):
    def __init__(self, web: Web):
        self.web = web

    @endpoint
    def fetch(self, page: int, attempt: int) -> list[int]:
        """Return the pages that a page links to."""
        return [int(link) for link in LINK.findall(self.web.fetch(page, attempt))]

    @endpoint
    def crawl(self, wave: Sequence[int]) -> Iterator[tuple[int, list[int] | None]]:
        """Yield each page of this actor's share of the wave with its links, or with None if the fetch failed."""
        rank = current_rank()
        for page in wave[rank.rank :: len(rank.extent)]:
            try:
                yield page, self.fetch(page, 0)
            except PageError:
                yield page, None


# ---- main program


def retry(crawlers: ActorMesh, pages: list[int], attempts: int, bar: tqdm) -> Iterator[list[int]]:
    """Fetch failed pages again, all at the same time, each by the crawler with the fewest outstanding calls.

    `attempts` counts all attempts for a page, the first one included.
    """
    for attempt in range(1, attempts):
        fetches = [(page, crawlers.fetch.choose(page, attempt)) for page in pages]
        pages = []
        for page, links in fetches:
            try:
                yield links.get()
            except ActorError as error:
                bar.write(f"again: {error.__cause__}")
                pages.append(page)
    if pages:
        raise RuntimeError(f"{attempts} attempts were not enough for {len(pages)} of the pages, such as {pages[0]}")


def crawl(crawlers: ActorMesh, root: int, attempts: int) -> tuple[set[int], int, int]:
    """Return the pages found from the root, the number of waves and the number of pages whose first fetch failed."""
    found, wave, waves, failures = {root}, [root], 0, 0
    with tqdm(unit="page", smoothing=0) as bar:
        while wave:
            bar.total, waves = len(found), waves + 1
            links, failed = set(), []
            for reply in crawlers.crawl.stream(wave):
                page, targets = reply.get()
                if targets is None:
                    failed.append(page)
                else:
                    links.update(targets)
                    bar.update()
            for targets in retry(crawlers, failed, attempts, bar):
                links.update(targets)
                bar.update()
            failures += len(failed)
            wave = sorted(links - found)
            found.update(wave)
    return found, waves, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=10_200, help="of the web; some cannot be reached (10200)")
    parser.add_argument("--workers", type=int, default=16, help="crawlers, each in a process of its own")
    parser.add_argument("--one-fails-in", type=int, default=500, help="fetches")
    parser.add_argument("--attempts", type=int, default=10, help="for each page")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    web = Web(args.pages, args.seed, args.one_fails_in)
    with this_host().spawn_procs({"workers": args.workers}) as procs:
        crawlers = procs.spawn("crawlers", Crawler, web)
        crawlers.initialized.get()
        start = time.perf_counter()
        found, waves, failures = crawl(crawlers, 0, args.attempts)
        seconds = time.perf_counter() - start
    print(f"{len(found):,} pages in {waves} waves, {seconds:.2f} s: {len(found) / seconds:,.0f} pages/s")
    print(f"{failures} fetches failed and were done again")
    if found != web.reachable(0):
        raise SystemExit("these are not the pages that a search without actors finds")
    print("the same pages as a search without actors finds")


main()
