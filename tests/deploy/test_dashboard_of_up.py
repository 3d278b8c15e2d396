"""The dashboard that `headrace up` starts by default: it says what `top` and `why` say, and shows the run's end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from headrace.deploy.report.audit import find_books
from headrace.deploy.run.fleet_file import read_fleet_file
from support.dashboards import States, ask
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def all_say_the_same(fleet: RunningFleet, page: str) -> None:
    """Stop the worker. Page, `top` and `why` say the same of it, at the run directory and at Redis alone."""
    stopped = fleet.send(signal.SIGSTOP, "worker", 0)
    verdict = f"Waiting for worker-0 (pid {stopped}), which is stopped. Nothing lost."
    fleet.wait_until(lambda: ask(page, "/state.json").json()["verdict"] == verdict, "the page's verdict")
    (shown,) = ask(page, "/state.json").json()["findings"]
    url, fleet_id = find_books(fleet.run_dir)
    for where in (("--run-dir", str(fleet.run_dir)), ("--redis-url", url, "--fleet-id", fleet_id)):
        told = orjson.loads(headrace("why", *where, "--json"))
        (found,) = told["findings"]
        assert abs(found.pop("since_unix_s") - shown["since_unix_s"]) < 30
        assert (told["verdict"], found) == (verdict, {name: shown[name] for name in found})
        assert found["kind"] == "process_stopped"
    on_terminal = headrace("top", "--run-dir", str(fleet.run_dir), "--once")
    for text in (verdict, shown["sentence"], shown["command"]):
        assert text in on_terminal
    fleet.send(signal.SIGCONT, "worker", 0)
    fleet.wait_until(lambda: not ask(page, "/state.json").json()["findings"], "the finding to go")


def headrace(*arguments: str) -> str:
    command = [sys.executable, "-m", "headrace.deploy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S).stdout


def test_the_dashboard_says_what_top_and_why_say_restarts_after_a_kill_and_shows_the_final_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_DASHBOARD__ENABLED")  # which turns it off for all tests
    arguments = ("--env", "CartPole-v1", "--workers", "1", "--num-envs", "4", "--set", "broker.lease_s=100")
    with RunningFleet(tmp_path, *arguments) as fleet:

        def page() -> str:
            with contextlib.suppress(Exception):
                address = read_fleet_file(tmp_path / "fleet.json").endpoints.get("dashboard", "")
                return address if address and ask(address).status == 200 else ""
            return ""

        fleet.wait_until(lambda: page() and fleet.steps() > 1000, "the page, and training")
        address = page()
        assert address in fleet.said()
        killed = fleet.send(signal.SIGKILL, "dashboard")
        fleet.wait_until(lambda: fleet.pid("dashboard") not in (None, killed) and page(), "the page of its next life")
        assert page() == address
        all_say_the_same(fleet, address)
        states = States(address)
        first = states.next()
        assert first["fleet"]["state"] == "running"
        assert {"dashboard", "broker", "worker-0", "redis"} <= {one["name"] for one in first["processes"]}
        fleet.terminate()
        last = first
        while (state := states.next()) is not None:
            last = state
        states.close()
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["restarts"]["dashboard"] == 1
    assert (last["severity"], last["verdict"].split()[0]) == ("ended", "Ended.")
    assert last["ledger"]["stepped"] == result["ledger"]["stepped"]
    assert last["ledger"]["committed"] == result["ledger"]["committed"][0]
