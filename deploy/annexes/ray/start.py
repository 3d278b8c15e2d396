"""`headrace ray workers`: finds the fleet and the cluster, and keeps workers there until it is told to stop."""

from __future__ import annotations

import logging
import shlex
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import orjson

from headrace.deploy.annexes.ray.cluster import addresses, joined, reachable
from headrace.deploy.annexes.ray.wanted_workers import read_wanted
from headrace.deploy.annexes.ray.worker_actor import WorkerStart
from headrace.deploy.annexes.ray.workers_on_ray import WorkersOnRay, keep_workers
from headrace.deploy.fleet.roles import join_to_work
from headrace.deploy.run.joining import Joined, has_several_brokers, rendezvous_in
from headrace.deploy.run.options import Asked
from headrace.deploy.run.several_brokers import check_one_broker
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.errors import ConfigError
from headrace.schemas.peers.advertised import advertised
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.ray")

_MORE_TO_END_S = 20.0
"""Seconds beyond the drain of its worker that a group has to tell of it."""


def run_workers(asked: Asked, *, endpoint: str | None, count: int | None) -> None:
    """Keep workers on a Ray cluster until a stop signal; then drain them.

    `count`: the number of workers; None: follow the number in ray.json of the run directory.
    """
    if has_several_brokers(asked):
        check_one_broker(asked.settings, "headrace ray")
    where = rendezvous_in(asked) if endpoint is None else ""
    if count is None and (where or endpoint) and not asked.named("fleet.run_dir"):
        raise ConfigError("say how many workers: only a run directory has a number", key="--count")
    fleet = join_to_work(asked, endpoint)
    if fleet is None:
        return
    config, run_dir = fleet.config, Path(fleet.config.fleet.run_dir)
    set_up_logging(Identity(fleet.fleet_id, "ray"))
    drain_s = config.supervisor.stop_timeout_s

    def wanted() -> int:
        return read_wanted(run_dir) if count is None else count

    wanted()  # raises before anything starts
    with joined(config.ray.address) as ray, stop_event() as stopping:
        options = _options(fleet, where, ray)
        log.info("headrace %s keeps workers on Ray %s: %s", version("headrace"), ray.__version__, shlex.join(options))
        start = WorkerStart(
            settings=_settings(config),
            fleet_id=fleet.fleet_id,
            threads=config.sampling.torch_threads,
            arguments=(*options, "--log-format", "json"),
            grace_s=drain_s + _MORE_TO_END_S,
        )
        keep_workers(WorkersOnRay(ray, config, start), wanted, stopping.is_set, drain_s)


def _options(fleet: Joined, where: str, ray: ModuleType) -> tuple[str, ...]:
    """Return the options by which a worker on any node finds the fleet: by its rendezvous `where`, if it has one."""
    if where:
        return "--rendezvous", where, "--fleet-id", fleet.fleet_id
    named = fleet.config.broker.advertise
    at = advertised({"": fleet.endpoint}, named)[""] if named else reachable(fleet.endpoint, *addresses(ray))
    return "--endpoint", at, "--fleet-id", fleet.fleet_id


def _settings(config: FleetConfig) -> bytes:
    """Return the settings of a worker as JSON.

    They go through Ray, so they lack the Redis password.
    """
    told = config.model_dump(mode="json", exclude_none=True)
    told["redis"]["url"] = told["fleet"]["rendezvous"] = ""
    return orjson.dumps(told)
