"""A peer lies to the broker of a fleet that trains. The fleet goes on to its own goal, with true books."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.schemas.accounts.ledger import WorkerTotals
from headrace.schemas.frames.wire import MessageKind
from headrace.schemas.messages import Heartbeat, WorkerHello, WorkerWelcome, read
from support.fleets.running_fleet import RunningFleet
from support.pipeline.delivery import RawPeer

pytestmark = [pytest.mark.chaos, pytest.mark.thorough]


def test_a_lying_peer_cannot_end_the_run_and_keeps_no_slot(tmp_path: Path) -> None:
    """It claims steps that no env took, and takes slot 0 with an incarnation that slot 0 would never reach."""
    with RunningFleet(tmp_path, "--workers", "2", "--num-envs", "8", "--until-steps", "60000") as fleet:
        fleet.wait_until(lambda: fleet.steps() > 3_000, "training has begun")
        fleet_id = read_fleet_file(tmp_path / "fleet.json").fleet_id
        with RawPeer(fleet.endpoint("worker")) as peer:
            peer.send(WorkerHello(fleet_id=fleet_id, token="liar").frames())
            place = read(WorkerWelcome, peer.receive_kind(MessageKind.WELCOME).header)
            for steps in (99_999_999, 19_999_999):  # more than any worker makes at once, and less
                claims = WorkerTotals(env_steps=steps), WorkerTotals(env_steps=steps, stepped=steps, open=steps)
                for totals in claims:
                    peer.send(Heartbeat(slot=place.slot, incarnation=place.incarnation, totals=totals).frames())
            brought = WorkerTotals(env_steps=1 << 40)
            peer.send(WorkerHello(fleet_id=fleet_id, token="old", slot=77, incarnation=1, totals=brought).frames())
            peer.receive_kind(MessageKind.WELCOME)
        with RawPeer(fleet.endpoint("worker")) as peer:
            peer.send(WorkerHello(fleet_id=fleet_id, token="thief", slot=0, incarnation=500).frames())
            peer.receive_kind(MessageKind.WELCOME)
            fleet.wait_until(lambda: fleet.pid("worker", slot=0, incarnation=501), "the fleet's own worker in slot 0")
        result = fleet.finish()
    assert result["returncode"] == 0, result["stderr"]
    assert result["goal_reached"] is True
    assert 60_000 <= result["env_steps"] < 80_000
    assert result["balanced"] is True
