"""The commands of Redis that a fleet uses, and so the rights that its users need. `headrace keys redis` makes them.

A command that is missing here is refused to such a user, and a test with a real fleet fails. What `headrace chaos` does
to a server of its own is not part of it.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import NoPermissionError

from headrace.schemas.accounts.redis_keys import CHECK, key_name

WRITER, READER = "writer", "reader"
USERS = (WRITER, READER)
"""The users of a fleet: broker, supervisor and learner connect as the writer; programs that only read connect as the
reader.
"""

_KEY, _STREAM = "{key}", "{stream}"
_SCRIPT = "return 1"
_SCRIPT_ID = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class RedisCommand:
    """A command, named as in ACL rules. `user` is WRITER if only the writer may use it, READER if both may.

    `trial`: arguments with which the command does no harm. None: every connection that needs the command has used it
    already.
    """

    name: str
    user: str
    trial: tuple[str, ...] | None = ()


# In this order the trials succeed, and leave no key in Redis.
COMMANDS = (
    RedisCommand("ping", READER),
    RedisCommand("select", READER, None),
    RedisCommand("info", WRITER, ("memory",)),
    RedisCommand("set", WRITER, (_KEY, "may this fleet write?", "PX", "1000")),
    RedisCommand("get", READER, (_KEY,)),
    RedisCommand("type", READER, (_KEY,)),
    RedisCommand("unlink", WRITER, (_KEY,)),
    RedisCommand("hset", WRITER, (_KEY, "count", "1")),
    RedisCommand("persist", WRITER, (_KEY,)),
    RedisCommand("pexpire", WRITER, (_KEY, "1000")),
    RedisCommand("expire", WRITER, (_KEY, "1")),
    RedisCommand("hget", READER, (_KEY, "count")),
    RedisCommand("hgetall", READER, (_KEY,)),
    RedisCommand("hkeys", READER, (_KEY,)),
    RedisCommand("hmget", READER, (_KEY, "count")),
    RedisCommand("hstrlen", READER, (_KEY, "count")),
    RedisCommand("hincrby", WRITER, (_KEY, "count", "1")),
    RedisCommand("hdel", WRITER, (_KEY, "count")),
    RedisCommand("xadd", WRITER, (_STREAM, "1-1", "is", "a trial")),
    RedisCommand("xrange", READER, (_STREAM, "-", "+")),
    RedisCommand("xrevrange", READER, (_STREAM, "+", "-", "COUNT", "1")),
    RedisCommand("del", WRITER, (_KEY, _STREAM)),
    RedisCommand("eval", WRITER, (_SCRIPT, "0")),
    RedisCommand("script|load", WRITER, (_SCRIPT,)),
    RedisCommand("evalsha", WRITER, (_SCRIPT_ID, "0")),
    RedisCommand("multi", READER),
    RedisCommand("exec", READER),
)
DASHBOARD_COMMANDS = ("exists", "hexists", "hlen", "hscan", "ttl", "pttl", "xlen", "xread")
"""Further commands of the reader, for dashboards. None lists keys: no rule could limit that to the fleet's."""


def user_name(fleet_id: str, user: str) -> str:
    """Return the name in Redis of one of a fleet's users."""
    return f"headrace-{fleet_id}-{user}"


def user_rules(fleet_id: str, user: str, password: str) -> list[str]:
    """Return the rules of a user, after `ACL SETUSER NAME`. They have a digest of the password."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    if user == WRITER:
        allowed = [command.name for command in COMMANDS]
    else:
        allowed = [command.name for command in COMMANDS if command.user == READER] + list(DASHBOARD_COMMANDS)
    return ["reset", "on", f"#{digest}", f"~headrace:{{{fleet_id}}}:*", *(f"+{name}" for name in sorted(allowed))]


@dataclass(frozen=True, slots=True)
class Lacking:
    """The rights that the writer of a fleet lacks: commands by name, and whether the fleet's keys are closed to it."""

    commands: tuple[str, ...]
    keys: bool


def lacking_rights(client: redis.Redis, fleet_id: str) -> Lacking | None:
    """Try every command on temporary keys of the fleet. Return the rights that the user lacks; None if it lacks none.

    May raise the errors in `client.REDIS_FAILURES`, also for commands that the server refuses to all users.
    """
    names = {word: key_name(fleet_id, CHECK, one=secrets.token_hex(4)) for word in (_KEY, _STREAM)}
    tried = [command for command in COMMANDS if command.trial is not None]
    with client.pipeline(transaction=False) as pipe:
        ask: Any = pipe.execute_command
        for command in tried:
            words = [names.get(word, word) for word in command.trial or ()]
            ask(*command.name.upper().split("|"), *words)
        answers = pipe.execute(raise_on_error=False)
    refused = [
        (command.name.upper().replace("|", " "), "access" in str(answer))
        for command, answer in zip(tried, answers, strict=True)
        if isinstance(answer, NoPermissionError)
    ]
    if refused:
        return Lacking(tuple(name for name, by_key in refused if not by_key), any(by_key for _, by_key in refused))
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return None
