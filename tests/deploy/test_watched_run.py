"""One run in `headrace top`, on a real pseudo-terminal, and in `headrace report`, until its Redis is gone."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.annexes.watch.report.report_command import write_report
from support.fleets.running_fleet import RunningFleet
from support.html_pages import Page, assert_needs_nothing, charts_of
from support.terminal_screen import OnTerminal
from support.waiting import wait_until

pytestmark = pytest.mark.slow

HOSTILE = "<script>alert(1)</script>"
MINE = f"""
class Logs:
    def on_episode_end(self, episode, metrics_logger):
        metrics_logger.log_value({HOSTILE!r}, len(episode))
"""


def report(run_dir: Path) -> tuple[Page, dict[str, Any]]:
    """The page, which must need nothing, and the facts of a report."""
    out, table, facts = (run_dir.parent / f"out.{kind}" for kind in ("html", "csv", "json"))
    write_report(run_dir, out, table, facts)
    page = Page(out.read_text())
    assert_needs_nothing(page)
    return page, orjson.loads(facts.read_bytes())


@pytest.mark.thorough
def test_top_and_report_show_a_run_from_its_training_to_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "<b>run"
    (tmp_path / "mine.py").write_text(MINE)
    options = ("--env", "CartPole-v1", "--workers", "2", "--num-envs", "2", "--set", "logging.interval_s=0.3")
    options += ("--set", 'sampling.callbacks=["mine:Logs"]', "--set", "learner.steps_per_update=256")
    options += ("--set", "broker.lease_s=60")  # a worker that is stopped for some seconds is not replaced
    top = [sys.executable, "-m", "headrace.deploy", "top", "--run-dir", str(run_dir)]
    with RunningFleet(run_dir, *options, cwd=tmp_path) as fleet:
        fleet.wait_until(lambda: fleet.steps() > 500, "first steps")
        fleet.send(signal.SIGKILL, "worker", 0)
        with OnTerminal(top, NO_COLOR="1") as terminal:
            watch(terminal, fleet)
            fleet.wait_until(lambda: '"restarts/worker":' in (run_dir / "metrics.jsonl").read_text(), "a restart")
            _, facts = report(run_dir)
            assert facts["state"] == "running"
            assert facts["verdict"].startswith("Running for ")
            assert facts["restarts"] == {"worker": 1}

            fleet.terminate()
            summary = fleet.finish()
            terminal.shows("Ended.")
            terminal.shows(f"{summary['ledger']['stepped']:,} = committed")
            assert (terminal.screen.overflows, terminal.screen.colours) == ([], set())
            terminal.press("\x03")
            assert terminal.process.wait(60) == 0
    reports_of_an_ended_run(run_dir, summary)


def watch(terminal: OnTerminal, fleet: RunningFleet) -> None:
    terminal.shows("2, 2 wanted")
    terminal.shows("= committed")
    assert terminal.shows("\n Ctrl-C quits").count("\n") == 23

    stopped = fleet.send(signal.SIGSTOP, "worker", 1)
    terminal.shows(f"kill -CONT {stopped}")
    os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: f"kill -CONT {stopped}" not in terminal.screen.text(), "the finding goes", pause_s=0.05)

    terminal.resize(60, 16)
    wait_until(lambda: terminal.screen.text().count("\n") == 15, "16 lines", pause_s=0.05)
    terminal.shows("Ctrl-C quits")
    terminal.screen.overflows.clear()  # a frame for the size before may have been under way until then
    terminal.resize(80, 24)
    wait_until(lambda: terminal.screen.text().count("\n") == 23, "24 lines", pause_s=0.05)


def reports_of_an_ended_run(run_dir: Path, summary: dict[str, Any]) -> None:
    page, facts = report(run_dir)
    books = facts["ledger"]
    assert facts["state"] == "ended"
    assert facts["audit"]["balanced"] is True
    assert books["source"] == "Redis"
    assert books["stepped"] == summary["ledger"]["stepped"]
    assert books["discarded"] == summary["ledger"]["discarded"]
    assert facts["numbers"]["env_steps_total"] == summary["env_steps"]
    assert [mark["what"] for mark in facts["marks"]] == ["worker restarted"]
    assert {one["key"]: one["value"] for one in facts["settings"]}["logging.interval_s"] == 0.3
    said = " ".join(page.texts)
    assert {f"discarded: {reason}" for reason in books["discarded"]} <= set(page.texts)
    assert f"callbacks: {HOSTILE}" in [chart["title"] for chart in charts_of(page)["charts"]]
    assert summary["fleet_id"] in said
    assert "worker restarted" in said

    rows = [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    returns = facts["series"]["episode_return_mean"]
    assert returns["value"] == [row["episode_return_mean"] for row in rows if "episode_return_mean" in row]
    assert returns["env_steps"] == [row["env_steps"] for row in rows if "episode_return_mean" in row]
    assert len(facts["series"]["learner/loss"]["value"]) == sum("learner/loss" in row for row in rows)
    assert {"accepted_lag_p50", "consumed_lag_p95", "learner_time/train", "episode_len_p75"} <= facts["series"].keys()
    with (run_dir.parent / "out.csv").open(newline="") as table:
        assert [float(row["env_steps"]) for row in csv.DictReader(table)] == [row["env_steps"] for row in rows]

    shutil.rmtree(run_dir / "redis")
    _, alone = report(run_dir)
    assert alone["ledger"] == books | {"source": "summary.json"}
    assert alone["audit"]["balanced"] is True
    assert "Redis does not answer" in alone["audit"]["note"]
    assert (alone["series"], alone["restarts"]) == (facts["series"], facts["restarts"])

    (run_dir / "summary.json").unlink()
    _, alone = report(run_dir)
    assert alone["ledger"]["source"] == "the last row of metrics.jsonl"
    assert alone["ledger"]["stepped"] == books["stepped"] == rows[-1]["agent_steps"]
    assert alone["audit"]["balanced"] is None
