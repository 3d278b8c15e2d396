"""Key pairs of a fleet: making them, telling which machine needs which, revoking, listing and checking them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.run_files import replace_private, sync_folder
from headrace.schemas.credentials.key_files import (
    PeerKey,
    group_rule,
    is_group,
    key_file,
    key_name,
    read_key_file,
    read_public_key,
)
from headrace.schemas.credentials.keys import BROKER, CLIENT, ENV_HOST, ROLES, TOKEN_FILE, server_of
from headrace.schemas.credentials.known_keys import by_public
from headrace.schemas.errors import KeysError, is_there


def make_keys(folder: Path, *, force: bool = False) -> None:
    """Make a key pair for each role. No other user can read a secret at any moment.

    Raises `KeysError`, also for keys that exist already, unless `force`: then all are replaced, and those on other
    machines become useless.
    """
    _check_curve(folder)
    with writing_keys(folder):
        make_private_folder(folder)
        paths = [folder / f"{role}.{half}" for role in ROLES for half in ("secret", "public")] + [folder / TOKEN_FILE]
        there = [path.name for path in paths if path.exists()]
        if there and not force:
            raise KeysError(str(folder / there[0]), "it is there already; --force replaces it and all others")
        of_groups = [path for half in ("secret", "public", "revoked") for path in folder.glob(f"*.{half}")]
        for path in [*paths, *(of_groups if force else [])]:
            path.unlink(missing_ok=True)
        for role in ROLES:
            _make_pair(folder, role, "")
        _write_new(folder / TOKEN_FILE, f"{secrets.token_urlsafe(32)}\n", 0o600)


def ensure_keys(folder: Path) -> None:
    """Make keys in a folder that has none. Raises `KeysError`."""
    if not (folder / f"{BROKER}.secret").exists():
        make_keys(folder)


def add_key(folder: Path, role: str, group: str) -> PeerKey:
    """Make a key pair of one more group, or one in place of a revoked pair. Raises `KeysError`."""
    _check_curve(folder)
    name = _checked_name(folder, role, group)
    server = folder / f"{server_of(role)}.public"
    if not is_there(server):
        raise KeysError(
            str(server),
            f"there is no such file; headrace keys init --dir {to_paste(folder)} makes the first keys",
        )
    for half in ("secret", "public"):
        if (path := folder / f"{name}.{half}").exists():
            raise KeysError(str(path), "it is there already; headrace keys revoke ends the use of a key")
    with writing_keys(folder):
        return _make_pair(folder, role, group)


def revoke_key(folder: Path, role: str, group: str) -> tuple[PeerKey, Path]:
    """Revoke the key of a role and group for good. Return the key and the path of its revocation file.

    The revocation file stays, so that the broker also refuses a copy of the old public key. It is on the disk before
    the key files are removed, so a crash cannot lose it. Raises `KeysError`.
    """
    name = _checked_name(folder, role, group)
    path = folder / f"{name}.public"
    if not is_there(path):
        raise KeysError(str(path), _why_not_there(folder, name, role))
    key = read_public_key(path)
    revoked = folder / f"{name}.{key.fingerprint}.revoked"
    with writing_keys(folder):
        replace_private(revoked, key_file(role, key.public, group=group).encode(), 0o644)
        sync_folder(folder)
        path.unlink()
        secret = folder / f"{name}.secret"
        if secret.exists() and read_key_file(secret)["public"].encode() == key.public:
            secret.unlink()
    return key, revoked


def _why_not_there(folder: Path, name: str, role: str) -> str:
    """Return the reason why there is no valid key of this name, and what to do."""
    if any(key.revoked and key.name == name for key in _keys_in(folder)):
        return f"the {name} key is revoked already; headrace keys list --dir {to_paste(folder)} shows all keys"
    valid = sorted(key.name for key in _keys_in(folder) if key.role == role and not key.revoked)
    found = f"the {role} keys there are {', '.join(valid[:8])}" if valid else f"there is no {role} key"
    return f"there is no such key; {found}; headrace keys list --dir {to_paste(folder)} shows all keys"


def _keys_in(folder: Path) -> list[PeerKey]:
    """Return the keys whose public half can be read; revoked keys are marked as revoked."""
    keys, unread = list[PeerKey](), set[str]()
    for path in sorted([*folder.glob("*.public"), *folder.glob("*.revoked")]):
        try:
            keys.append(read_public_key(path))
        except KeysError:
            unread |= {path.stem} if path.suffix == ".revoked" else set()
    return list(by_public(keys, unread).values())


def listed_keys(folder: Path) -> list[dict[str, str]]:
    """Return role, group, fingerprint, state and public key of each key in `folder`. Raises `KeysError`.

    The state is "valid", "revoked", or "damaged" for a public half that cannot be read.
    """
    rows = []
    for error in wrong_files(folder):
        path = Path(error.path)
        role, _, group = path.stem.partition(".")
        if path.suffix != ".secret":
            rows.append({"role": role, "group": group, "fingerprint": "", "state": "damaged", "public": ""})
    for key in _keys_in(folder):
        state = "revoked" if key.revoked else "valid"
        own = {"role": key.role, "group": key.group, "fingerprint": key.fingerprint}
        rows.append({**own, "state": state, "public": key.public.decode()})
    return sorted(rows, key=lambda row: (row["role"], row["group"], row["state"]))


def wrong_files(folder: Path) -> list[KeysError]:
    """Return an error for each key file that cannot be used. Raises `KeysError` without a folder."""
    if not (is_there(folder) and folder.is_dir()):
        raise KeysError(str(folder), f"there is no such folder; headrace keys init --dir {to_paste(folder)}")
    checks: dict[str, Callable[[Path], object]] = {
        ".public": read_public_key,
        ".revoked": read_public_key,
        ".secret": check_pair,
    }
    wrong = []
    for path in sorted(path for path in folder.iterdir() if path.suffix in checks):
        try:
            checks[path.suffix](path)
        except KeysError as error:
            wrong.append(error)
    return wrong


def _checked_name(folder: Path, role: str, group: str) -> str:
    roles = [known for known in ROLES if known != BROKER]
    if role not in roles:
        raise KeysError(str(folder), f"{role!r} is no role with groups; they are {', '.join(roles)}")
    if not is_group(group):
        raise KeysError(str(folder), f"{group!r} is no name of a group; {group_rule()}")
    return key_name(role, group)


def _check_curve(folder: Path) -> None:
    if not zmq.has("curve"):
        raise KeysError(str(folder), "this libzmq has no CURVE; pip install --upgrade --force-reinstall pyzmq")


def _make_pair(folder: Path, role: str, group: str) -> PeerKey:
    """Make both files of a key pair. Write the public one last, since a running broker looks for it."""
    public, secret = zmq.curve_keypair()
    name = key_name(role, group)
    _write_new(folder / f"{name}.secret", key_file(role, public, secret, group), 0o600)
    _write_new(folder / f"{name}.public", key_file(role, public, group=group), 0o644)
    return PeerKey(role, group, public)


@contextmanager
def writing_keys(folder: Path) -> Iterator[None]:
    """Turn an `OSError` within the block into the `KeysError` that names the file."""
    try:
        yield
    except OSError as error:
        raise KeysError(str(error.filename or folder), f"it cannot be written: {error.strerror}") from error


def _write_new(path: Path, text: str, mode: int) -> None:
    """Create a file with `mode` from the start. Raises `FileExistsError` for any file or link at its path."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def make_private_folder(folder: Path) -> None:
    """Make a folder that no other user can look into. Raises `KeysError` for one that others can, and `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (mode := folder.stat().st_mode & 0o777) & 0o077:
        raise KeysError(str(folder), f"others may look into it (mode {mode:04o}); chmod 700 {folder}")


def where_to_copy(folder: Path, key: PeerKey) -> str:
    """Return, for people, what to do with a new key."""
    server = server_of(key.role)
    files = f"{{{key.name}.secret,{server}.public}}"
    return "\n".join(
        (
            f"made in {folder}: {key.name}, {key.fingerprint}",
            f"A {server} that runs with this folder admits it within seconds; one with another folder needs "
            f"{key.name}.public there.",
            f"For {_article(key.role)} {key.role}'s machine:",
            f"  ssh HOST mkdir -m 700 keys && scp -p {folder}/{files} HOST:keys/",
            *(f"  {line}" for line in _further_files(key.role, key.name, key.group)),
            _NAMES_FOLDER,
        )
    )


_NAMES_FOLDER = "There --set keys.dir=keys, or HEADRACE_KEYS__DIR, names the folder."


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _further_files(role: str, name: str, group: str) -> list[str]:
    """Return the files beyond its own and its server's that a role needs in some cases, in words."""
    if role != "worker":
        return []
    lines = [
        f"for `headrace worker --count` also: {key_name('supervisor', group)}.secret",
        f"where env hosts of other machines connect to it also: {ENV_HOST}.public",
        f"where it serves clients also: {CLIENT}.public",
    ]
    return [*lines, f"env hosts and clients of these workers also: {name}.public"] if group else lines


