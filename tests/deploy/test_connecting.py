"""The commands that `up` prints for peers on other machines."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace.deploy.monitoring.connecting import how_to_connect, worker_command
from headrace.deploy.run.options import Asked
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config, known_keys

ROOT = Path(__file__).parents[2]
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
    assert "--endpoint tcp://127.0.0.1:5701 " in worker_command(config, AT, Path("/runs/a"), "demo")


def of_the_line(config: FleetConfig) -> FleetConfig:
    """Return the settings of a worker that the printed line starts."""
    (worker,) = [line for line in how_to_connect(config, AT, Path("/runs/a"), "demo", {}) if "headrace worker " in line]
    flags = [word for before, word in pairwise(shlex.split(worker)) if before == "--set"]
    return Asked(None, flags, {}).settings


def test_a_worker_elsewhere_gets_all_settings_that_a_worker_reads() -> None:
    told = {"learner.enabled": False, "learner.policies_to_train": ["main"], "broker.max_held_bytes": 1 << 28}
    agents = {"policies": {"main": {}, "past": {}}, "policy_mapping_fn": {"a": "main", "b": "past"}}
    settings = {"sampling": agents, "broker": {"host": "0.0.0.0"}, "keys": {"dir": "/k"}}
    config = build_config(settings).replaced(told)
    elsewhere = of_the_line(config)
    assert elsewhere.frozen_modules == config.frozen_modules == {"past"}
    assert {key: elsewhere.value_of(key) for key in told} == told


@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"serving": {"enabled": True, "http_port": 8000}}, ""),
        ({"serving": {"enabled": True, "host": "0.0.0.0", "port": 5900}}, "0.0.0.0"),
        ({"serving": {"enabled": True, "host": "10.0.0.1"}}, "0.0.0.0"),
        ({"serving": {"enabled": True, "host": "fd00::1"}}, "::"),
        ({"serving": {"enabled": True, "host": "127.0.0.1"}}, "127.0.0.1"),
        ({"sampling": {"env_hosts_port": 5800}}, ""),
    ],
)
def test_a_worker_elsewhere_serves_as_those_here_do_at_its_own_address(
    settings: dict[str, Any], bound: str, *, insecure: bool
) -> None:
    way = {"broker": {"allow_insecure": True}} if insecure else {"keys": {"dir": "/k"}}
    own = {"fleet": {"workers": 0}, "worker": {"advertise": "head.example"}}
    config = build_config({**settings, **own, **way, "broker": {"host": "0.0.0.0", **way.get("broker", {})}})
    elsewhere = of_the_line(config)
    assert elsewhere.serving == config.serving.model_copy(update={"host": bound})
    assert elsewhere.worker.advertise == "", "it is the name of this machine"
    assert elsewhere.broker.allow_insecure == insecure


SECTIONS = "|".join(FleetConfig.model_fields)
NOT_IN_THE_LINE = {
    "broker.count": "a fleet of several brokers has no `headrace up`",
    "broker.port": "the endpoint has it",
    "fleet.fleet_id": "an option has it",
    "fleet.rendezvous": "the endpoint stands for it",
    "fleet.run_dir": "a folder of the machine",
    "redis.url": "of the broker, whose commands are in the same module",
    "redis.bytes_per_hour": "of the learner, whose commands are in the same module",
    "supervisor.": "for a group of workers: each machine has its own",
    "worker.advertise": "the name of one machine",
}


def keys_read(code: str, config: str) -> Iterator[str]:
    """Yield the keys that code reads of settings which it calls `config`, also by way of their properties."""
    for section, name in re.findall(rf"\b{config}\.({SECTIONS})\b(?:\.(\w+))?", code):
        kind = FleetConfig.model_fields[section].annotation
        assert kind is not None
        member = getattr(kind, name, None)
        if isinstance(member, property):
            yield from (f"{section}.{own}" for own in re.findall(r"self\.(\w+)", inspect.getsource(member.fget)))  # type: ignore[arg-type]
        else:  # without a name, the whole section is passed on
            yield from (f"{section}.{own}" for own in ([name] if name in kind.model_fields else kind.model_fields))  # type: ignore[attr-defined]
    for name in {*re.findall(rf"\b{config}\.(\w+)", code)} & (vars(FleetConfig).keys() - FleetConfig.model_fields):
        member = vars(FleetConfig)[name]
        if name not in ("replaced", "value_of") and (isinstance(member, property) or inspect.isfunction(member)):
            yield from keys_read(inspect.getsource(getattr(member, "fget", member)), "self")


def changed(value: Any) -> Any:
    """Return another value, of the same type where that is known."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else {"x": 1} if isinstance(value, Mapping) else ["x"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_the_line_has_each_key_that_code_of_workers_reads() -> None:
    names = ("fleet/roles", "fleet/watchdog", "fleet/worker_group", "run/joining")
    files = [*(ROOT / "workers").rglob("*.py"), *(ROOT / "deploy" / f"{name}.py" for name in names)]
    read = {key for file in files for key in keys_read(file.read_text(), r"_?config")}
    assert {"broker.lease_s", "learner.steps_per_update", "serving.enabled", "worker.compression"} <= read
    values = {key: changed(value) for key, value in known_keys().items()}
    config = FleetConfig().replaced(values | {"broker.host": "0.0.0.0", "broker.advertise": "", "keys.dir": "/k"})
    line = next(line for line in how_to_connect(config, AT, Path("/runs/a"), "demo", {}) if "headrace worker " in line)
    carried = {word.partition("=")[0] for before, word in pairwise(shlex.split(line)) if before == "--set"}
    missing = {key for key in read - carried if not key.startswith(tuple(NOT_IN_THE_LINE))}
    assert all(any(key.startswith(one) for key in read) for one in NOT_IN_THE_LINE), "leave out what is not read"
    assert not missing, "carry them, or say in NOT_IN_THE_LINE why a worker elsewhere has its own"


def test_a_fleet_of_unix_sockets_prints_no_command_for_other_machines() -> None:
    assert (
        list(how_to_connect(FleetConfig(), {"worker": "ipc:///runs/a/ipc/worker"}, Path("/runs/a"), "demo", {})) == []
    )
