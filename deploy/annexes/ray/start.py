"""`headrace ray workers`: finds the fleet and the cluster, and keeps workers there until it is told to stop."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import orjson

from headrace.deploy.annexes.ray.cluster import addresses, joined, reachable
from headrace.deploy.annexes.ray.wanted_workers import read_wanted
from headrace.deploy.annexes.ray.worker_actor import WorkerStart
from headrace.deploy.annexes.ray.workers_on_ray import WorkersOnRay, keep_workers
from headrace.deploy.run.fleet_file import read_addresses
from headrace.deploy.run.joining import in_run, rendezvous_in
from headrace.deploy.run.options import Asked, chosen_run
from headrace.deploy.run.several_brokers import check_one_broker
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.errors import ConfigError, RunDirError, no_fleet_error
from headrace.schemas.peers.advertised import advertised
from headrace.schemas.peers.fleet_address import await_address
from headrace.schemas.peers.rendezvous import Rendezvous
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.ray")

_MORE_TO_END_S = 20.0
"""Seconds beyond the drain of its worker that a group has to tell of it."""


def run_workers(asked: Asked, *, endpoint: str | None, count: int | None) -> None:
    """Keep workers on a Ray cluster until a stop signal; then drain them.

    `count`: the number of workers; None: follow the number in ray.json of the run directory.
    """
    found = _find_fleet(asked, endpoint)
    config, run_dir = found.config, Path(found.config.fleet.run_dir)
    if count is None and not config.fleet.run_dir:
        raise ConfigError("say how many workers: only a run directory has a number", key="--count")
    set_up_logging(Identity(found.fleet_id, "ray"))
    drain_s = config.supervisor.stop_timeout_s

    def wanted() -> int:
        return read_wanted(run_dir) if count is None else count

    wanted()  # raises before anything starts
    with joined(config.ray.address) as ray, stop_event() as stopping:
        options = _options(found, ray)
        log.info("headrace %s keeps workers on Ray %s: %s", version("headrace"), ray.__version__, shlex.join(options))
        start = WorkerStart(
            settings=_settings(config),
            fleet_id=found.fleet_id,
            threads=config.sampling.torch_threads,
            arguments=(*options, "--log-format", "json"),
            grace_s=drain_s + _MORE_TO_END_S,
        )
        keep_workers(WorkersOnRay(ray, config, start), wanted, stopping.is_set, drain_s)


@dataclass(frozen=True)
class _Found:
    """A fleet, with its broker's `endpoint` as this machine knows it, or its `rendezvous`."""

    config: FleetConfig
    fleet_id: str
    endpoint: str = ""
    rendezvous: str = ""


def _find_fleet(asked: Asked, endpoint: str | None) -> _Found:
    """Return the fleet at the address or the rendezvous that is given, else that of the run."""
    config = asked.settings
    check_one_broker(config, "headrace ray")
    if endpoint is not None:
        if not config.fleet.fleet_id:
            raise ConfigError("the fleet to join is unknown; give --fleet-id", key="--endpoint")
        return _Found(config, config.fleet.fleet_id, endpoint)
    if rendezvous_in(asked):
        return _Found(config, _await_fleet(config), rendezvous=config.fleet.rendezvous)
    run_dir = chosen_run(config)
    config, _ = in_run(asked, config, run_dir)
    fleet_id, endpoints = read_addresses(run_dir)
    if "worker" not in endpoints:
        raise RunDirError(str(run_dir), "no broker serves from it", "start `headrace up`, or give --endpoint")
    return _Found(config, config.fleet.fleet_id or fleet_id, endpoints["worker"])


def _await_fleet(config: FleetConfig) -> str:
    """Return the id of the fleet at the rendezvous, once it is there. Raises `UnreachableError`, or `ConfigError`."""
    where = config.fleet.rendezvous
    rendezvous = Rendezvous(where, config.broker.ports)
    await_address(rendezvous, "worker", config.worker.connect_timeout_s)
    published = rendezvous.look()
    if published is None:
        raise no_fleet_error(where, rendezvous.problem)
    if not (fleet_id := config.fleet.fleet_id or published.fleet_id):
        raise ConfigError("the fleet to join is unknown; give --fleet-id", key="--rendezvous")
    return fleet_id


def _options(found: _Found, ray: ModuleType) -> tuple[str, ...]:
    """Return the options by which a worker on any node finds the fleet."""
    if found.rendezvous:
        return "--rendezvous", found.rendezvous, "--fleet-id", found.fleet_id
    named = found.config.broker.advertise
    at = advertised({"": found.endpoint}, named)[""] if named else reachable(found.endpoint, *addresses(ray))
    return "--endpoint", at, "--fleet-id", found.fleet_id


def _settings(config: FleetConfig) -> bytes:
    """Return the settings of a worker as JSON.

    They go through Ray, so they lack the Redis password. A worker on the broker's machine shows the run's token.
    """
    told = config.model_dump(mode="json", exclude_none=True)
    told["redis"]["url"] = told["fleet"]["rendezvous"] = ""
    told["keys"]["dir"] = config.keys.dir or config.token_dir()
    return orjson.dumps(told)
