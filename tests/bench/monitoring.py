"""What it costs to watch a fleet: metrics, history and page on against off, and the page of 64 workers.

The first rows are three fleets that take turns: a broker without Redis, one that reports to Redis with its history, and
one that also has a page with a viewer. Processor time counts of all its processes except the viewer.
The other rows are a fleet of 64 workers that are made up, with a whole day of history in Redis, and its page: the
processor time of page, Redis and the thread that reports. They hold on a busy machine too.

PYTHONPATH=tests python -m bench.run --only monitoring
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.books import redis_server
from bench.pipeline import Fleet
from bench.processes import FLEET_ID, Processes
from bench.table import Row, rows_of
from bench.turns import cpu_s, in_turns
from headrace.broker.redis.client import connect
from headrace.broker.reports.report import MergeScript, Part, Report
from headrace.schemas.accounts.figures import GAUGE_TABLE
from headrace.schemas.accounts.ledger import LedgerRow, Settled, WorkerTotals
from headrace.schemas.accounts.redis_keys import QUANTILES, labelled
from support.browser import CHROMIUM, Browser
from support.dashboards import Dashboard, States

WIDTH = 64
WORKERS = 64
MARKS = {"reports": 0.99, "page": 0.99}
MOST_CPU, MOST_PAINT_MS, MOST_BYTES = 5.0, 1000.0, 8 << 20
_LABELS = {"quantile": QUANTILES, "le": ("0", "1", "2", "4", "8", "16", "32", "64", "+Inf")}
_SETTLE_S = 10.0
_REPORT_S = 0.5


def measure(seconds: float, rounds: int) -> list[Row]:
    """Measure all rows. Each turn lasts `seconds`, and the page is watched for five times as long."""
    return [*_on_and_off(seconds, rounds), *_page(5 * seconds, rounds)]


# -- on against off ---------------------------------------------------------------------------------------------------


def _on_and_off(seconds: float, rounds: int) -> list[Row]:
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(Processes())
        arms = {name: stack.enter_context(_arm(processes, name)) for name in ("off", "reports", "page")}
        turns = in_turns(arms, seconds, rounds)
    return rows_of("monitoring", f"2 workers, {WIDTH} envs each", "env steps/s", turns, "off", MARKS)


@contextlib.contextmanager
def _arm(processes: Processes, name: str) -> Iterator[Any]:
    """Give a fleet that is watched as the arm's name says, with all its processes."""
    with contextlib.ExitStack() as stack:
        folder = processes.folder / name
        url = None if name == "off" else stack.enter_context(redis_server(folder))
        fleet = stack.enter_context(Fleet(WIDTH, processes, redis_url=url))
        if url is not None:
            fleet.pids["redis"] = _server_pid(url)
        if url is None or name != "page":
            yield fleet
            return
        page = stack.enter_context(Dashboard(folder, "--redis-url", url, "--fleet-id", FLEET_ID))
        processes.start(_view, page.address)
        fleet.pids["page"] = page.process.pid
        paused = _Paused(fleet, page.process.pid)
        paused.end()
        try:
            yield paused
        finally:
            paused.begin()


class _Paused:
    """A fleet whose page is stopped between its turns, so that it takes nothing from the others."""

    def __init__(self, fleet: Fleet, page: int) -> None:
        self.pids: Mapping[str, int] = fleet.pids
        self.take = fleet.take
        self._page = page

    def begin(self) -> None:
        """Let the page go on."""
        os.kill(self._page, signal.SIGCONT)

    def end(self) -> None:
        """Stop the page."""
        os.kill(self._page, signal.SIGSTOP)


def _server_pid(url: str) -> int:
    with connect(url, 5.0) as client:
        info: Any = client.info("server")
        return int(info["process_id"])


def _view(address: str) -> None:
    """Read the stream of states, as a browser does."""
    with contextlib.closing(States(address)) as states:
        while states.next() is not None:
            pass


# -- the page of 64 workers -------------------------------------------------------------------------------------------


