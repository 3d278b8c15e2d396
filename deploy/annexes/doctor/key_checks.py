"""Checks of the keys on this machine: are they whole, whose are they, and who else may read them."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from headrace.deploy.annexes.doctor.check import Check, Verdict
from headrace.deploy.run.key_pairs import sound_roles
from headrace.schemas.credentials.keys import TOKEN_FILE
from headrace.schemas.credentials.tokens import read_token
from headrace.schemas.errors import KeysError
from headrace.schemas.settings.config import FleetConfig, is_loopback


def key_checks(config: FleetConfig) -> Iterator[Check]:
    """Check the folder of keys, each file in it, and their modes."""
    if not config.keys.dir:
        yield _without_keys(config)
        return
    folder = Path(config.keys.dir)
    try:
        roles = sound_roles(folder)
        if (folder / TOKEN_FILE).exists():
            read_token(folder / TOKEN_FILE)
    except KeysError as error:
        yield Check("keys", Verdict.FAIL, str(error))
        return
    seen, mode = f"{folder}: {', '.join(roles)}", stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o022:
        yield Check("keys", Verdict.WARN, f"{seen}; others may add files (mode {mode:04o})", f"chmod 700 {folder}")
    else:
        yield Check("keys", Verdict.OK, seen)


def _without_keys(config: FleetConfig) -> Check:
    if is_loopback(config.broker.host):
        return Check("keys", Verdict.OK, "none; only this machine is served")
    return Check("keys", Verdict.WARN, "none; other machines can connect and read along", "headrace keys init")
