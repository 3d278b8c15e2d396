"""Commands and code to paste, which start the peers that a fleet waits for."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from headrace.deploy.report.progress import number
from headrace.deploy.run.checkpoint_facts import NEWEST_FILE
from headrace.schemas.basics.printable import one_line, to_paste
from headrace.schemas.basics.run_files import rendezvous_path
from headrace.schemas.credentials.key_files import key_name
from headrace.schemas.credentials.keys import BROKER, CLIENT, ENV_HOST, TOKEN_FILE
from headrace.schemas.peers.advertised import advertised, host_to_advertise
from headrace.schemas.settings.config import FleetConfig, host_on_any_machine, is_loopback
from headrace.schemas.settings.config_loading import by_key, known_keys

_SHOWN_ADDRESSES = 3
_OF_WORKERS = (
    *("sampling.", "module.", "worker.", "serving.", "keys.", "broker.lease_s", "broker.max_", "broker.overflow"),
    *("fleet.workers", "ray.workers", "learner.enabled", "learner.policies_to_train", "learner.steps_per_update"),
)
"""Prefixes of the keys that a worker reads."""
_OF_PORTS = ("broker.allow_insecure", "broker.host")
"""Keys by which a worker chooses its ports for env hosts and clients."""
_OF_ENV_HOSTS = (
    *("broker.lease_s", "keys.", "worker.connect_timeout_s", "worker.ends_with_fleet"),
    "sampling.env_c",
    "sampling.env_process",
    "sampling.env_reset",
    "sampling.env_step",
    "sampling.envs_per_process",
    "sampling.num_envs",
    "sampling.strict_bounds",
)
"""Prefixes of the keys that an env host reads, in addition to sampling.env."""

Endpoints = Mapping[str, str]


def how_to_connect(
    config: FleetConfig, at: Endpoints, run_dir: Path, fleet_id: str, lease: Mapping[str, Any]
) -> Iterator[str]:
    """Yield, for each kind of peer that this fleet does not start itself, how to start it, with text to paste.

    `lease` is that of the learner that came last.
    """
    at = _as_others_reach(config, at)
    remote, served = config.sampling.env_placement == "remote", config.serving.enabled
    own_name, has_keys = key_name("worker", config.keys.group), config.broker.host and config.keys.dir
    if has_keys:
        command = _command_elsewhere(config.replaced({"keys.dir": "keys"}), at, fleet_id)
        by_http = served and config.serving.http_port is not None
        of_peers = {f"{ENV_HOST}.public": remote, f"{CLIENT}.public": served, TOKEN_FILE: by_http}
        files = (name for name, is_needed in of_peers.items() if is_needed)
        copies = _copies(config, f"{own_name}.secret", f"{BROKER}.public", *files)
        yield f"start workers elsewhere, {copies}: {command}"
    elif not config.fleet.workers and not config.ray.workers:
        yield f"start workers with: {worker_command(config, at, run_dir, fleet_id)}"
    if not config.learner.enabled:
        if last := named_learner(lease):
            command, heard = start_of_learner(lease, run_dir), number(lease.get("heard_unix_s"))
            when = time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(heard)) if heard else ""
            yield f"{last} was last heard of{when}; start it again{f': {command}' if command else ''}"
        else:
            yield f"connect a learner of your own:\n{_learner_lines(config, at)}"
        if not last and not (run_dir / NEWEST_FILE).exists():
            yield f"or start the reference learner: {_in(run_dir, 'learner')}"
    if remote and not config.fleet.env_hosts:
        of_host = config.replaced({"keys.dir": "keys", "keys.group": ""}) if has_keys else config
        copies = f", {_copies(config, f'{ENV_HOST}.secret', f'{own_name}.public')}" if has_keys else ""
        yield f"start one env host or more for each worker{copies}: {env_host_command(of_host, at, run_dir)}"
    if served and config.fleet.workers:
        yield f"connect clients to {client_addresses(at)}"


def _copies(config: FleetConfig, *files: str) -> str:
    """Return, in words, the key files that a peer on another machine needs."""
    names = f"{', '.join(files[:-1])} and {files[-1]}"
    return f"with copies of {names} from {Path(config.keys.dir).absolute()} in a folder keys"


def _as_others_reach(config: FleetConfig, at: Endpoints) -> Endpoints:
    """Return the same with the broker's endpoints as it publishes them."""
    broker = config.broker
    if is_loopback(broker.host):
        return at
    own = {role: at[role] for role in broker.ports if role in at}
    return {**at, **advertised(own, host_to_advertise(broker.host, broker.advertise))}


