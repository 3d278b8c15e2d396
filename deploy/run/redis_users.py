"""The users of a fleet in a Redis that others share: a writer and a reader, each with a password in a private URL file.

DIR/redis-writer.url  0600: for `--redis-url` of broker, supervisor and learner
DIR/redis-reader.url  0600: for dashboards and other readers
"""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import redis

from headrace.broker.redis.client import REDIS_FAILURES, ask, connect, unusable
from headrace.broker.redis.commands import READER, USERS, WRITER, user_name, user_rules
from headrace.deploy.run.key_pairs import writing_keys
from headrace.deploy.run.options import named_redis
from headrace.schemas.basics.run_files import replace_private
from headrace.schemas.errors import ConfigError, KeysError, RedisUnavailableError
from headrace.schemas.settings.redis_url import without_password

TIMEOUT_S = 2.0
_ANY_SERVER = "redis://127.0.0.1:6379/0"


@dataclass(frozen=True, slots=True)
class RedisUsers:
    """The URL of each user of a fleet, which is also in its file in `folder`."""

    fleet_id: str
    folder: Path
    urls: dict[str, str]

    def file(self, user: str) -> Path:
        """Return the file with the URL of a user."""
        return _file(self.folder, user)

    def commands(self) -> list[list[str]]:
        """Return the commands of an administrator that make both users, or give them these rights and passwords."""
        return [
            ["ACL", "SETUSER", user_name(self.fleet_id, user), *user_rules(self.fleet_id, user, _password(url))]
            for user, url in self.urls.items()
        ]


def make_users(folder: Path, fleet_id: str, server: str = "", *, force: bool = False) -> RedisUsers:
    """Write the files of both users. Keep existing passwords, unless `force`.

    `server` is the URL of an administrator, or a file that has it. Its address goes into both files; "": keep the
    address in the files. Raises `ConfigError`, `KeysError` for a folder or a file that is not ours, and
    `RedisUnavailableError` if the server refuses the administrator. The files then stay as they are.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", fleet_id):
        raise ConfigError("name the fleet, by letters, digits, dots, - and _", key="--fleet-id")
    with writing_keys(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if mode := folder.stat().st_mode & 0o077:
            raise KeysError(str(folder), f"others may look into it (mode {mode:03o} for them); chmod 700 {folder}")
        urls = {user: _url_of(folder, fleet_id, user, server, force=force) for user in USERS}
        if server:
            _check_answers(_read_url(server, "--redis-url"))
        for user, url in urls.items():
            replace_private(_file(folder, user), f"{url}\n".encode())
    return RedisUsers(fleet_id, folder, urls)


def apply(users: RedisUsers, admin_url: str) -> str:
    """Make the users in Redis. Return a sentence on whether they outlive a restart of the server.

    Raises `RedisUnavailableError`, also for a URL whose user may not manage users.
    """
    with contextlib.closing(connect(admin_url, TIMEOUT_S)) as client:
        try:
            for command in users.commands():
                ask(client, *command)
            return _persisted(client)
        except redis.exceptions.NoPermissionError as error:
            raise RedisUnavailableError(
                without_password(admin_url),
                "its user may not manage users",
                TIMEOUT_S,
                "name an administrator by --redis-url, or leave it out, and give one the lines that are printed then",
            ) from error
        except REDIS_FAILURES as error:
            raise unusable(admin_url, error, TIMEOUT_S, "correct --redis-url") from error


def what_to_do(users: RedisUsers, applied: str) -> str:
    """Return text for people on the two files and how to use them. `applied` is the result of `apply`, or ""."""
    writer, reader = users.file(WRITER), users.file(READER)
    keys = f"headrace:{{{users.fleet_id}}}:*"
    if applied:
        made = [f"Redis has these users now. They can use the keys {keys} alone. {applied}"]
    else:
        made = [
            "Paste these lines into redis-cli as an administrator. They have digests of the passwords.",
            *(f"  {' '.join(command)}" for command in users.commands()),
            "Then keep them: ACL SAVE where the server has an aclfile, else CONFIG REWRITE.",
            "Put the address of your server into both files if it is not "
            f"{urlsplit(users.urls[WRITER]).netloc.rpartition('@')[2]}.",
        ]
    return "\n".join(
        (
            f"{writer} has the URL of {user_name(users.fleet_id, WRITER)}, for the fleet",
            f"{reader} has the URL of {user_name(users.fleet_id, READER)}, for dashboards; it cannot write",
            "",
            *made,
            "",
            "Start the fleet with",
            f"  headrace up --set fleet.fleet_id={users.fleet_id} --redis-url {writer}",
        )
    )


def _check_answers(admin_url: str) -> None:
    with contextlib.closing(connect(admin_url, TIMEOUT_S)) as client:
        try:
            ask(client, "PING")
        except redis.exceptions.NoPermissionError:
            return  # the user may still manage users
        except REDIS_FAILURES as error:
            raise unusable(admin_url, error, TIMEOUT_S, "correct --redis-url") from error


def _url_of(folder: Path, fleet_id: str, user: str, server: str, *, force: bool) -> str:
    path, name = _file(folder, user), user_name(fleet_id, user)
    known = _read_url(str(path), str(path)) if path.exists() and not (force and server) else ""
    password = secrets.token_hex(32)
    if known and not force:
        if urlsplit(known).username != name or not _password(known):
            raise KeysError(str(path), f"it is not of {name}; name another --dir, or replace it by --force")
        password = _password(known)
    address = _without_user(_read_url(server, "--redis-url") if server else known or _ANY_SERVER)
    scheme, rest = address.split("://", 1)
    return f"{scheme}://{name}:{quote(password, safe='')}@{rest}"


def _without_user(url: str) -> str:
    """Return the address in a URL, with its files of TLS, and without a name or password."""
    parts = urlsplit(url)
    options = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("username", "password")]
    query = urlencode(options, quote_via=quote, safe="/")
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, query, ""))


def _read_url(text: str, key: str) -> str:
    url = named_redis(text, key)
    connect(url).close()  # raises for a text that is no URL; opens no connection
    return url


def _password(url: str) -> str:
    return unquote(urlsplit(url).password or "")


def _file(folder: Path, user: str) -> Path:
    return folder / f"redis-{user}.url"


def _persisted(client: redis.Redis) -> str:
    """Let the server save its users if it has an aclfile. Return a sentence on whether they are saved."""
    try:
        if client.config_get("aclfile").get("aclfile"):
            ask(client, "ACL", "SAVE")
            return "They are saved in its aclfile."
        why = "It has no aclfile"
    except redis.exceptions.ResponseError as error:
        why = f"It does not say whether it saves them ({str(error)[:80]})"
    return f"{why}: they last until it restarts, unless you run CONFIG REWRITE there; this command makes them again."