def _page(seconds: float, rounds: int) -> list[Row]:
    rows = []
    with Processes() as processes, redis_server(processes.folder / "page") as url:
        with connect(url, 5.0) as client:
            _fill_history(client)
        pids = {"redis": _server_pid(url), "reports": processes.start(_report, url)}
        with Dashboard(processes.folder, "--redis-url", url, "--fleet-id", FLEET_ID) as page:
            processes.start(_view, page.address)
            pids["page"] = page.process.pid
            time.sleep(_SETTLE_S)
            shares = _cpu_shares(pids, seconds)
            rows += [
                _row("a viewer looks", name, "% of a core", [100 * share], MOST_CPU) for name, share in shares.items()
            ]
            if CHROMIUM is not None:
                paints = _paints(page.address, processes.folder, rounds)
                rows.append(_row("first paint, with numbers", "browser", "ms", paints, MOST_PAINT_MS))
        with connect(url, 5.0) as client:
            kept = sum(client.memory_usage(name) or 0 for name in client.scan_iter(match=f"headrace:{{{FLEET_ID}}}:*"))
        rows.append(_row("keys in Redis", "redis", "KiB", [kept / 1024], MOST_BYTES / 1024))
    return rows


def _row(case: str, arm: str, unit: str, values: list[float], most: float) -> Row:
    ratios = [value / most for value in values]
    ends = (statistics.median(ratios), min(ratios), max(ratios))
    return Row("monitoring", f"{case}, {WORKERS} workers", arm, unit, statistics.median(values), *ends, most=1.0)


def _cpu_shares(pids: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Return the processor time per second of each process."""
    before, began = {name: cpu_s([pid]) for name, pid in pids.items()}, time.perf_counter()
    time.sleep(seconds)
    passed_s = time.perf_counter() - began
    return {name: (cpu_s([pid]) - before[name]) / passed_s for name, pid in pids.items()}


def _paints(address: str, folder: Path, rounds: int) -> list[float]:
    """Return ms from each navigation to the first numbers on the page. The first time the cache is empty."""
    with Browser(folder / "profile") as browser:
        found = []
        for _ in range(rounds):
            browser.open("about:blank")
            browser.open(address)
            found.append(float(browser.ask(_FIRST_NUMBERS)))
    return found


_FIRST_NUMBERS = """
new Promise((done) => {
  const look = () => document.querySelector('#tiles dd') ? requestAnimationFrame(() => done(performance.now()))
    : setTimeout(look, 2);
  look();
})
"""


def _fill_history(client: Any) -> None:
    """Write a day of history: an entry each minute, and each 5 s in the last hour."""
    now = time.time()
    clock = _Clock(now - 86400)
    merge = MergeScript(client, FLEET_ID, clock=clock)
    while clock.now < now - 60:
        clock.now += 5.0 if clock.now >= now - 3600 else 60.0
        merge(Part(Report(gauges=_gauges())), [], 0)


class _Clock:
    """A clock that is set by hand."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def _report(url: str) -> None:
    """Report twice a second what 64 workers do, as a broker does."""
    with connect(url, 5.0) as client:
        merge = MergeScript(client, FLEET_ID)
        batches = 1
        while True:
            began = time.monotonic()
            batches += 1
            slots = range(WORKERS)
            report = Report(
                rows=[_books(slot, batches) for slot in slots],
                gauges=_gauges(),
                workers={slot: _told(slot) for slot in slots},
                incarnations=dict.fromkeys(slots, 1),
                lease={"epoch": 1, "connected": 1, "since_unix_s": began, "committed_unix_s": time.time()},
            )
            merge(Part(report), [], 0)
            time.sleep(max(0.0, _REPORT_S - (time.monotonic() - began)))


def _gauges() -> dict[str, float]:
    fields = (
        labelled(metric.name, metric.label, value) if metric.label else metric.name
        for metric in GAUGE_TABLE
        for value in (_LABELS.get(metric.label, ("a", "b", "c", "d")) if metric.label else ("",))
    )
    return {name: random.uniform(1.0, 1e5) for name in fields} | {"unix_s": time.time()}


def _told(slot: int) -> dict[str, Any]:
    shares = dict.fromkeys(("env", "inference", "connectors", "serialise", "wait", "other"), random.random())
    text: dict[str, Any] = {"incarnation": 1, "host": "mock", "pid": 1000 + slot, "blocked": "", "num_envs": 64}
    numbers = ("env_steps", "env_steps_per_s", "episodes", "array_bytes", "sent_bytes", "weights_behind", "accepted")
    return {**text, **{name: random.uniform(0, 1e6) for name in numbers}, "unix_s": time.time(), "time_share": shares}


def _books(slot: int, batches: int) -> LedgerRow:
    steps = 64 * batches
    totals = WorkerTotals(
        seq=batches, stepped=steps, shipped=steps, shipped_chunks=batches, env_steps=steps, episodes=batches
    )
    settled = Settled(seq=batches, committed=(steps, batches))
    return LedgerRow(slot=slot, incarnation=1, totals=totals, accepted=(steps, batches), held=(0, 0), settled=settled)