def worker_command(config: FleetConfig, at: Endpoints, run_dir: Path, fleet_id: str) -> str:
    """Return the command that starts a worker: here by the run directory, elsewhere with all settings that it needs."""
    if is_loopback(config.broker.host) or "worker" not in at:
        return _in(run_dir, "worker")
    return _command_elsewhere(config, _as_others_reach(config, at), fleet_id)


def _command_elsewhere(config: FleetConfig, at: Endpoints, fleet_id: str) -> str:
    """Return the command that starts a worker on any machine, with all settings that it needs."""
    where = f"--endpoint {_reachable(at['worker'])} --fleet-id {fleet_id}"
    sampling, serving = config.sampling, config.serving
    has_ports = sampling.env_placement == "remote" or sampling.env_hosts_port or serving.enabled
    config = config.replaced({"worker.advertise": "", "serving.host": host_on_any_machine(serving.host)})
    return f"headrace worker {where}{_settings(config, (*_OF_WORKERS, *(_OF_PORTS if has_ports else ())))}"


def env_host_command(config: FleetConfig, at: Endpoints, run_dir: Path) -> str:
    """Return the command that starts an env host. If no worker is known yet, the host finds one at the rendezvous."""
    found = _addresses([_reachable(at[name]) for name in at if name.startswith("envs-")])
    rendezvous = to_paste(rendezvous_path(config.fleet.rendezvous, run_dir))
    place = f"--connect {found}" if found else f"--rendezvous {rendezvous}"
    return f"headrace env-host {place} --env {to_paste(config.sampling.env)}{_settings(config, _OF_ENV_HOSTS)}"


def named_learner(lease: Mapping[str, Any]) -> str:
    """Return the name of the learner that came last, with its process; "" where none has told it."""
    program, host = (one_line(str(lease.get(name, ""))) for name in ("program", "host"))
    return f"the learner {program} (pid {number(lease.get('pid')):.0f} on {host})" if program else ""


def _in(run_dir: Path, command: str) -> str:
    return f"headrace {command} --run-dir {to_paste(run_dir)}"


def start_of_learner(lease: Mapping[str, Any], run_dir: Path) -> str:
    """Return what starts the learner that came last again; "" for one of one's own, whose arguments are not known.

    Without a last one: the code that connects one.
    """
    program = one_line(str(lease.get("program", "")))
    if not program:
        return f"EpisodeStream.of({orjson.dumps(str(run_dir)).decode()})"
    if Path(program).name == "headrace" or program.startswith("python -m headrace"):
        return _in(run_dir, "learner")
    return ""


def client_addresses(at: Endpoints) -> str:
    """Return the addresses to which clients connect, as text."""
    return _addresses([at[name] for name in sorted(at) if name.startswith(("clients-", "http-"))])


def _learner_lines(config: FleetConfig, at: Endpoints) -> str:
    keys = f', keys="{config.keys.dir}"' if config.keys.dir else ""
    where = f'"{_reachable(at["learner"])}"{keys}'
    return (
        "    from headrace import EpisodeStream, WeightPublisher\n"
        f"    stream, weights = EpisodeStream({where}), WeightPublisher({where})\n"
        "    weights.publish(module.state_dict())  # then: for batch in stream: ..."
    )


def _settings(config: FleetConfig, prefixes: tuple[str, ...]) -> str:
    """Return, as options for a shell, the settings under these prefixes that are not at their defaults."""
    words, defaults = [], known_keys()
    for key, value in by_key(config.model_dump(mode="json")).items():
        if key.startswith(prefixes) and value != defaults[key]:
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            words += ["--set", f"{key}={text}"]
    return "".join(f" {to_paste(word)}" for word in words)


def _reachable(endpoint: str) -> str:
    """Return the endpoint with this machine's name in place of the wildcard address."""
    return endpoint.replace("//0.0.0.0:", f"//{platform.node()}:").replace("//[::]:", f"//{platform.node()}:")


def _addresses(found: Sequence[str]) -> str:
    more = len(found) - _SHOWN_ADDRESSES
    return " or ".join(found[:_SHOWN_ADDRESSES]) + (f" or {more} more, in fleet.json" if more > 0 else "")
