"""The commands of Redis that a fleet uses, and so the rights that its users need. `headrace keys redis` makes them.

A command that is missing here is refused to such a user, and a test with a real fleet fails. What `headrace chaos` does
to a server of its own is not part of it.
"""

from __future__ import annotations

import hashlib
import secrets

import redis

from headrace.schemas.accounts.redis_keys import CHECK, key_name

WRITER, READER = "writer", "reader"
USERS = (WRITER, READER)
"""The users of a fleet: broker, supervisor and learner connect as the writer; programs that only read connect as the
reader.
"""

READS = (
    *("exec", "get", "hget", "hgetall", "hkeys", "hmget", "multi", "ping", "select", "type"),
    *("xrange", "xrevrange"),
)
"""Commands of both users, named as in ACL rules."""
WRITES = (
    *("del", "eval", "evalsha", "expire", "hdel", "hset", "info", "persist", "pexpire", "script|load"),
    *("set", "unlink", "xadd"),
)
"""Commands that only the writer may use."""
DASHBOARD_COMMANDS = ("exists", "hexists", "hlen", "hscan", "ttl", "pttl", "xlen", "xread")
"""Further commands of the reader, for dashboards. None lists keys: no rule could limit that to the fleet's."""


def user_name(fleet_id: str, user: str) -> str:
    """Return the name in Redis of one of a fleet's users."""
    return f"headrace-{fleet_id}-{user}"


def user_rules(fleet_id: str, user: str, password: str) -> list[str]:
    """Return the rules of a user, after `ACL SETUSER NAME`. They have a digest of the password."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    allowed = READS + (WRITES if user == WRITER else DASHBOARD_COMMANDS)
    return ["reset", "on", f"#{digest}", f"~headrace:{{{fleet_id}}}:*", *(f"+{name}" for name in sorted(allowed))]


def try_rights(client: redis.Redis, fleet_id: str) -> None:
    """Write, run a script on and delete a temporary key of the fleet. May raise the errors in `client.REDIS_FAILURES`.

    `NoPermissionError` names a command, or says that the fleet's keys are closed to the user.
    """
    key = key_name(fleet_id, CHECK, one=secrets.token_hex(4))
    client.set(key, "may this fleet write?", px=1000)
    client.eval("return redis.call('TYPE', KEYS[1])", 1, key)
    client.delete(key)
