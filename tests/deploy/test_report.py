"""The page that `headrace report` makes of rows. `test_watched_run.py` tests it with a real run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.monitoring.report.line_chart import MOST_DRAWN_MARKS, MOST_POINTS, Chart, Curve, chart_html
from headrace.deploy.monitoring.report.report_command import write_report
from headrace.deploy.monitoring.report.run_series import RunSeries
from headrace.deploy.report.run_rows import fleet_row, history_row
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.errors import RunDirError
from support.html_pages import Page, assert_needs_nothing

HOSTILE = "<script>alert(1)</script>"


def test_a_report_of_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"no fleet\.json"):
        write_report(tmp_path, None, None, None)
    assert list(tmp_path.iterdir()) == []


def files(run_dir: Path, **contents: Any) -> None:
    """Write the files of a run whose Redis is gone: fleet.json, and others by name."""
    page = {"fleet_id": HOSTILE, "state": "running", "started": 1000.0, "processes": []}
    for name, content in {"fleet": page, **contents}.items():
        (run_dir / f"{name}.json").write_bytes(content if isinstance(content, bytes) else orjson.dumps(content))


def reported(run_dir: Path) -> tuple[Page, dict[str, Any]]:
    write_report(run_dir, run_dir / "a.html", None, run_dir / "a.json")
    page = Page((run_dir / "a.html").read_text())
    assert_needs_nothing(page)
    return page, orjson.loads((run_dir / "a.json").read_bytes())


GROUP = {"kind": "env_exception", "exception": "ValueError", "message": HOSTILE, "where": "e.py:3", "count": 12}


def test_the_report_of_an_ended_run_without_redis_has_its_failures_and_its_end(tmp_path: Path) -> None:
    groups = [{**GROUP, "last_unix_s": 5.0}, {**GROUP, "last_unix_s": 9.0, "traceback": f"\x1b[2J{HOSTILE}\nline 2"}]
    ledger = {
        "stepped": 100,
        "committed": [60, 6],
        "queued": 0,
        "dropped": {"stale": [30, 3]},
        "discarded": {"reset": 10},
    }
    ended = {"state": "ended", "ended_unix_s": 1060.0, "ledger": ledger, "balanced": True, "errors": groups}
    files(tmp_path, summary={**ended, "error": "the env raised", "restarts": {"worker": 2}, "processes": []})
    page, facts = reported(tmp_path)
    assert facts["state"] == "ended"
    assert facts["verdict"].endswith(
        "with an error: the env raised. 40 of 100 agent steps (40 %) did not reach the learner, each with its reason."
    )
    assert [group["last_unix_s"] for group in facts["errors"]] == [9.0, 5.0]
    assert f"\\x1b[2J{HOSTILE}\nline 2" in page.texts
    assert {"dropped: stale", "discarded: reset", f"ValueError: {HOSTILE}"} <= set(page.texts)
    assert facts["restarts"] == {"worker": 2}


def test_the_report_of_a_run_with_a_killed_supervisor_is_made_from_its_rows(tmp_path: Path) -> None:
    books = {"agent_steps": 100, "committed_steps": 60, "queued_steps": 30, "discarded_steps/worker_killed": 10}
    last = row(1010.0, 10.0, **books)
    (tmp_path / "metrics.jsonl").write_bytes(orjson.dumps(last) + b'\n{"kind": "fleet", "ti')
    files(tmp_path, summary={"state": "running", "versions": {"python": HOSTILE}})
    page, facts = reported(tmp_path)
    assert facts["state"] == "killed"
    assert facts["verdict"].startswith("Its supervisor was killed after about 10 s")
    assert facts["ledger"]["discarded"] == {"worker_killed": 10}
    assert facts["audit"]["balanced"] is None
    assert HOSTILE in page.texts


WRONG_TYPES = {
    **{"state": "ended", "ledger": {"stepped": "x"}, "errors": 7, "restarts": {"x": "y"}, "versions": 3},
    "machine": {"memory_bytes": "x"},
}


@pytest.mark.parametrize("garbage", [b"", b"[]", b"{", orjson.dumps(WRONG_TYPES)])
def test_a_report_leaves_out_only_the_content_of_damaged_files(garbage: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(garbage + b"\n")
    (tmp_path / "evaluations.jsonl").write_bytes(garbage + b"\n")
    files(tmp_path, summary=garbage, settings=garbage, config=garbage)
    page, facts = reported(tmp_path)
    assert facts["fleet_id"] == HOSTILE
    assert facts["ledger"] is None
    assert "The books are not known." in facts["verdict"]
    assert page.named("h2")


def row(unix_s: float, elapsed_s: float, **columns: Any) -> dict[str, Any]:
    return {"kind": "fleet", "time": unix_s, "elapsed_s": elapsed_s, "env_steps": 10, "learner_epoch": 1, **columns}


def test_time_without_a_fleet_does_not_count_and_changes_are_marked() -> None:
    series = RunSeries(
        [
            row(1000.0, 10.0, x=1.0),
            row(1020.0, 30.0, x=2.0, **{"restarts/worker": 1}),
            row(9000.0, 5.0, x=3.0),
            row(9010.0, 15.0, x=4.0, learner_epoch=2, **{"restarts/worker": 1}),
            row(9310.0, 20.0, x=5.0),  # the clock was set
        ]
    )
    assert series.points("x") == [(10.0, 1.0), (30.0, 2.0), (35.0, 3.0), (45.0, 4.0), (50.0, 5.0)]
    assert series.runs == 2
    said = [
        (30.0, "worker restarted"),
        (30.0, "the run goes on"),
        (45.0, "learner epoch 2"),
        (45.0, "worker restarted"),
    ]
    assert series.marks[:4] == said


def test_row_values_that_are_no_numbers_are_no_points() -> None:
    garbage = [{}, {"time": "x", "elapsed_s": 1.0}, row(1.0, 1.0, x="text", y=True, z=[1], w=10**400, v=float("nan"))]
    series = RunSeries([*garbage, *({"kind": "fleet", "time": 2.0, "elapsed_s": 2.0, f"c{n}": 1} for n in range(2000))])
    assert all(not series.points(name) for name in "xyzwv")
    assert len(series.columns) == 1000


def test_a_chart_of_many_points_is_small_and_keeps_its_range() -> None:
    points = [(float(n), float(n % 7)) for n in range(100_000)]
    html = chart_html(Chart(f"{HOSTILE} chart", "", [Curve(HOSTILE, points)], [(5.0, HOSTILE)], 100_000.0))
    page = Page(html)
    assert len(html) < 100_000
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.elements}
    places = [tuple(map(float, one.split(","))) for one in str(page.named("polyline")[0]["points"]).split()]
    assert len(places) <= MOST_POINTS
    assert places == sorted(places)
    assert "from 0 to 6" in str(page.named("svg")[0]["aria-label"])


@pytest.mark.parametrize("value", [0.3, -7.5, 475.0, 1e-5, 0.0])
def test_a_curve_that_is_constant_but_for_rounding_has_an_axis_of_its_size(value: float) -> None:
    points = [(float(n), value * (1 + n % 3 * 1e-16)) for n in range(9)]
    html = chart_html(Chart("x", "", [Curve("x", points)], end_s=9.0))
    page = Page(html)
    heights = {float(point.split(",")[1]) for point in str(page.named("polyline")[0]["points"]).split()}
    assert max(heights) - min(heights) <= 0.1, "the line is flat"
    ticks = re.findall(r'text-anchor="end">([-0-9.e]+)<', html)
    assert len(ticks) == len(set(ticks)) >= 3, ticks
    assert max(abs(float(tick)) for tick in ticks) <= 2 * abs(value) or value == 0.0


def test_a_curve_that_varies_by_a_percent_keeps_its_shape() -> None:
    page = Page(chart_html(Chart("x", "", [Curve("x", [(0.0, 495.0), (9.0, 500.0)])], end_s=9.0)))
    low, high = (float(point.split(",")[1]) for point in str(page.named("polyline")[0]["points"]).split())
    assert abs(low - high) > 100


def test_a_chart_tells_env_steps_along_its_time() -> None:
    steps = [(0.5, 0.0), (3.0, 1500.0), (9.0, 45_000.0)]
    page = Page(chart_html(Chart("x", "", [Curve("x", [(0.0, 1.0), (6.0, 2.0), (9.0, 4.0)])], end_s=9.0, steps=steps)))
    along = [said for said in page.texts if said in ("1,500", "45k env steps")]
    assert along == ["1,500", "1,500", "45k env steps"], "none is known at 0 s"
    assert "6 s (1,500 env steps): 2" in page.texts
    assert "9 s (45k env steps)" in page.texts, "the table"


def test_many_marks_of_a_chart_are_few_lines_which_name_the_first_of_each() -> None:
    marks = [(float(at), f"change {at}") for at in range(1000)]
    page = Page(chart_html(Chart("x", "", [Curve("x", [(0.0, 1.0), (999.0, 2.0)])], marks, 1000.0)))
    drawn = [line for line in page.named("line") if line["class"] == "mark"]
    assert len(drawn) == MOST_DRAWN_MARKS
    titles = [said for said in page.texts if ": change " in said]
    assert titles[:2] == ["0 s: change 0, and 24 more", "25 s: change 25, and 24 more"]


def test_the_report_of_a_long_run_with_all_figures_it_may_have_is_smaller_than_2_mb(tmp_path: Path) -> None:
    def at(second: int) -> list[dict[str, Any]]:
        values = dict.fromkeys(columns, second * 1.0001)
        names = {f"learner/{'x' * 90}_{n}": second / 7 for n in range(40)}
        learned = {"kind": "learner", "time": second + 0.5, "elapsed_s": second + 0.5, "env_steps": second, **names}
        return [row(float(second), float(second), **values, **{"restarts/worker": second}), learned]

    columns = [f"{name}_{end}" for name in ("episode_return", "episode_len") for end in ("mean", "p25", "p50", "p75")]
    columns += ["env_steps_per_s", "weights_lag", "held_batches", "workers", "workers_blocked", "aborted_return_mean"]
    columns += [f"{name}_lag_{end}" for name in ("accepted", "consumed") for end in ("p50", "p95")]
    columns += ["clients", "client_requests_per_s", "client_latency_s_p50", "client_latency_s_p95"]
    columns += [f"{name}_time/{part}" for name in ("worker", "learner") for part in "abcdef"]
    columns += [f"dropped_steps/{n}" for n in range(12)] + [f"callbacks/{'y' * 90}_{n}" for n in range(60)]
    columns += [f"policies/{'z' * 90}_{n}/return_mean" for n in range(20)]
    lines = [orjson.dumps(one) for second in range(250) for one in at(second)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b""]))
    groups = [{**GROUP, "where": f"e.py:{n}", "message": "m" * 500, "traceback": "x\n" * 2048} for n in range(101)]
    ledger = {"stepped": 1, "committed": [1, 1], "queued": 0, "dropped": {}, "discarded": {}}
    files(tmp_path, summary={"state": "ended", "ledger": ledger, "balanced": True, "errors": groups})
    page, facts = reported(tmp_path)
    assert len(page.named("figure")) > 55
    assert len(facts["marks"]) > 200
    assert len(facts["errors"]) == 101
    assert (tmp_path / "a.html").stat().st_size < 2_000_000


def lags(**counts: float) -> dict[str, float]:
    bounds = {"le0": "0", "le1": "1", "le2": "2", "inf": "+Inf", "junk": "x"}
    return {labelled("accepted_lag_agent_steps_bucket", "le", bounds[name]): n for name, n in counts.items()}


def test_rows_have_the_lag_of_the_time_since_the_row_before() -> None:
    before = lags(le0=100, le1=100, le2=100, inf=100)
    after = lags(le0=110, le1=180, le2=198, inf=200, junk=7)

    def lag(gauges: dict[str, float], before: dict[str, float]) -> tuple[Any, Any]:
        made = fleet_row(Snapshot(gauges=gauges), {}, 1.0, 1.0, before)
        return made.get("accepted_lag_p50"), made.get("accepted_lag_p95")

    assert lag(after, before) == (1.0, 2.0)
    assert lag(after, {}) == (0.0, 2.0)
    assert lag(lags(le0=1, le1=1, le2=1, inf=9), after) == (64.0, 64.0)  # a broker that has started since
    assert lag(after, after) == (None, None)
    assert lag({}, {}) == (None, None)


def test_a_row_has_only_values_that_the_broker_reports() -> None:
    told = {
        labelled("episode_return_quantile", "quantile", "0.25"): 3.0,
        labelled("worker_time_share", "part", "env"): 0.75,
        labelled("workers_blocked", "reason", "window"): 2.0,
        labelled("workers_blocked", "reason", "weights"): 1.0,
        labelled("discarded_agent_steps_total", "reason", "shutdown"): 5.0,
        "aborted_return_mean": 1.0,
        "aborted_window": 0.0,
        "env_steps_total": 70.0,
    }
    made = history_row(100.0, told, 90.0, {})
    assert made["elapsed_s"] == 10.0
    assert (made["env_steps"], made["discarded_steps"], made["discarded_steps/shutdown"]) == (70, 5, 5)
    assert (made["episode_return_p25"], made["worker_time/env"], made["workers_blocked"]) == (3.0, 0.75, 3.0)
    assert "aborted_return_mean" not in made
    assert "held_bytes" not in made