def what_to_copy(folder: Path) -> str:
    """Return, for people, which files each machine needs."""
    lines = []
    for role in ROLES:
        if role not in (BROKER, "supervisor"):
            lines.append(f"  {_article(role)} {role}'s machine: {role}.secret {server_of(role)}.public")
            lines += [f"    {line}" for line in _further_files(role, role, "")]
            lines += [f"    by HTTP instead: the word in {TOKEN_FILE}"] if role == CLIENT else []
    return "\n".join(
        (
            f"made in {folder}: {', '.join(ROLES)}",
            "",
            "The broker's machine keeps all of it. Start `headrace up` there, or `headrace broker`, with",
            f"  --set keys.dir={folder}",
            "Other machines get a part of it:",
            *lines,
            "in a folder of mode 700, as in",
            f"  ssh HOST mkdir -m 700 keys && scp -p {folder}/{{worker.secret,{BROKER}.public}} HOST:keys/",
            _NAMES_FOLDER,
            "",
            "A peer with a .secret file has its role: keep these files out of repositories and images.",
        )
    )


def check_pair(path: Path) -> None:
    """Raise `KeysError` unless the two halves in a .secret file are of one key."""
    pair = read_key_file(path)
    if zmq.curve_public(pair["secret"].encode()).decode() != pair["public"]:
        raise KeysError(str(path), "its two halves are of different keys; copy it again")
