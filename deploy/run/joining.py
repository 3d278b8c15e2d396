"""How a process of a role finds its fleet: by an address, a rendezvous or a run directory, with its configuration."""

from __future__ import annotations

import logging
import math
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.deploy.run.fleet_file import read_addresses, read_fleet_file
from headrace.deploy.run.named_code import resolve_found
from headrace.deploy.run.options import Asked, chosen_run, describe_origin
from headrace.deploy.run.run_dir import RUNS, file_name_of
from headrace.deploy.run.several_brokers import at_broker, index_for
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.credentials.keys import BROKER, ENV_HOST, PeerKeys, check_fingerprint, client_keys, expected_key
from headrace.schemas.errors import (
    ConfigError,
    RefusedError,
    RunDirError,
    no_fleet_error,
)
from headrace.schemas.peers.fleet_address import AddressSource, RunDirAddresses, await_address
from headrace.schemas.peers.rendezvous import Published, Rendezvous
from headrace.schemas.peers.socket_folder import check_socket, is_socket
from headrace.schemas.peers.worker_port_choice import WorkerPortChoice
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.fleet")

STOPPED_WAIT_S = 10.0
"""Seconds for which a process that ends with its fleet waits for a fleet that has stopped and may start again."""
_ENDPOINT = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")
_HIGHEST_PORT = 65_535


@dataclass(frozen=True)
class Joined:
    """The fleet of a worker or learner before it connects. `source` gives the new address when the fleet moves."""

    config: FleetConfig
    origin: str
    fleet_id: str
    endpoint: str
    source: AddressSource | None


def join(asked: Asked, endpoint: str | None, role: str) -> Joined | None:
    """Find the fleet by its address, its rendezvous or its run directory. Return None after a stop signal."""
    where = rendezvous_in(asked) if endpoint is None else ""
    if where:
        return _meet(where, asked, role)
    resolved, origin = resolve_role(asked, endpoint)
    if endpoint is None:
        if not _await_run(resolved, role):
            return None
        resolved, origin = resolve_role(asked.with_flags({"fleet.run_dir": resolved.fleet.run_dir}))
    fleet_id, found = _place(resolved, endpoint, role)
    source = RunDirAddresses(Path(resolved.fleet.run_dir)) if endpoint is None else None
    return Joined(resolved, origin, fleet_id, found, source)


def rendezvous_in(asked: Asked) -> str:
    """Return the rendezvous that the settings name; "" for none, or if a flag names a run directory instead."""
    named = str(asked.flags.get("fleet.rendezvous") or "")
    return named or ("" if asked.flags.get("fleet.run_dir") else asked.resolve()[0].fleet.rendezvous)


def _meet(where: str, asked: Asked, role: str) -> Joined | None:
    """Find the fleet at a rendezvous, which may appear later. Raises `UnreachableError`, `RefusedError`, `KeysError`.

    Without a run directory, this process keeps its files in a folder named after the fleet.
    """
    config, _ = asked.resolve()
    wanted = config.fleet.fleet_id
    rendezvous = Rendezvous(where, config.broker.ports)
    endpoint = await_place(rendezvous, role, config, wanted)
    if endpoint is None:
        return None
    published = rendezvous.look()
    if not endpoint or published is None:
        raise no_fleet_error(where, rendezvous.problem)
    fleet_id = wanted or published.fleet_id
    resolved, origin = resolve_role(asked.with_flags({"fleet.fleet_id": fleet_id}), endpoint)
    check_published(published, where, resolved, wanted, role)
    rendezvous.fleet_id = fleet_id
    source = None if where.startswith("dns://") else rendezvous
    return Joined(resolved, f"{origin}; rendezvous: {where}", fleet_id, endpoint, source)


def check_published(published: Published, where: str, config: FleetConfig, wanted: str, role: str) -> None:
    """Raise `RefusedError` if `wanted` is not "" and names another fleet, and `KeysError` for another key."""
    _check_fleet(where, published, wanted)
    keys = client_keys(config.keys.dir or None, role, config.fleet.run_dir, config.keys.group or None)
    check_fingerprint(keys, role, published.keys.get(BROKER, ""), where)


def _check_fleet(where: str, published: Published | None, wanted: str) -> None:
    if published is not None and wanted and published.fleet_id and wanted != published.fleet_id:
        detail = f"{where} is of fleet {published.fleet_id!r}, and this process is for {wanted!r}"
        raise RefusedError("wrong_fleet", detail)


def of_its_broker(asked: Asked, slot: int | None) -> Asked:
    """Return the settings of a worker. In a fleet of several brokers, they name only the broker of this worker."""
    config, _ = asked.resolve()
    return asked if config.broker.count == 1 else asked.with_flags(at_broker(config, index_for(config, slot)))


def resolve_role(asked: Asked, endpoint: str | None = None) -> tuple[FleetConfig, str]:
    """Return the configuration, by default that of the fleet in the run directory, and its origin in words.

    Without a run directory and an `endpoint`, use the newest run. With an `endpoint` only, the broker may be on another
    machine, and this process keeps its files in a folder named after the fleet.
    """
    run_dir = asked.flags.get("fleet.run_dir")
    if run_dir is None and not (config := asked.resolve()[0]).fleet.run_dir:
        elsewhere = RUNS / file_name_of(config.fleet.fleet_id or endpoint or "")
        run_dir = str(chosen_run(config) if endpoint is None else elsewhere)
        asked = asked.with_flags({"fleet.run_dir": run_dir})
    if asked.config is None and run_dir is not None and (Path(run_dir) / "config.json").exists():
        asked = replace(asked, config=Path(run_dir) / "config.json")
        resolved, origins = asked.resolve() if asked.allow is None else resolve_found(asked)
    else:
        resolved, origins = asked.resolve()
    return resolved, describe_origin(asked.config, origins)


