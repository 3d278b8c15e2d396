"""The report of a run in a real browser: it asks for nothing, fits a phone, and has curves and the ledger's numbers."""

from __future__ import annotations

import csv
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.annexes.watch.report.report_command import write_report
from support.browser import Browser, needs_chromium
from support.fleets.running_fleet import RunningFleet

pytestmark = [pytest.mark.browser, needs_chromium]

THEMES = ("light", "dark")
TABLES = """
Object.fromEntries([...document.querySelectorAll('table')].map((one) => [one.caption.textContent,
  [...one.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent))]))
"""
TILES = "Object.fromEntries([...document.querySelectorAll('.tiles li')].map((one) => [one.children[0], one.children[1]]"
TILES += ".map((part) => part.textContent)))"
TOO_WIDE = """
[...document.querySelectorAll('main *')].filter((one) => !one.closest('.scroll, details, pre')
  && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML.slice(0, 99))
"""
"""Parts of the page that a reader would have to scroll to."""
WATCH = "window.built = {}; window.Real = uPlot; uPlot = function (options, rows, box) {"
WATCH += " const plot = new Real(options, rows, box); built[box.parentElement.querySelector('h3').textContent] = plot;"
WATCH += " return plot; }; Charts.restyle(); 0"
"""Keep each plot by the title of its chart, from now on."""
COLOURS = """
(title) => { const { ctx } = built[title], { width, height } = ctx.canvas, found = new Set();
  const { data } = ctx.getImageData(0, 0, width, height);
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) found.add([...data.slice(i, i + 3)].join());
  return found; }
"""


def shown(page: Path, profile: Path, folder: Path | None = None, *, themes: Iterable[str] = THEMES) -> dict[str, Any]:
    """Open a report on a desk and on a phone. Return its tables and tiles; leave pictures in `folder`."""
    found: list[Any] = []
    assert page.stat().st_size < 2_000_000
    for theme in themes:
        with Browser(profile / theme, dark=theme == "dark") as browser:
            browser.open(page.as_uri())
            for width, height in ((1440, 900), (390, 844)):
                browser.resize(width, height)
                browser.wait(
                    f"innerWidth === {width} && document.readyState === 'complete' && document.title.length > 9"
                )
                assert browser.ask("document.documentElement.scrollWidth") <= width
                assert browser.ask(TOO_WIDE) == []
                assert browser.ask("document.querySelector('h1').getBoundingClientRect().height") > 10
                found.append({"tables": browser.ask(TABLES), "tiles": browser.ask(TILES)})
                if folder is not None:
                    browser.picture(folder / f"{page.stem}-{width}-{theme}.png")
            assert browser.problems == []
            assert {url for url in browser.requests if url != "about:blank"} == {page.as_uri()}
    assert all(one == found[0] for one in found)
    return dict(found[0])


