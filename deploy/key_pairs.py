"""Key pairs for all roles of a fleet: making them, telling which machine needs which, and checking them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import zmq

from headrace.schemas.errors import KeysError
from headrace.schemas.keys import (
    BROKER,
    ROLES,
    TOKEN_FILE,
    key_file,
    read_broker_keys,
    read_client_keys,
    read_key_file,
    server_of,
)


def make_keys(folder: Path, *, force: bool = False) -> None:
    """Make a key pair for each role. No other user can read a secret at any moment.

    Raises `KeysError`, also for keys that exist already, unless `force`: then all are replaced, and those on other
    machines become useless.
    """
    if not zmq.has("curve"):
        raise KeysError(str(folder), "this libzmq has no CURVE; pip install --upgrade --force-reinstall pyzmq")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (mode := folder.stat().st_mode & 0o777) & 0o077:
            raise KeysError(str(folder), f"others may look into it (mode {mode:04o}); chmod 700 {folder}")
        paths = [folder / f"{role}.{half}" for role in ROLES for half in ("secret", "public")] + [folder / TOKEN_FILE]
        there = [path.name for path in paths if path.exists()]
        if there and not force:
            raise KeysError(str(folder / there[0]), "it is there already; --force replaces it and all others")
        for path in paths:
            path.unlink(missing_ok=True)
        for role in ROLES:
            public, secret = zmq.curve_keypair()
            _write_new(folder / f"{role}.secret", key_file(role, public, secret), 0o600)
            _write_new(folder / f"{role}.public", key_file(role, public), 0o644)
        _write_new(folder / TOKEN_FILE, f"{secrets.token_urlsafe(32)}\n", 0o600)
    except OSError as error:
        raise KeysError(str(error.filename or folder), f"it cannot be written: {error.strerror}") from error


def _write_new(path: Path, text: str, mode: int) -> None:
    """Create a file with `mode` from the start. A link at its path is not followed."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def what_to_copy(folder: Path) -> str:
    """Return, for people, which files each machine needs."""
    clients = [role for role in ROLES if role not in (BROKER, "supervisor")]
    lines = [
        f"  {'an' if role[0] in 'aeiou' else 'a'} {role}'s machine: {role}.secret {server_of(role)}.public"
        for role in clients
    ]
    return "\n".join(
        (
            f"made in {folder}: {', '.join(ROLES)}",
            "",
            "The broker's machine keeps all of it. Start `headrace up` there, or `headrace broker`, with",
            f"  --set keys.dir={folder}",
            "Other machines get a part of it:",
            *lines,
            "as in",
            f"  ssh HOST mkdir -m 700 keys && scp -p {folder}/{{worker.secret,{BROKER}.public}} HOST:keys/",
            "",
            f"Clients of a policy server by HTTP show what stands in {TOKEN_FILE}.",
            "A peer with a .secret file has its role: keep these files out of repositories and images.",
        )
    )


def sound_roles(folder: Path) -> list[str]:
    """Return the roles that this machine can take with the keys in `folder`. Raises `KeysError` for an unsound key."""
    if not folder.is_dir():
        raise KeysError(str(folder), f"there is no such folder; headrace keys init --dir {folder}")
    roles = sorted(path.stem for path in folder.glob("*.secret"))
    if not roles:
        raise KeysError(str(folder), "it has no .secret file; copy those that this machine needs")
    for role in roles:
        _check_pair(folder / f"{role}.secret")
        if role == BROKER:
            read_broker_keys(folder)
        else:
            read_client_keys(folder, role)
    return roles


def _check_pair(path: Path) -> None:
    pair = read_key_file(path)
    if zmq.curve_public(pair["secret"].encode()).decode() != pair["public"]:
        raise KeysError(str(path), "its two halves are of different keys; copy it again")
