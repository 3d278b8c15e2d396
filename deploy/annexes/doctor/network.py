"""Checks of ports and addresses: whether ours can be bound and reached, and whether a fleet elsewhere answers."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.deploy.run.joining import env_host_keys
from headrace.schemas.credentials.keys import BROKER, ENV_HOST, check_fingerprint, client_keys, expected_key
from headrace.schemas.errors import ConfigError, KeysError, KeysRefusedError
from headrace.schemas.peers.advertised import host_to_advertise
from headrace.schemas.peers.rendezvous import Published, Rendezvous
from headrace.schemas.peers.worker_port_choice import WorkerPortChoice
from headrace.schemas.settings.config import FleetConfig, is_loopback

CONNECT_S = 3.0
_ANSWER_S, _LOOK_S = 6.0, 0.1
_MOST_WORKERS = 8
"""Workers to which an env host's machine tries to connect at most: each may take `CONNECT_S`."""


def port_checks(config: FleetConfig) -> Iterator[Check]:
    """Check whether each configured port can be bound."""
    broker, sampling = config.broker, config.sampling
    for role, port in broker.ports.items() if broker.host else ():
        yield _port(f"{role} port", broker.host, port, "broker.port")
    if sampling.env_placement == "remote" and config.env_hosts_host:
        first = sampling.env_hosts_port
        for slot in range(config.fleet.workers if first else 1):
            name = f"env hosts {slot}" if first else "env hosts"
            yield _port(name, config.env_hosts_host, first and first + slot, "sampling.env_hosts_port")


def _port(name: str, host: str, port: int, setting: str) -> Check:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            seen = f"{host}:{port} {error.strerror}"
            return Check(name, Verdict.FAIL, seen, f"stop the program that holds it, or choose another {setting}")
    return Check(name, Verdict.OK, f"{host}:{port or 'any free port'}")


def advertised_check(what: str, bound: str, advertise: str, setting: str) -> Check:
    """Check whether other machines can use the address at which we serve: it resolves, and not to loopback.

    `bound`: the host that is bound; `advertise`: the name that the settings give it, or "".
    """
    if is_loopback(bound) and not advertise:
        return Check(what, Verdict.OK, f"{bound}, for this machine alone")
    name = advertise or bound
    try:
        name = host_to_advertise(bound, advertise, setting)
        found = sorted({str(row[4][0]) for row in socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)})
    except (ConfigError, OSError) as error:
        advice = f"give this machine a name that others resolve, or set {setting} to its address"
        return Check(what, Verdict.FAIL, f"{name} does not resolve ({error})", advice)
    seen = f"{name} is {', '.join(found)}" if found != [name] else name
    if all(is_loopback(address.partition("%")[0]) for address in found):
        advice = f"others would connect to themselves: set {setting} to an address of this machine"
        return Check(what, Verdict.FAIL, seen, advice)
    return Check(what, Verdict.OK, seen)


def advertised_checks(config: FleetConfig) -> Iterator[Check]:
    """Check the addresses at which other machines find the broker, and workers that have env hosts."""
    broker = config.broker
    if broker.host:
        yield advertised_check("broker address", broker.host, broker.advertise, "broker.advertise")
    if config.sampling.env_placement == "remote" and config.env_hosts_host:
        advertise = config.worker.advertise
        yield advertised_check("envs' address", config.env_hosts_host, advertise, "worker.advertise")


def reachability_check(what: str, endpoint: str) -> Check:
    """Check whether a TCP connection to `endpoint`, tcp://HOST:PORT, opens in time."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        return Check(what, Verdict.OK, f"{endpoint}, not by TCP")
    try:
        with socket.create_connection((parts.hostname, parts.port), CONNECT_S) as connection:
            ours = connection.getsockname()[0]
    except OSError as error:
        return Check(what, Verdict.FAIL, f"{endpoint}: {_why(error)}", _advice(error, what.partition(",")[0]))
    return Check(what, Verdict.OK, f"{endpoint} answers; our address there is {ours}")


def _why(error: OSError) -> str:
    return f"no answer within {CONNECT_S:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)


def _advice(error: OSError, server: str) -> str:
    if isinstance(error, socket.gaierror):
        return "use a name that this machine resolves, or an address"
    if error.errno == errno.ECONNREFUSED:
        return f"start the {server}, or correct the port"
    return "let this machine through the firewalls between the two"


def meeting_checks(config: FleetConfig, where: str, role: str = "worker") -> Iterator[Check]:
    """Check the rendezvous at `where` as a process of `role` uses it: its addresses and its key."""
    try:
        rendezvous = Rendezvous(where, config.broker.ports)
    except ConfigError as error:
        yield Check("rendezvous", Verdict.FAIL, str(error))
        return
    found = _look(rendezvous, is_asked_twice="://" in where)
    needed = (role, "weights") if role != ENV_HOST else ()
    addresses = {name: rendezvous.find(name) for name in needed} if found is not None else {}
    if found is None or found.state == "stopped" or not all(addresses.values()):
        yield Check("rendezvous", Verdict.FAIL, rendezvous.problem, "start the fleet, or correct --rendezvous")
        return
    yield Check("rendezvous", Verdict.OK, f"fleet {found.fleet_id or 'of any name'}")
    if role == ENV_HOST:
        yield from _workers_checks(config, rendezvous)
        return
    for name, address in addresses.items():
        yield reachability_check(f"broker, {name}", address)
    yield _key_check(config, found, where, role)


def _workers_checks(config: FleetConfig, rendezvous: Rendezvous) -> Iterator[Check]:
    """Check the way from an env host here to the workers that serve env hosts."""
    if rendezvous.where.startswith("dns://"):
        yield Check("workers", Verdict.FAIL, f"{rendezvous.where} names no port", "give --endpoint with a worker's")
        return
    try:
        ports = WorkerPortChoice(rendezvous, "envs", key=expected_key(env_host_keys(config))).ports()
    except KeysError as error:
        yield Check("worker key", Verdict.FAIL, str(error))
        return
    if not ports:
        seen = f"{rendezvous.where} names none that serves env hosts of this machine with these keys"
        yield Check("workers", Verdict.WARN, seen, "start workers with sampling.env_placement = remote")
    for name, port in list(ports.items())[:_MOST_WORKERS]:
        yield reachability_check(f"worker, {name}", port.address)


def _look(rendezvous: Rendezvous, *, is_asked_twice: bool) -> Published | None:
    """Return the published addresses. A web server answers in the background, so retry it (`is_asked_twice`)."""
    deadline = time.monotonic() + _ANSWER_S
    while (found := rendezvous.look()) is None and is_asked_twice and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return found


def _key_check(config: FleetConfig, found: Published, where: str, role: str) -> Check:
    """Check that the broker's key is the one in our folder. `key_checks` has judged the folder itself."""
    try:
        keys = client_keys(config.keys.dir, role, config.keys.group)
        check_fingerprint(keys, role, found.keys.get(BROKER, ""), where)
    except (KeysError, KeysRefusedError) as error:
        return Check("broker key", Verdict.FAIL, str(error))
    return Check("broker key", Verdict.OK, found.keys.get(BROKER, "not told") if keys else "none, and none is asked")
