"""The users of a fleet in a Redis that others share: a writer and a reader, each with a password in a private URL file.

DIR/redis-writer.url  0600: for `--redis-url` of broker, supervisor and learner
DIR/redis-reader.url  0600: for dashboards and other readers
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from urllib.parse import unquote

from headrace.broker.redis.commands import READER, USERS, WRITER, user_name, user_rules
from headrace.deploy.run.key_pairs import make_private_folder, writing_keys
from headrace.deploy.run.options import named_redis
from headrace.schemas.basics.run_files import replace_private
from headrace.schemas.errors import ConfigError, KeysError
from headrace.schemas.settings.redis_url import current_url

_ADDRESS = "127.0.0.1:6379"


def make_users(folder: Path, fleet_id: str, *, force: bool = False) -> list[str]:
    """Write the files of both users, unless they are there. Return the commands that make the users in Redis.

    Files that are there keep their password and address, unless `force`. Raises `ConfigError`, and `KeysError` for a
    folder or a file that is not ours.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", fleet_id):
        raise ConfigError("name the fleet, by letters, digits, dots, - and _", key="--fleet-id")
    with writing_keys(folder):
        make_private_folder(folder)
        return [_make_user(folder, fleet_id, user, force=force) for user in USERS]


def what_to_do(folder: Path, fleet_id: str, commands: list[str]) -> str:
    """Return text for people on the two files, the commands, and how to use both."""
    writer, reader = _file(folder, WRITER), _file(folder, READER)
    return "\n".join(
        (
            f"{writer} has the URL of {user_name(fleet_id, WRITER)}, for the fleet",
            f"{reader} has the URL of {user_name(fleet_id, READER)}, for dashboards; it cannot write",
            f"Put the address of your server into both files in place of {_ADDRESS}.",
            "",
            "Paste these lines into redis-cli as an administrator. They have digests of the passwords.",
            *(f"  {command}" for command in commands),
            "Then keep them: ACL SAVE where the server has an aclfile, else CONFIG REWRITE.",
            "",
            "Start the fleet with",
            f"  headrace up --set fleet.fleet_id={fleet_id} --redis-url {writer}",
        )
    )


def _make_user(folder: Path, fleet_id: str, user: str, *, force: bool) -> str:
    path, name = _file(folder, user), user_name(fleet_id, user)
    if force or not path.exists():
        replace_private(path, f"redis://{name}:{secrets.token_hex(32)}@{_ADDRESS}/0\n".encode())
    url = current_url(named_redis(str(path), str(path)))
    found = re.match(rf"rediss?://{re.escape(name)}:([^@/]+)@", url)
    if found is None:
        raise KeysError(str(path), f"it is not of {name}; name another --dir, or replace it by --force")
    return " ".join(("ACL", "SETUSER", name, *user_rules(fleet_id, user, unquote(found[1]))))


def _file(folder: Path, user: str) -> Path:
    return folder / f"redis-{user}.url"
