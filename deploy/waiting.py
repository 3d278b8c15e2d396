"""Names what a fleet that takes no step waits for, with the command or the code that ends the wait."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Iterator

import orjson

from headrace.deploy.fleet import Fleet
from headrace.deploy.progress import STALE_S
from headrace.deploy.recorders import recorder_path
from headrace.deploy.supervisor import Role, Service, ServiceState
from headrace.schemas.config import FleetConfig, is_loopback
from headrace.schemas.config_loading import known_keys
from headrace.schemas.recorder import read_recorder
from headrace.schemas.redis_keys import without_password

_SHOWN_ADDRESSES = 3
_OF_ENV_HOSTS = (
    "keys.",
    "sampling.disable_env_checking",
    "sampling.env_c",
    "sampling.env_process",
    "sampling.env_reset",
    "sampling.env_step",
    "sampling.envs_per_process",
    "sampling.num_envs",
)
"""Prefixes of the keys that an env host reads, in addition to sampling.env."""


def awaited(fleet: Fleet) -> str:
    """Return what the fleet waits for; empty if nothing is missing and steps are only slow."""
    return "; ".join(_awaited(fleet))


def how_to_connect(fleet: Fleet) -> Iterator[str]:
    """Yield, for each kind of peer that this fleet does not start itself, how to start it, with text to paste."""
    config, at = fleet.config, fleet.endpoints
    if not config.fleet.workers:
        yield f"start workers with: {_worker_command(fleet)}"
    if not config.learner.enabled:
        yield f"connect a learner of your own:\n{_learner_lines(fleet)}"
        yield f"or start the reference learner: headrace learner --run-dir {fleet.run_dir.path}"
    if config.sampling.env_placement == "remote" and not config.fleet.env_hosts:
        yield f"start one env host or more for each worker: {_env_host_commands(fleet)}"
    if config.serving.enabled and config.fleet.workers:
        served = [at[name] for name in sorted(at) if name.startswith(("clients-", "http-"))]
        yield f"connect clients to {_addresses(served)}"


def _awaited(fleet: Fleet) -> Iterator[str]:
    services = fleet.supervisor.services.values()
    for service in services:
        if service.state is ServiceState.RESTARTING:
            yield f"{service.spec.name} to start again (it ended with {service.last_words:.100})"
    if fleet.redis_age_s > STALE_S:
        yield f"Redis at {without_password(fleet.config.redis.url)}, silent for {fleet.redis_age_s:.0f} s"
    workers = [s for s in services if s.spec.role is Role.WORKER and s.state is ServiceState.RUNNING]
    loading, building = _not_ready(fleet, workers)
    if loading:
        yield f"{_names(loading)} to load ({_age(loading):.0f} s so far)"
    if building:
        yield _for_envs(fleet, building)
    known = fleet.snapshot.workers if fleet.snapshot is not None else {}
    if not workers and not known:
        yield f"a worker ({_worker_command(fleet)})"
    elif len(loading) + len(building) < max(len(workers), len(known)):
        yield from _for_others(fleet)


def _not_ready(fleet: Fleet, workers: list[Service]) -> tuple[list[Service], list[Service]]:
    """Return the workers that have not joined yet, and those that have joined and build their envs."""
    loading, building = [], []
    for service in workers:
        if service.child is None or service.spec.slot is None:
            continue
        path = recorder_path(fleet.run_dir.recorders, service.spec.slot, service.child.incarnation)
        reading = read_recorder(path)
        if reading is None:
            loading.append(service)
        elif reading.silent_until_ns > time.monotonic_ns() and not reading.totals.stepped:
            building.append(service)
    return loading, building


def _for_envs(fleet: Fleet, building: list[Service]) -> str:
    if fleet.config.sampling.env_placement != "remote":
        return f"{_names(building)} to build {fleet.config.sampling.num_envs} envs each ({_age(building):.0f} s so far)"
    if fleet.config.fleet.env_hosts:
        return f"the env hosts of {_names(building)} ({_age(building):.0f} s so far)"
    return f"env hosts for {_names(building)} ({_env_host_commands(fleet)})"


def _for_others(fleet: Fleet) -> Iterator[str]:
    """Yield what workers that are ready wait for: the learner, or clients."""
    states = fleet.snapshot.workers.values() if fleet.snapshot is not None else ()
    learner = fleet.supervisor.services.get("learner")
    whose = f"a learner at {fleet.endpoints.get('learner', '?')}" if learner is None else "the learner"
    gauges = fleet.snapshot.gauges if fleet.snapshot is not None else {}
    if not gauges.get("weights_seq") and not _random_first(fleet):
        since = "" if learner is None or learner.child is None else f" ({_age([learner]):.0f} s so far)"
        yield f"first weights from {whose}{since}"
    elif states and all(state.get("blocked") for state in states):
        yield f"{whose} to commit what it holds"
    elif fleet.config.serving.enabled:
        yield "clients"


def _random_first(fleet: Fleet) -> bool:
    return fleet.config.worker.random_actions_before_weights


def _names(services: list[Service]) -> str:
    names = [service.spec.name for service in services]
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _age(services: list[Service]) -> float:
    return max(time.monotonic() - service.child.started for service in services if service.child is not None)


def _worker_command(fleet: Fleet) -> str:
    """Return the command that starts a worker: here by the run directory, elsewhere with all settings that it needs."""
    if is_loopback(fleet.config.broker.host):
        return f"headrace worker --run-dir {fleet.run_dir.path}"
    where = f"--endpoint {_reachable(fleet.endpoints['worker'])} --fleet-id {fleet.fleet_id}"
    return f"headrace worker {where}{_settings(fleet.config, ('sampling.', 'module.', 'worker.', 'keys.'))}"


def _env_host_commands(fleet: Fleet) -> str:
    sampling = fleet.config.sampling
    found = _addresses([_reachable(fleet.endpoints[name]) for name in fleet.endpoints if name.startswith("envs-")])
    settings = _settings(fleet.config, _OF_ENV_HOSTS)
    return f"headrace env-host --connect {found} --env {shlex.quote(sampling.env)}{settings}"


def _settings(config: FleetConfig, prefixes: tuple[str, ...]) -> str:
    """Return, as options for a shell, the settings under these prefixes that are not at their defaults."""
    words, now = [], config.model_dump(mode="json")
    for key, default in known_keys().items():
        section, _, name = key.partition(".")
        if key.startswith(prefixes) and now[section][name] != default:
            value = now[section][name]
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            words += ["--set", f"{key}={text}"]
    return "".join(f" {shlex.quote(word)}" for word in words)


def _reachable(endpoint: str) -> str:
    """Return the endpoint with this machine's name in place of the wildcard address."""
    return endpoint.replace("//0.0.0.0:", f"//{platform.node()}:").replace("//[::]:", f"//{platform.node()}:")


def _addresses(found: list[str]) -> str:
    more = len(found) - _SHOWN_ADDRESSES
    return " or ".join(found[:_SHOWN_ADDRESSES]) + (f" or {more} more, in fleet.json" if more > 0 else "")


def _learner_lines(fleet: Fleet) -> str:
    keys = f', keys="{fleet.config.keys.dir}"' if fleet.config.keys.dir else ""
    where = f'"{_reachable(fleet.endpoints["learner"])}"{keys}'
    return (
        "    from headrace.learner_stub import EpisodeStream, WeightPublisher\n"
        f"    stream, weights = EpisodeStream({where}), WeightPublisher({where})\n"
        "    weights.publish(module.state_dict())  # then: for batch in stream: ..."
    )
