"""The page that `headrace report` makes of rows. `test_watched_run.py` tests it with a real run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.annexes.watch.report.report_command import write_report
from headrace.deploy.annexes.watch.report.run_series import MOST_DRAWN, RunSeries
from headrace.deploy.annexes.watch.state.shown_figures import PAGE_CHARTS, REPORT_CHARTS
from headrace.deploy.report.run_rows import fleet_row
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.redis_keys import labelled
from headrace.schemas.errors import RunDirError
from support.html_pages import Page, assert_needs_nothing, charts_of

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
    groups.append({**GROUP, "where": "f.py:1", "last_unix_s": 3.0, "tasks": ["a", HOSTILE]})
    ledger = {
        "stepped": 100,
        "committed": [60, 6],
        "queued": 0,
        "dropped": {"stale": [30, 3]},
        "discarded": {"reset": 10},
    }
    ended = {"state": "ended", "ended_unix_s": 1060.0, "ledger": ledger, "balanced": True, "errors": groups}
    tasks: dict[str, Any] = {f"{HOSTILE} 10": {"episodes": 5, "env_failures": 0, "return_mean": 0.9131}}
    tasks |= {f"{HOSTILE} 2": {"episodes": 1234, "env_failures": 7, "last_unix_s": 9.0}, "garbage": 3}
    groups = {"record": {"on_slow": "wait", "lag_steps": 4321, "program": "/rec.py", "pid": 7}, "watch": 3}
    ended |= {"error": "the env raised", "restarts": {"worker": 2}, "processes": [], "tasks": tasks, "groups": groups}
    files(tmp_path, summary=ended)
    page, facts = reported(tmp_path)
    assert facts["state"] == "ended"
    assert facts["verdict"].endswith(
        "with an error: the env raised. 40 of 100 agent steps (40 %) did not reach the learner, each with its reason."
    )
    assert [group["last_unix_s"] for group in facts["errors"]] == [9.0, 5.0, 3.0]
    assert f"\\x1b[2J{HOSTILE}\nline 2" in page.texts
    assert {"dropped: stale", "discarded: reset", f"ValueError: {HOSTILE}"} <= set(page.texts)
    assert facts["restarts"] == {"worker": 2}
    assert [(one["task"], one["env_failures"]) for one in facts["tasks"]] == [(f"{HOSTILE} 2", 7), (f"{HOSTILE} 10", 0)]
    assert [one["group"] for one in facts["groups"]] == ["record"]
    assert {
        "4,321",
        "/rec.py, pid 7 on ",
        f"{HOSTILE} 2",
        "0.913",
        "1,234",
        f"ValueError: {HOSTILE}; task {HOSTILE}",
    } <= set(page.texts)


def test_the_report_of_a_run_with_a_killed_supervisor_is_made_from_its_rows(tmp_path: Path) -> None:
    books = {"agent_steps": 100, "committed_steps": 60, "queued_steps": 30, "discarded_steps/worker_killed": 10}
    last = row(1010.0, 10.0, **books)
    (tmp_path / "metrics.jsonl").write_bytes(orjson.dumps(last) + b'\n{"kind": "fleet", "ti')
    files(tmp_path, summary={"state": "running", "versions": {"python": HOSTILE}})
    page, facts = reported(tmp_path)
    assert facts["state"] == "killed"
    assert facts["verdict"].startswith("Its supervisor was killed after about 10 s, or could not note its end")
    assert facts["verdict"].endswith("with its reason. 30 agent steps still queued.")
    assert facts["ledger"]["discarded"] == {"worker_killed": 10}
    assert facts["audit"]["balanced"] is None
    assert HOSTILE in page.texts


@pytest.mark.parametrize("garbage", [b"", b"{"])
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
    assert series.columns["x"].points() == [(10.0, 1.0), (30.0, 2.0), (35.0, 3.0), (45.0, 4.0), (50.0, 5.0)]
    assert series.starts == [0.0, 30.0]
    said = [
        (30.0, "worker restarted"),
        (30.0, "the run goes on"),
        (45.0, "learner epoch 2"),
        (45.0, "worker restarted"),
    ]
    assert series.marks[:4] == said


def test_row_values_that_are_no_numbers_are_no_points() -> None:
    garbage = [{}, {"time": "x", "elapsed_s": 1.0}, row(1.0, 1.0, x="text", y=True, z=[1], v=float("nan"))]
    series = RunSeries([*garbage, *({"kind": "fleet", "time": 2.0, "elapsed_s": 2.0, f"c{n}": 1} for n in range(2000))])
    assert not {*"xyzv"} & series.columns.keys()
    assert len(series.columns) == 1000


def test_of_many_rows_the_means_of_neighbours_are_drawn() -> None:
    rows = [row(1000.0 + n, float(n), x=n % 7, **({"y": 2.5} if n % 1000 == 0 else {})) for n in range(10_000)]
    times, curves = RunSeries(rows).drawn(["x", "y"])
    assert len(times) == MOST_DRAWN
    assert times == sorted(times)
    assert all(value is not None and 2.5 < value < 3.5 for value in curves["x"])
    assert {value for value in curves["y"] if value is not None} == {2.5}
    assert sum(value is not None for value in curves["y"]) == 10, "no value where the column has none"


def test_few_rows_are_drawn_as_they_are() -> None:
    learned = {"kind": "learner", "time": 1002.5, "elapsed_s": 2.5, "loss": 0.1}
    series = RunSeries([row(1002.0, 2.0, x=None), learned, row(1003.0, 3.0, x=4.0)])
    assert series.drawn(["x", "loss"]) == ([2.5, 3.0], {"x": [None, 4.0], "loss": [0.1, None]})
    assert RunSeries([row(1000.0, 7.0, x=0.0)]).drawn(["x"]) == ([7.0], {"x": [0.0]})


def test_workers_that_wait_no_longer_are_drawn_as_0() -> None:
    waits = {"workers_blocked": 2, "workers_blocked/window": 2}
    series = RunSeries([row(1000.0 + n, float(n), **told) for n, told in enumerate(({}, waits, {}, {}))])
    assert series.drawn([*waits])[1] == {name: [2.0, 0.0, 0.0] for name in waits}


def test_the_report_draws_the_rate_of_committed_steps_and_no_count_among_rates(tmp_path: Path) -> None:
    told = [(10.0, 100), (20.0, 600), (30.0, 500), (35.0, 500), (5.0, 900), (10.0, 910)]
    starts = [1000.0, 1000.0, 1000.0, 1000.0, 5000.0, 5000.0]
    lines = [
        row(start + at, at, committed_steps=n, queued_steps=0) for start, (at, n) in zip(starts, told, strict=True)
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    files(tmp_path, summary={"state": "ended"})
    drawn = charts_of(reported(tmp_path)[0])
    (throughput,) = (chart for chart in drawn["charts"] if chart["unit"] == "steps/s")
    assert [line["name"] for line in throughput["lines"]] == ["committed_steps_per_s"]
    assert drawn["unix_s"] == [10.0, 20.0, 30.0, 35.0, 35.0, 40.0, 45.0]
    assert drawn["curves"]["committed_steps_per_s"] == [None, 50.0, None, 0.0, None, None, 2.0]
    for chart in (*PAGE_CHARTS, *REPORT_CHARTS):
        rates = {"_per_s" in line["name"] for line in chart["lines"]}
        assert rates == {"/s" in chart["unit"]}, chart["title"]


def test_the_report_of_a_run_that_went_on_says_which_numbers_are_of_its_last_start(tmp_path: Path) -> None:
    lines = [orjson.dumps(row(start + s, s)) for start, s in ((1000.0, 20.0), (5000.0, 10.0), (9000.0, 5.0))]
    for starts, says in (
        (1, r"; started "),
        (2, r"; last started .* went on once in .*Time is of all"),
        (3, " 2 times "),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines[:starts], b""]))
        files(tmp_path, summary={"state": "ended"})
        (when,) = (words for words in reported(tmp_path)[0].texts if "this report is of" in words)
        assert re.search(says, when)


@pytest.mark.parametrize("rows_of_each", [3, 1000])
def test_a_moment_without_values_separates_two_starts_of_a_fleet(rows_of_each: int) -> None:
    rows = [row(start + n, float(n), x=start) for start in (1000.0, 9000.0) for n in range(1, rows_of_each + 1)]
    times, curves = RunSeries(rows).drawn(["x", "env_steps"])
    (gap,) = (n for n, value in enumerate(curves["x"]) if value is None)
    assert curves["env_steps"][gap] is None
    assert times[gap] == rows_of_each
    assert times == sorted(times)
    assert set(curves["x"][:gap]) == {1000.0}
    assert set(curves["x"][gap + 1 :]) == {9000.0}, "no mean across the starts"


def test_names_of_columns_cannot_end_the_json_of_a_report(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    lines = [row(1000.0 + n, float(n), **{f"learner/{evil}": n, f"policies/{evil}/return_mean": n}) for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    files(tmp_path, summary={"state": "ended"})
    page, _ = reported(tmp_path)
    drawn = charts_of(page)
    assert drawn["charts"][1]["title"] == f"learner: {evil}"
    assert drawn["curves"][f"learner/{evil}"] == [1.0, 2.0]
    assert drawn["curves"]["env_steps_total"] == [10.0, 10.0]


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
    assert len(charts_of(page)["charts"]) > 55
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
    gauges = {
        labelled("episode_return_quantile", "quantile", "0.25"): 3.0,
        labelled("worker_time_share", "part", "env"): 0.75,
        labelled("workers_blocked", "reason", "window"): 2.0,
        labelled("workers_blocked", "reason", "weights"): 1.0,
    }
    totals = {labelled("discarded_agent_steps_total", "reason", "shutdown"): 5, "env_steps_total": 70}
    made = fleet_row(Snapshot(gauges=gauges, totals=totals), {}, 100.0, 10.0)
    assert made["elapsed_s"] == 10.0
    assert (made["env_steps"], made["discarded_steps"], made["discarded_steps/shutdown"]) == (70, 5, 5)
    assert (made["episode_return_p25"], made["worker_time/env"], made["workers_blocked"]) == (3.0, 0.75, 3.0)
    assert (made["workers_blocked/window"], made["workers_blocked/weights"]) == (2, 1)
    after = fleet_row(Snapshot(gauges={labelled("workers_blocked", "reason", "window"): 1.0}), {}, 105.0, 15.0, gauges)
    assert [after[f"workers_blocked{reason}"] for reason in ("", "/window", "/weights")] == [1, 1, 0]
    assert fleet_row(Snapshot(), {}, 110.0, 20.0)["workers_blocked"] == 0
    assert "held_bytes" not in made
