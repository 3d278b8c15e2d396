"""A process of a role finds its fleet: by an address, a rendezvous or a run directory, with its configuration."""

from __future__ import annotations

import logging
import math
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.deploy.run.fleet_file import read_addresses, read_fleet_file
from headrace.deploy.run.named_code import with_found
from headrace.deploy.run.options import Asked, chosen_run
from headrace.deploy.run.run_dir import RUNS, file_name_of
from headrace.deploy.run.several_brokers import at_broker, index_for
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.schemas.basics.bounds import HIGHEST_PORT
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.credentials.keys import BROKER, ENV_HOST, ClientKeys, check_fingerprint, client_keys, expected_key
from headrace.schemas.errors import ConfigError, RefusedError, RunDirError, is_there, no_fleet_error
from headrace.schemas.peers.fleet_address import AddressSource, RunDirAddresses, await_address
from headrace.schemas.peers.rendezvous import Published, Rendezvous
from headrace.schemas.peers.socket_folder import check_socket, is_socket
from headrace.schemas.peers.worker_port_choice import WorkerPortChoice
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.fleet")

STOPPED_WAIT_S = 10.0
"""Seconds for which a process that ends with its fleet waits for a fleet that has stopped and may start again."""
_ENDPOINT = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")


@dataclass(frozen=True)
class Joined:
    """The fleet of a process before it connects. `source` gives the new address when the fleet moves."""

    config: FleetConfig
    origin: str
    endpoint: str
    source: AddressSource | None

    @property
    def fleet_id(self) -> str:
        """Return the fleet's name; "" where only its address is known."""
        return self.config.fleet.fleet_id


def join(asked: Asked, endpoint: str | None, role: str, slot: int | None = None) -> Joined | None:
    """Find the fleet by its address, its rendezvous or its run directory. Return None after a stop signal.

    `slot`: that of a worker. Of several brokers it joins its own.
    """
    if endpoint is not None:
        run_dir = asked.named("fleet.run_dir") or RUNS / file_name_of(asked.named("fleet.fleet_id") or endpoint)
        config, origin = in_run(asked, run_dir)
        check_address(endpoint, "--endpoint")
        return Joined(config, origin, endpoint, None)
    share, where = _share(asked, slot)
    return _meet(where, asked, share or asked.settings, role) if where else _join_run(asked, role)


def join_worker(asked: Asked, connect: str | None, slot: int | None) -> Joined | None:
    """Find the worker that takes env hosts: at `connect`, or that of `slot`. Return None after a stop signal.

    With a rendezvous, the worker is listed there, and may have any slot if `slot` is None. Otherwise it belongs to the
    run in the run directory.
    """
    if connect is not None:
        if asked.flags["fleet.run_dir"] is not None:
            raise ConfigError("give either --connect or --run-dir", key="--connect")
        check_address(connect, "--connect")
        return Joined(asked.settings, asked.origin, connect, None)
    share, where = _share(asked, slot)
    if not where:
        return _join_run(asked, f"envs-{slot or 0}", slot=slot or 0)
    config = share or asked.settings
    address, source = _worker_at(where, config, slot)
    if address is None:
        return None
    return Joined(config, f"{asked.origin}; rendezvous: {where}", address, source)


def _share(asked: Asked, slot: int | None) -> tuple[FleetConfig | None, str]:
    """Return the settings of a worker's own broker, None in a fleet of one; and the rendezvous, "" for none."""
    if not has_several_brokers(asked):
        return None, rendezvous_in(asked)
    share = at_broker(asked.settings, index_for(asked.settings, slot))
    return share, share.fleet.rendezvous


def has_several_brokers(asked: Asked) -> bool:
    """Return whether the user's settings are for several brokers, which no run of `headrace up` has."""
    return asked.named("broker.count") not in ("", "1") and asked.settings.broker.count > 1


def rendezvous_in(asked: Asked) -> str:
    """Return the rendezvous that the settings name; "" for none, or if a flag names a run directory instead."""
    by_run_dir = asked.flags.get("fleet.run_dir") and not asked.flags.get("fleet.rendezvous")
    return "" if by_run_dir else asked.named("fleet.rendezvous")


def in_run(asked: Asked, run_dir: str | Path, share: FleetConfig | None = None) -> tuple[FleetConfig, str]:
    """Return the settings of a process that keeps its files in `run_dir`, and their origin in words.

    They are those of the run there if the user names no file; else `share`, those at one of several brokers, or what
    the user asks for. Raises `ConfigError`.
    """
    own = Path(run_dir) / "config.json"
    if asked.config is None and is_there(own):
        asked, share = replace(asked, config=own) if asked.allow is None else with_found(asked, own), None
    config = share or asked.settings
    return config.replaced({"fleet.run_dir": str(run_dir)}), asked.origin


