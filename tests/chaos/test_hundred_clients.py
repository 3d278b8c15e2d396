"""A hundred clients of a policy server: killed, repeating and slow clients do no harm to the other clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fleets.storm_of_clients import Storm

pytestmark = pytest.mark.chaos

SAME_THREADS = "as many threads as before; one may count, for some seconds, warnings that were left out of the log"


@pytest.mark.thorough
def test_killed_clients_among_a_hundred_cost_no_other_client_a_step(tmp_path: Path) -> None:
    with Storm(tmp_path) as storm:
        storm.begin()
        before = storm.sizes()
        for kill in range(1, 6):
            storm.kill_one()
            storm.fleet.wait_until(lambda: storm.episodes() >= 40 * kill, f"{40 * kill} episodes")  # noqa: B023
        storm.fleet.wait_until(lambda: storm.sizes()["threads"] == before["threads"], SAME_THREADS)
        told = storm.end_clients()
        storm.fleet.wait_until(lambda: storm.sizes()["sessions"] == 0, "the end of the last lease")
        storm.fleet.wait_until(lambda: storm.sizes()["threads"] == before["threads"], SAME_THREADS)
        empty = storm.sizes()
        storm.fleet.terminate()
        result = storm.fleet.finish()
        audit = storm.fleet.audit()
    assert [(process["lost"], process["failures"]) for process in told] == [(0, [])] * len(told)
    assert min(episodes for process in told for episodes in process["clients"]) > 0
    assert storm.killed == 40
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert result["restarts"] == {"worker": 0, "broker": 0, "learner": 0, "redis": 0}
    ledger = result["ledger"]
    assert set(ledger["discarded"]) <= {"client_lost", "shutdown"}
    assert storm.episodes_lost() > 0
    assert ledger["dropped"] == {}
    assert sum(process["steps"] for process in told) <= ledger["committed"][0]
    assert (empty["sessions"], empty["episodes"], empty["remembered"]) == (0, 0, 0)
    assert empty["files"] < before["files"]
