"""The dashboard that `headrace up` starts by default: it restarts after a kill, and shows the end of the run."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from headrace.deploy.run.fleet_file import read_fleet_file
from support.dashboards import States, ask
from support.fleets.running_fleet import RunningFleet

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_the_dashboard_restarts_after_a_kill_and_shows_the_final_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_DASHBOARD__ENABLED")  # which turns it off for all tests
    arguments = ("--env", "CartPole-v1", "--workers", "1", "--num-envs", "4")
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
