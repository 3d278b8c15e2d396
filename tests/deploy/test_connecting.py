"""The commands that `up` prints for peers on other machines."""

from __future__ import annotations

from pathlib import Path

from headrace.deploy.monitoring.connecting import how_to_connect
from headrace.schemas.settings.config import FleetConfig

AT = {"worker": "tcp://0.0.0.0:5701", "learner": "tcp://0.0.0.0:5702", "weights": "tcp://0.0.0.0:5703"}


def test_the_printed_commands_name_the_address_that_the_broker_publishes() -> None:
    config = FleetConfig().replaced(
        {
            "broker.host": "0.0.0.0",
            "broker.advertise": "127.0.0.1",
            "keys.dir": "/runs/a/keys",
            "learner.enabled": False,
        }
    )
    workers, learner, *_ = how_to_connect(config, AT, Path("/runs/a"), "demo", {})
    assert "--endpoint tcp://127.0.0.1:5701 --fleet-id demo --set keys.dir=keys" in workers
    assert 'EpisodeStream("tcp://127.0.0.1:5702", keys="/runs/a/keys")' in learner


def test_a_fleet_of_unix_sockets_prints_no_command_for_other_machines() -> None:
    assert (
        list(how_to_connect(FleetConfig(), {"worker": "ipc:///runs/a/ipc/worker"}, Path("/runs/a"), "demo", {})) == []
    )
