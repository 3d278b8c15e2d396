"""The place of a fleet: how a peer finds its broker, and how long it waits for an absent one."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.schemas.errors import ExitCode
from headrace.schemas.peers.fleet_address import RunDirAddresses
from headrace.schemas.peers.fleet_place import FleetPlace


def write(run_dir: Path, name: str, content: dict[str, Any]) -> None:
    (run_dir / name).write_bytes(orjson.dumps(content))


def test_a_peer_logs_an_absent_broker_every_ten_seconds_until_its_wait_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = FleetPlace("tcp://a:1", patience_s=60.0)
    for second in range(500):
        place.observe(False, float(second))
    assert place.ended is None
    assert not caplog.messages, "it was never there: joining has a deadline of its own"
    place.observe(True, 500.0)
    for second in range(501, 561):
        place.observe(False, float(second))
    assert place.ended is None
    assert caplog.messages[:2] == [
        f"no broker answers at tcp://a:1; waiting for it ({waited} s of at most 60 s)" for waited in (5, 15)
    ]
    assert len(caplog.messages) == 6
    place.observe(False, 561.0)
    assert place.ended is not None
    assert place.ended.exit_code == ExitCode.UNREACHABLE
    place.observe(True, 562.0)
    assert place.ended is None


@pytest.mark.parametrize(
    ("at_goal", "patience", "ends"), [(True, 20.0, True), (False, 20.0, False), (True, None, False)]
)
def test_a_learner_does_not_wait_for_a_fleet_that_has_reached_its_goal_and_a_worker_does(
    tmp_path: Path, at_goal: bool, patience: float | None, ends: bool
) -> None:
    write(tmp_path, "broker.json", {"endpoints": {"worker": "tcp://a:1"}})
    write(tmp_path, "fleet.json", {"state": "draining", "at_goal": at_goal})
    place = FleetPlace("tcp://a:1", "worker", RunDirAddresses(tmp_path), patience_s=60.0, stopped_patience_s=patience)
    place.observe(True, 0.0)
    place.observe(False, 1.0)
    assert place.ended is None, "it drains still, so it may need its broker again"
    ended = datetime(2026, 11, 21, 14, 3, 22).timestamp()
    write(tmp_path, "fleet.json", {"state": "stopped", "at_goal": at_goal, "ended": ended, "env_steps": 60_032})
    place.observe(False, 2.0)
    assert (place.ended is not None) is ends
    how = "reached its goal" if at_goal else "was stopped"
    said = f"the fleet in {tmp_path} {how} at 2026-11-21 14:03:22 after 60,032 env steps"
    assert str(place.stopped()) == f"{said}; go on with `headrace up --resume {tmp_path}`"


def test_a_peer_logs_a_stopped_fleet_and_waits_a_shorter_time_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "broker.json", {"endpoints": {"worker": "tcp://a:1"}})
    write(tmp_path, "fleet.json", {"state": "stopped", "endpoints": {"worker": "tcp://b:1"}})
    place = FleetPlace("tcp://a:1", "worker", RunDirAddresses(tmp_path), patience_s=60.0, stopped_patience_s=20.0)
    place.observe(True, 0.0)
    for second in range(1, 22):
        assert place.ended is None
        assert place.observe(False, float(second)) is None
    assert place.ended is not None
    assert place.ended.exit_code == ExitCode.RUN_DIR
    said = f"the fleet in {tmp_path} was stopped; go on with `headrace up --resume {tmp_path}`"
    assert str(place.ended) == said, "an older version noted neither when nor after how many steps"
    assert caplog.messages == [f"{said}; waiting for it ({waited} s of at most 20 s)" for waited in (5, 15)]


def test_a_peer_follows_a_moved_port_and_ignores_malformed_addresses(tmp_path: Path) -> None:
    place = FleetPlace("tcp://a:1", "envs-2", RunDirAddresses(tmp_path), patience_s=10.0)
    place.observe(True, 0.0)
    for content in (b"", b"no json", b"[]", b'{"endpoints": 3}', b'{"endpoints": {"envs-2": "tcp://*:1"}}'):
        (tmp_path / "broker.json").write_bytes(content)
        place.observe(False, 1.0)
        place.observe(False, 11.0)
        assert place.ended is not None
        assert place.endpoint == "tcp://a:1"
    write(tmp_path, "broker.json", {"endpoints": {"worker": "tcp://a:7"}})
    write(tmp_path, "fleet.json", {"endpoints": {"envs-2": "tcp://a:2"}})
    assert place.observe(False, 22.0) == "tcp://a:2"
    assert place.endpoint == "tcp://a:2"
    place.observe(True, 23.0)
    assert place.ended is None


class Alternating:
    """Names another address each time."""

    problem, at_goal = "", False

    def __init__(self) -> None:
        self.looks = 0

    def find(self, role: str) -> str:
        self.looks += 1
        return f"tcp://node{self.looks % 2}:1"

    def stopped(self) -> None:
        return None


def test_a_peer_whose_addresses_alternate_moves_ever_more_rarely_and_waits_no_longer_than_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "headrace.fleet")
    source = Alternating()
    place = FleetPlace("tcp://a:1", "worker", source, patience_s=60.0)
    place.observe(True, 0.0)
    ended = 0.0
    for tenth in range(10, 6000):
        place.observe(False, tenth / 10)
        ended = ended or tenth / 10 * (place.ended is not None)
    assert 120.0 <= ended <= 132.0
    assert source.looks < 70
    assert sum("waiting for it" in message for message in caplog.messages) > 50
    place.observe(True, 600.0)
    assert place.observe(False, 601.0) is not None
    assert place.ended is None, "it answered, so its patience begins again"


def test_a_peer_that_has_met_its_server_is_not_ended_by_another_one_at_a_new_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = FleetPlace("tcp://a:1", "worker", Alternating(), patience_s=60.0)
    assert not place.disowns("wrong_fleet", "another fleet"), "its settings are wrong"
    place.observe(True, 0.0)
    assert not place.disowns("wrong_fleet", "another fleet")
    assert place.observe(False, 1.0) == "tcp://node1:1"
    assert place.disowns("wrong_fleet", "another fleet")
    assert place.disowns("other_broker", "another slot")
    assert not place.disowns("spaces_differ", "another env")
    assert [message for message in caplog.messages if "is another one" in message] == [
        "the broker at tcp://node1:1 is another one: another fleet; looking for the right one"
    ]
    place.observe(True, 2.0)
    assert not place.disowns("wrong_fleet", "another fleet"), "it is the right one now"


def test_a_peer_without_a_deadline_of_its_own_ends_when_no_server_has_ever_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = FleetPlace("tcp://a:1", server="worker", patience_s=60.0, first_patience_s=20.0)
    for second in range(20):
        place.observe(False, float(second))
    assert place.ended is None
    place.observe(False, 20.0)
    assert str(place.ended).startswith("no worker answers at tcp://a:1 after 20 s")
    assert not caplog.messages, "the peer says itself what it waits for"
    place.observe(True, 21.0)
    for second in range(22, 82):
        place.observe(False, float(second))
    assert place.ended is None, "it has answered, so the other limit counts"
    write(tmp_path, "fleet.json", {"state": "stopped"})
    stopped = FleetPlace("tcp://a:1", "envs-0", RunDirAddresses(tmp_path), patience_s=60.0, first_patience_s=20.0)
    stopped.observe(False, 0.0)
    stopped.observe(False, 20.0)
    assert stopped.ended is not None
    assert stopped.ended.exit_code == ExitCode.RUN_DIR


def test_a_worker_of_a_supervisor_waits_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    place = FleetPlace("tcp://a:1")
    place.observe(True, 0.0)
    for hour in range(1, 100):
        place.observe(False, 3600.0 * hour)
    assert place.ended is None
    assert caplog.messages[-1] == "no broker answers at tcp://a:1; waiting for it (352800 s)"
