#!/usr/bin/env python3
"""What an open dashboard costs a server, and how soon it shows, in a real browser beside it.

usage: scripts/bench/dashboard.py [--repeats N]

A training client's requests are timed in blocks, with the page open and closed in turns; the browser runs on
the same machine and takes its share of it. Meanwhile `paint` is the time from the click to the first contents
of the page, and `facts` that until it shows the server's state, while samples and passes run.
Needs chromium. Prints a table and, as its last line, one JSON object: medians in milliseconds, and the ratio.
"""

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serving import options_of, served
from turns import requests, timed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.browser import Page, browser

BLOCK = 15
LOADED_S = 2.0
"""Time to load a page, which is not what an open one costs."""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
FACTS = "document.querySelector('.badge')?.innerText === 'ready'"


def cost(page: Page, url: str, repeats: int) -> dict[str, dict[str, float]]:
    """Time the requests with the page open and closed, in turns."""
    work = requests(url)
    times: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in work}
    for number in range(2 * repeats // BLOCK):
        page.open(f"{url}/" if number % 2 else "about:blank")
        time.sleep(LOADED_S)
        for name, call in work.items():
            call()
            times[name][bool(number % 2)] += [timed(call) for _ in range(BLOCK)]
    found = {}
    print(f"{'':20}{'open ms':>10}{'closed ms':>10}{'ratio':>10}")
    for name, sides in times.items():
        opened, closed = (statistics.median(sides[side]) for side in (True, False))
        print(f"{name:20}{opened:10.2f}{closed:10.2f}{opened / closed:10.3f}")
        found[name] = {
            "open_ms": round(opened, 2),
            "closed_ms": round(closed, 2),
            "ratio": round(opened / closed, 3),
        }
    return found


@contextmanager
def load(works: list[Callable[[], object]]) -> Iterator[None]:
    """Repeat each of them in a thread meanwhile."""
    ended = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        while not ended.is_set():
            work()

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def first_sight(page: Page, url: str) -> dict[str, float]:
    """Open the page ten times while a pass, steps and samples go on."""
    work = requests(url)
    paints, facts = [], []
    with load([work["forward_backward"], work["sample"], work["sample"]]):
        for _ in range(10):
            page.open("about:blank")
            began = time.perf_counter()
            page.open(f"{url}/")
            page.wait(FACTS)
            facts.append(1000 * (time.perf_counter() - began))
            paints.append(float(page.wait(PAINT)))
    found: dict[str, float] = {
        "paint_ms": round(statistics.median(paints)),
        "facts_ms": round(statistics.median(facts)),
    }
    print(f"under load: first paint {found['paint_ms']} ms, facts {found['facts_ms']} ms")
    return found


def main() -> None:
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    parser = options_of(__doc__)
    parser.add_argument("--repeats", type=int, default=90)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as profile,
        served() as (url, _),
        browser(Path(profile)) as chromium,
        chromium.page() as page,
    ):
        report = {**cost(page, url, arguments.repeats), **first_sight(page, url)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
