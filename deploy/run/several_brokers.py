"""A fleet of several brokers. Each broker has a share of the slots, and books of its own as a fleet of its own.

    broker of a worker   broker.index = slot % broker.count; of a worker without a slot, by the name of its machine
    fleet id             NAME.0, NAME.1, ... for fleet.fleet_id = "NAME"
    run directory        RUN_DIR/broker-0, RUN_DIR/broker-1, ...
    rendezvous           fleet.rendezvous, with the index in place of {broker}

One learner consumes all of them as one stream. A fleet of one broker has none of these names.
"""

from __future__ import annotations

import platform
import re
import zlib
from pathlib import Path

from headrace.deploy.run.run_dir import RUNS, file_name_of
from headrace.schemas.basics.run_files import RENDEZVOUS_FILE
from headrace.schemas.errors import ConfigError
from headrace.schemas.peers.fleet_place import broker_fleet_id
from headrace.schemas.settings.config import FleetConfig

PLACEHOLDER = "{broker}"
"""The text in `fleet.rendezvous` that each broker replaces by its index."""


def index_for(config: FleetConfig, slot: int | None) -> int:
    """Return the index of a worker's broker: by its slot, else from the settings, else by a hash of its machine."""
    count = config.broker.count
    if slot is not None:
        return slot % count
    if config.broker.index is not None:
        return config.broker.index
    return zlib.crc32(platform.node().encode()) % count


def at_broker(config: FleetConfig, index: int) -> FleetConfig:
    """Return the settings for the processes of one broker. They name no other broker.

    Raises `ConfigError` if the fleet has no name, or if all brokers would publish in the same place.
    """
    fleet, count = config.fleet, config.broker.count
    if not fleet.fleet_id:
        raise ConfigError(f"should name the fleet, since broker.count = {count}", key="fleet.fleet_id")
    if fleet.rendezvous and PLACEHOLDER not in fleet.rendezvous:
        detail = f"should contain {PLACEHOLDER}, since broker.count = {count}, got {fleet.rendezvous!r:.120}"
        raise ConfigError(detail, key="fleet.rendezvous")
    run_dir = whole_run_dir(config) / f"broker-{index}"
    return config.replaced(
        {
            "fleet.fleet_id": broker_fleet_id(fleet.fleet_id, index, count),
            "fleet.run_dir": str(run_dir),
            "fleet.rendezvous": fleet.rendezvous.replace(PLACEHOLDER, str(index)) or str(run_dir / RENDEZVOUS_FILE),
            "broker.count": 1,
            "broker.index": 0,
            "broker.max_held_batches": None,  # all brokers together hold the batches of an update
        }
    )


def whole_run_dir(config: FleetConfig) -> Path:
    """Return the folder with the run directories of all brokers and the learner's files."""
    return Path(config.fleet.run_dir or RUNS / file_name_of(config.fleet.fleet_id))


def learner_dir(run_dir: Path) -> Path:
    """Return the folder of the checkpoint of the learner that consumes the broker in `run_dir`."""
    return run_dir.parent if re.fullmatch(r"broker-\d+", run_dir.name) else run_dir


def check_one_broker(config: FleetConfig, who: str) -> None:
    """Raise `ConfigError` where the settings name several brokers, and `who` is for a fleet of one."""
    if config.broker.count > 1:
        detail = (
            f"{who} is for a fleet of one broker, and there are {config.broker.count}: start each by `headrace broker "
            "--set broker.index=N`, and workers and the learner by their own commands"
        )
        raise ConfigError(detail, key="broker.count")
