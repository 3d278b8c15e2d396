"""Checks of a fleet elsewhere: its rendezvous, whether its addresses are reachable, and whether its key is ours."""

from __future__ import annotations

import time
from collections.abc import Iterator

from headrace.deploy.doctor.check import Check, Verdict
from headrace.deploy.doctor.network import reachability_check
from headrace.schemas.credentials.keys import BROKER, check_fingerprint, client_keys
from headrace.schemas.errors import ConfigError, KeysError, KeysRefusedError
from headrace.schemas.peers.rendezvous import Published, Rendezvous
from headrace.schemas.settings.config import FleetConfig

_ANSWER_S = 6.0
_LOOK_S = 0.1
_ROLES = ("worker", "learner", "weights")


def meeting_checks(config: FleetConfig, where: str) -> Iterator[Check]:
    """Check the rendezvous at `where`, each of its addresses, and that its broker has the key that we expect."""
    try:
        rendezvous = Rendezvous(where, {role: int(getattr(config.broker, f"{role}_port")) for role in _ROLES})
    except ConfigError as error:
        yield Check("rendezvous", Verdict.FAIL, str(error))
        return
    found = _look(rendezvous, is_asked_twice="://" in where)
    addresses = {role: rendezvous.find(role) for role in ("worker", "weights")} if found is not None else {}
    if found is None or not all(addresses.values()):
        yield Check("rendezvous", Verdict.FAIL, rendezvous.problem, "start the fleet, or correct --rendezvous")
        return
    left_s = found.expires_unix_s - time.time()
    good = f", good for {left_s:.0f} s" if left_s < 1e6 else ""
    yield Check("rendezvous", Verdict.OK, f"fleet {found.fleet_id or 'of any name'}{good}")
    for role, address in addresses.items():
        yield reachability_check(f"broker, {role}", address)
    yield _key_check(config, found, where)


def _look(rendezvous: Rendezvous, *, is_asked_twice: bool) -> Published | None:
    """Return the published addresses. A web server answers in the background, so retry it (`is_asked_twice`)."""
    deadline = time.monotonic() + _ANSWER_S
    while (found := rendezvous.look()) is None and is_asked_twice and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return found


def _key_check(config: FleetConfig, found: Published, where: str) -> Check:
    """Check that the broker's key is the one in our folder. `key_checks` has judged the folder itself."""
    try:
        keys = client_keys(config.keys.dir, "worker", config.fleet.run_dir, config.keys.group)
        check_fingerprint(keys, "worker", found.keys.get(BROKER, ""), where)
    except (KeysError, KeysRefusedError) as error:
        return Check("broker key", Verdict.FAIL, str(error))
    return Check("broker key", Verdict.OK, found.keys.get(BROKER, "not told") if keys else "none, and none is asked")