def _await_run(config: FleetConfig, role: str, *, may_be_new: bool = False) -> bool:
    """Wait while the run in the run directory has stopped or is starting. Log immediately that it has stopped.

    `may_be_new`: wait also for a run that was never started. Return whether to go on: False after a stop signal. Raises
    `RunDirError` if the run does not start within `worker.connect_timeout_s`.
    """
    run_dir = Path(config.fleet.run_dir)
    is_new = not (run_dir / "fleet.json").exists()
    if is_new and not may_be_new:
        return True
    source = RunDirAddresses(run_dir, running=True)
    fleet_id = config.fleet.fleet_id if is_new else read_fleet_file(run_dir / "fleet.json").fleet_id
    if await_place(source, role, config, fleet_id) is None:
        return False
    if not source.find(role):
        raise source.stopped() or RunDirError(str(run_dir), "its run has no broker yet", "start it with `headrace up`")
    return True


def await_place(source: AddressSource, role: str, config: FleetConfig, fleet_id: str = "") -> str | None:
    """Return the address for `role`, or "" if there is none within `worker.connect_timeout_s`.

    Return None if this process is to end: after a stop signal, or where it ends with its fleet, which has stopped.
    """
    set_up_logging(Identity(fleet_id, role))
    ends_with_fleet = config.worker.ends_with_fleet and role != "learner"
    stopped_at = math.inf
    with stop_event() as stopping:

        def pause(seconds: float) -> bool:
            nonlocal stopped_at
            now = time.monotonic()
            stopped_at = min(stopped_at, now) if ends_with_fleet and source.stopped() is not None else math.inf
            if now - stopped_at >= STOPPED_WAIT_S:
                log.info("%s; this process leaves, as worker.ends_with_fleet says", source.problem)
                stopping.set()
            return stopping.wait(seconds)

        address = await_address(source, role, config.worker.connect_timeout_s, pause)
        return None if stopping.is_set() else address


def _place(config: FleetConfig, endpoint: str | None, role: str) -> tuple[str, str]:
    """Return (fleet id, endpoint) from the arguments, else from the run directory."""
    if endpoint is not None:
        if is_socket(endpoint):
            check_socket(endpoint)
        else:
            check_port(endpoint, "--endpoint", " or ipc:///PATH")
        return config.fleet.fleet_id, endpoint
    fleet_id, endpoints = read_addresses(Path(config.fleet.run_dir))
    if role not in endpoints:
        raise RunDirError(
            config.fleet.run_dir, "no broker has served from it yet; start `headrace up`, or give --endpoint"
        )
    return config.fleet.fleet_id or fleet_id, endpoints[role]


def check_port(address: str, option: str, other: str = "") -> None:
    """Raise `ConfigError` unless `address` is tcp://HOST:PORT. `option` names it, and `other` is another form of it."""
    matched = _ENDPOINT.fullmatch(address)
    if matched is None or not 0 < int(matched[1]) <= _HIGHEST_PORT:
        raise ConfigError(f"should be tcp://HOST:PORT{other}, got {address!r:.80}", key=option)


def worker_at(where: str, config: FleetConfig, slot: int | None) -> tuple[str | None, AddressSource | None]:
    """Return the address of a worker that takes env hosts, and the source of its later addresses.

    The address is None after a stop signal.

    The worker may appear later. Raises `UnreachableError`, `RefusedError` and `KeysError`.
    """
    if where.startswith("dns://"):
        first = config.sampling.env_hosts_port
        ports = {f"envs-{slot or 0}": first and first + (slot or 0)}
        return Rendezvous(where, ports, "sampling.env_hosts_port").find(f"envs-{slot or 0}"), None
    rendezvous = Rendezvous(where)
    source = WorkerPortChoice(rendezvous, "envs", slot, expected_key(env_host_keys(config)))
    address = await_place(source, ENV_HOST, config, config.fleet.fleet_id)
    if address == "":
        raise no_fleet_error(where, source.problem)
    if address is not None:
        _check_fleet(where, rendezvous.look(), config.fleet.fleet_id)
        rendezvous.fleet_id = config.fleet.fleet_id
    return address, source


def lent_to(asked: Asked, slot: int) -> tuple[FleetConfig, str, str]:
    """Return the run's configuration, its origin, and the address for env hosts of the worker in `slot`.

    Waits for the run as workers do; the address is "" after a stop signal.
    """
    resolved, _ = resolve_role(asked)
    run_dir, role = resolved.fleet.run_dir, f"envs-{slot}"
    if resolved.sampling.env_placement != "remote" or slot >= resolved.fleet.workers:
        wanted = f"its fleet has no worker {slot} that takes env hosts"
        raise RunDirError(run_dir, wanted, "start it with --set sampling.env_placement=remote, or give --connect")
    is_running = _await_run(resolved, role, may_be_new=asked.config is not None)
    resolved, origin = resolve_role(asked.with_flags({"fleet.run_dir": run_dir}))
    return resolved, origin, _place(resolved, None, role)[1] if is_running else ""


def env_host_keys(config: FleetConfig) -> PeerKeys | None:
    """Return the keys of an env host; None without keys. Raises `KeysError`."""
    return client_keys(config.keys.dir or None, ENV_HOST, config.fleet.run_dir, config.keys.group or None)