def books_of(tables: dict[str, list[list[str]]]) -> tuple[int, dict[str, int]]:
    """Return the steps of the ledger on the page, and what became of them."""
    (title,) = (name for name in tables if name.startswith("what became of "))
    return number(title.split()[3]), {name: number(steps) for name, _, steps, _ in tables[title]}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def as_on_page(ledger: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Return the books of `headrace up --json` as `books_of` does."""
    flow = {"committed": ledger["committed"][0], "queued": ledger["queued"]}
    flow |= {f"dropped: {reason}": steps for reason, (steps, _) in ledger["dropped"].items()}
    return ledger["stepped"], flow | {f"discarded: {reason}": steps for reason, steps in ledger["discarded"].items()}


@pytest.mark.processes
def test_a_report_opens_in_a_browser_without_a_request_and_has_the_numbers_of_the_ledger(tmp_path: Path) -> None:
    run_dir = tmp_path / ("a-run-with-a-long-name-" * 8)
    run_dir.mkdir()
    ledger = {
        **{"stepped": 1_234_567, "committed": [1_233_000, 9000], "queued": 7},
        **{"dropped": {"worker_killed": [1000, 9]}, "discarded": {"worker_killed": 500, "env_exception": 60}},
    }
    rows = [
        {
            **{"kind": "fleet", "time": 1000.0 + at, "elapsed_s": float(at), "env_steps": at * 100},
            **{"episode_return_mean": at**0.5, "restarts/worker": at // 40, "env_steps_per_s": 100.0},
            **{"env_steps": 100 * at, "policies/" + "a" * 90 + "/return_mean": 1.0 * at, "learner/loss": 1 / (1 + at)},
        }
        for at in range(100)
    ]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    told = {"state": "ended", "ended_unix_s": 1100.0, "ledger": ledger, "balanced": True, "restarts": {"worker": 2}}
    failures = {
        "kind": "env_exception",
        "message": "<img src=http://example.org/x> " * 8,
        "where": "e.py:3",
        "count": 60,
    }
    (run_dir / "summary.json").write_bytes(orjson.dumps({**told, "errors": [failures], "env_steps": 1_234_567}))
    page = {"fleet_id": "<script>alert(1)</script>", "state": "stopped", "started": 1000.0, "processes": []}
    (run_dir / "fleet.json").write_bytes(orjson.dumps(page))
    write_report(run_dir, None, None, None)
    seen = shown(run_dir / "report.html", tmp_path, themes=["dark"])
    assert books_of(seen["tables"]) == as_on_page(ledger)
    assert (seen["tiles"]["Env steps"], seen["tiles"]["Agent steps lost"], seen["tiles"]["Restarts"]) == (
        *("1,234,567", "1,560", "2"),
    )


def test_a_report_draws_curves_over_time_and_env_steps(tmp_path: Path) -> None:
    rows = [
        {
            **{"kind": "fleet", "time": 1000.0 + at, "elapsed_s": float(at), "env_steps": at * 100},
            **{"env_steps_per_s": 475.0 * (1 + at % 3 * 1e-4), "restarts/worker": at // 40},
            **{f"policies/p{n}/return_mean": n + at / 100 for n in range(4)},
            **{"episode_return_mean": None, "held_batches": 7 if at == 50 else "NaN"},
        }
        for at in range(10, 100, 10)
    ]
    learned = [{**one, "kind": "learner", "elapsed_s": one["elapsed_s"] + 5, "learner/loss": 0.1} for one in rows]
    lines = [orjson.dumps(one) for pair in zip(rows, learned, strict=True) for one in pair]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b'{"kind": "fleet", "time": NaN}', b""]))
    _report(tmp_path)
    titles = ["Mean return by policy", "Throughput, steps/s", "Queue, batches", "learner: loss"]
    with Browser(tmp_path / "profile") as browser:
        browser.open((tmp_path / "report.html").as_uri())
        browser.wait("document.querySelectorAll('#charts canvas').length === 4")
        browser.ask(WATCH)
        browser.wait("Object.keys(built).length === 4")
        assert browser.ask("[...document.querySelectorAll('#charts h3')].map((one) => one.textContent)") == titles
        assert browser.ask("built['learner: loss'].axes[0].values(null, [0, 90])") == ["0 s", "1 min 30 s"]
        assert browser.ask("built['learner: loss'].scales.x.max") == 95.0
        lines_of = "built['Mean return by policy'].series.slice(1).map((one) => one.stroke())"
        hues = browser.ask(lines_of)
        assert len(set(hues)) == 4, "each policy has its colour"
        drawn = browser.ask(f"[...({COLOURS})('Mean return by policy')]")
        assert {_rgb(hue) for hue in hues} <= set(drawn)
        assert browser.text("#charts figcaption").startswith("p0 0.9p1 1.9")
        for title in titles[1:]:
            hue = browser.ask(f"built['{title}'].series[1].stroke()")
            assert _rgb(hue) in browser.ask(f"[...({COLOURS})('{title}')]"), title
        low, high = (browser.ask(f"built['{titles[1]}'].scales.y.{end}") for end in ("min", "max"))
        assert 0.1 * 475 < high - low < 0.3 * 475, "no axis of rounding errors"
        assert browser.text("#charts figure:nth-child(3) figcaption") == "held by the broker 7", "its newest value"
        browser.ask("built = {}; document.querySelector('[data-axis=steps]').click()")
        browser.wait("Object.keys(built).length === 4")
        assert browser.ask("built['learner: loss'].scales.x.max") == 9000
        assert browser.ask("document.querySelector('[data-axis=steps]').getAttribute('aria-pressed')") == "true"
        assert "worker restarted" in browser.text("details")
        assert browser.problems == []


def test_a_report_draws_no_line_from_one_start_of_the_fleet_to_the_next(tmp_path: Path) -> None:
    def at(start: float, second: float, **columns: float) -> dict[str, Any]:
        about = {"kind": "fleet", "time": start + second, "elapsed_s": second, "env_steps": start / 100 + second}
        return {**about, "env_steps_per_s": 1.0, **columns}

    rows = [at(1000.0, 1.0, held_batches=1.0), at(1000.0, 2.0), at(1000.0, 3.0, held_batches=3.0), at(1000.0, 4.0)]
    rows += [at(9000.0, 1.0), at(9000.0, 2.0, held_batches=5.0)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    _report(tmp_path)
    with Browser(tmp_path / "profile") as browser:
        browser.open((tmp_path / "report.html").as_uri())
        browser.wait("document.querySelectorAll('#charts canvas').length === 2")
        browser.ask(WATCH)
        browser.wait("built['Queue, batches'] && built['Queue, batches'].series[1]._paths")
        gaps = "built['Queue, batches'].series[1]._paths.gaps"
        (gap,) = browser.ask(f"{gaps}.map((gap) => gap.map((x) => built['Queue, batches'].posToVal(x, 'x', true)))")
        assert gap == pytest.approx([3.0, 6.0], abs=0.1), "from its last value to its first one after the start"
        assert browser.ask("built['Throughput, steps/s'].series[1]._paths.gaps.length") == 1
        dots = "built['Queue, batches'].series[1].points.filter(built['Queue, batches'], 1, false)"
        assert browser.ask(dots) == [6], "a value without a neighbour is a dot"
        assert browser.problems == []


def test_a_report_without_rows_opens(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    _report(tmp_path)
    with Browser(tmp_path / "profile") as browser:
        browser.open((tmp_path / "report.html").as_uri())
        browser.wait("document.readyState === 'complete' && document.title.length > 9")
        assert "There are no rows yet" in browser.text("main")
        assert browser.problems == []


def _report(run_dir: Path) -> None:
    page = {"fleet_id": "x", "state": "stopped", "started": 1000.0, "processes": []}
    (run_dir / "fleet.json").write_bytes(orjson.dumps(page))
    write_report(run_dir, None, None, None)


def _rgb(hue: str) -> str:
    return ",".join(str(int(hue[at : at + 2], 16)) for at in (1, 3, 5))


@pytest.mark.slow
@pytest.mark.thorough
def test_reports_of_a_run_with_kills_during_it_and_after_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    options = ("--env", "support.envs.fleet:three_of_eight", "--no-check-env", "--workers", "2", "--num-envs", "8")
    options += ("--set", "logging.interval_s=0.3", "--set", "learner.steps_per_update=256")
    with RunningFleet(run_dir, *options) as fleet:
        for role in ("worker", "broker", "learner", "worker"):
            before = fleet.steps()
            fleet.wait_until(lambda least=before: fleet.steps() > least + 300, "steps")  # type: ignore[misc]
            fleet.send(signal.SIGKILL, role)
        fleet.wait_until(lambda: '"restarts/learner":' in (run_dir / "metrics.jsonl").read_text(), "the restarts")
        names = {kind: tmp_path / f"during.{kind}" for kind in ("html", "csv", "json")}
        write_report(run_dir, names["html"], names["csv"], names["json"])
        facts = orjson.loads(names["json"].read_bytes())
        assert facts["state"] == "running"
        seen = shown(names["html"], tmp_path / "during", tmp_path)
        assert books_of(seen["tables"])[0] == facts["ledger"]["stepped"] == number(seen["tiles"]["Env steps"]) > 0
        assert same_series(names["csv"], facts["series"], grows=True) > 10
        fleet.terminate()
        result = fleet.finish()
        books = fleet.audited()
    names = {kind: tmp_path / f"after.{kind}" for kind in ("html", "csv", "json")}
    write_report(run_dir, names["html"], names["csv"], names["json"])
    seen = shown(names["html"], tmp_path / "after", tmp_path)
    assert books_of(seen["tables"]) == as_on_page(result["ledger"])
    assert sum(books_of(seen["tables"])[1].values()) == result["ledger"]["stepped"]
    assert books["ledger"]["stepped"] == result["ledger"]["stepped"]
    assert number(seen["tiles"]["Env steps"]) == result["env_steps"]
    assert number(seen["tiles"]["Restarts"]) == sum(result["restarts"].values()) >= 4
    facts = orjson.loads(names["json"].read_bytes())
    assert same_series(names["csv"], facts["series"]) > 30
    assert {mark["what"] for mark in facts["marks"]} >= {"broker restarted", "learner restarted", "worker restarted"}


SHARED = {"env_steps", "agent_steps", "learner_epoch", "weights_seq", "committed_steps_per_s"}
"""Columns in rows of the fleet and of the learner, and a rate, which no row has. A curve has no point for a row that is
older than the one before.
"""


def same_series(table: Path, series: dict[str, Any], *, grows: bool = False) -> int:
    """Compare each column of the CSV with the same curve of the JSON, which may have fewer rows if the run goes on.

    Return how many there are.
    """
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name, curve in series.items():
        if name not in SHARED:
            values = [float(row[name]) for row in rows if row[name]]
            assert (values[: len(curve["value"])] if grows else values) == curve["value"], name
    return len(series)