def _meet(where: str, asked: Asked, config: FleetConfig, role: str) -> Joined | None:
    """Find the fleet at a rendezvous, which may appear later. Raises `UnreachableError`, `RefusedError`, `KeysError`.

    Without a run directory, this process keeps its files in a folder named after the fleet.
    """
    wanted = config.fleet.fleet_id
    rendezvous = Rendezvous(where, config.broker.ports)
    endpoint = await_place(rendezvous, role, config, wanted)
    if endpoint is None:
        return None
    published = rendezvous.look()
    if not endpoint or published is None:
        raise rendezvous.stopped() or no_fleet_error(where, rendezvous.problem)
    fleet_id = wanted or published.fleet_id
    config, origin = in_run(asked, config.fleet.run_dir or RUNS / file_name_of(fleet_id or endpoint), config)
    check_published(published, where, config, wanted, role)
    rendezvous.fleet_id = fleet_id
    source = None if where.startswith("dns://") else rendezvous
    config = config.replaced({"fleet.fleet_id": fleet_id})
    return Joined(config, f"{origin}; rendezvous: {where}", endpoint, source)


def _join_run(asked: Asked, role: str, slot: int | None = None) -> Joined | None:
    """Find the fleet of a run directory, by default of the newest run. Return None after a stop signal.

    A run that has stopped or is starting may have other settings afterwards. `slot`: of the worker that an env host
    serves. Raises `RunDirError`.
    """
    run_dir = chosen_run(asked.named("fleet.run_dir"))
    config, origin = in_run(asked, run_dir)
    if slot is not None and (config.sampling.env_placement != "remote" or slot >= config.fleet.workers):
        wanted = f"its fleet has no worker {slot} that takes env hosts"
        raise RunDirError(str(run_dir), wanted, "start it with --set sampling.env_placement=remote, or give --connect")
    if not RunDirAddresses(run_dir, running=True).find(role):
        if not _await_run(config, role, may_be_new=slot is not None and asked.config is not None):
            return None
        config, origin = in_run(asked, run_dir)
    fleet_id, endpoints = read_addresses(run_dir)
    if role not in endpoints:
        raise RunDirError(str(run_dir), "no broker has served from it yet; start `headrace up`, or give --endpoint")
    config = config.replaced({"fleet.fleet_id": config.fleet.fleet_id or fleet_id})
    return Joined(config, origin, endpoints[role], RunDirAddresses(run_dir))


def check_published(published: Published, where: str, config: FleetConfig, wanted: str, role: str) -> None:
    """Raise `RefusedError` if `wanted` is not "" and names another fleet, and `KeysError` for another key."""
    _check_fleet(where, published, wanted)
    keys = client_keys(config.keys.dir or None, role, config.keys.group or None)
    check_fingerprint(keys, role, published.keys.get(BROKER, ""), where)


def _check_fleet(where: str, published: Published | None, wanted: str) -> None:
    if published is not None and wanted and published.fleet_id and wanted != published.fleet_id:
        detail = f"{where} is of fleet {published.fleet_id!r}, and this process is for {wanted!r}; give it --fleet-id"
        raise RefusedError("wrong_fleet", detail)


def _await_run(config: FleetConfig, role: str, *, may_be_new: bool = False) -> bool:
    """Wait while the run in the run directory has stopped or is starting. Log immediately that it has stopped.

    `may_be_new`: wait also for a run that was never started. Return whether to go on: False after a stop signal. Raises
    `RunDirError` if the run does not start within `worker.connect_timeout_s`.
    """
    run_dir = Path(config.fleet.run_dir)
    is_new = not is_there(run_dir / "fleet.json")
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


def check_address(address: str, option: str) -> None:
    """Raise `ConfigError` unless `address` is tcp://HOST:PORT or ipc:///PATH. `option` names it."""
    if is_socket(address):
        check_socket(address)
        return
    matched = _ENDPOINT.fullmatch(address)
    if matched is None or not 0 < int(matched[1]) <= HIGHEST_PORT:
        raise ConfigError(f"should be tcp://HOST:PORT or ipc:///PATH, got {address!r:.80}", key=option)


def _worker_at(where: str, config: FleetConfig, slot: int | None) -> tuple[str | None, AddressSource | None]:
    """Return the address of a worker that takes env hosts, and the source of its later addresses.

    The worker may appear later. The address is None after a stop signal. Raises `UnreachableError`, `RefusedError` and
    `KeysError`.
    """
    if where.startswith("dns://"):
        first = config.sampling.env_hosts_port
        ports = {f"envs-{slot or 0}": first and first + (slot or 0)}
        return Rendezvous(where, ports, "sampling.env_hosts_port").find(f"envs-{slot or 0}"), None
    rendezvous = Rendezvous(where)
    source = WorkerPortChoice(rendezvous, "envs", slot, expected_key(env_host_keys(config)))
    address = await_place(source, ENV_HOST, config, config.fleet.fleet_id)
    if address == "":
        raise source.stopped() or no_fleet_error(where, source.problem)
    if address is not None:
        _check_fleet(where, rendezvous.look(), config.fleet.fleet_id)
        rendezvous.fleet_id = config.fleet.fleet_id
    return address, source


def env_host_keys(config: FleetConfig) -> ClientKeys | None:
    """Return the keys of an env host; None without keys. Raises `KeysError`."""
    return client_keys(config.keys.dir or None, ENV_HOST, config.keys.group or None)
