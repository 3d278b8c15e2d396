"""The commands that `up` prints for peers on other machines."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

from headrace.deploy.monitoring.connecting import how_to_connect
from headrace.deploy.run.options import Asked
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config

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
    assert "--endpoint tcp://127.0.0.1:5701 --fleet-id demo --set learner.enabled=false --set keys.dir=keys" in workers
    assert 'EpisodeStream("tcp://127.0.0.1:5702", keys="/runs/a/keys")' in learner


def test_a_worker_elsewhere_gets_all_settings_that_a_worker_reads() -> None:
    told = {"learner.enabled": False, "learner.policies_to_train": ["main"], "broker.max_held_bytes": 1 << 28}
    agents = {"policies": {"main": {}, "past": {}}, "policy_mapping_fn": {"a": "main", "b": "past"}}
    settings = {"sampling": agents, "broker": {"host": "0.0.0.0"}, "keys": {"dir": "/k"}}
    config = build_config(settings).replaced(told)
    (worker, *_) = how_to_connect(config, AT, Path("/runs/a"), "demo", {})
    words = shlex.split(worker)
    flags = [word for before, word in pairwise(words) if before == "--set"]
    elsewhere = Asked(None, flags, {}).settings
    assert elsewhere.frozen_modules == config.frozen_modules == {"past"}
    assert {key: elsewhere.value_of(key) for key in told} == told


def test_a_fleet_of_unix_sockets_prints_no_command_for_other_machines() -> None:
    assert (
        list(how_to_connect(FleetConfig(), {"worker": "ipc:///runs/a/ipc/worker"}, Path("/runs/a"), "demo", {})) == []
    )
