"""Lists the fleets in a Redis and the keys of each, and removes a fleet's keys."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis

from headrace.broker.redis.client import REDIS_FAILURES, RedisReader, ask, connect, unusable
from headrace.broker.redis.parser import HashParser
from headrace.broker.reports.report import LIVE_S
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.errors import RedisUnavailableError
from headrace.schemas.settings.redis_url import without_password

TIMEOUT_S = 5.0
_MANY = 1000
"""Keys that one step of a search looks at, and that one call removes."""
_FLEET_ID = re.compile(rb"headrace:\{(.+)\}:fleet")
_SPECIAL = re.compile(r"([*?\[\]\\])")
_WITH_PARTS = [(re.compile(re.escape(key.name).replace(r"\{version\}", ".+")), key) for key in keys.TABLE]


@dataclass(frozen=True, slots=True)
class FleetEntry:
    """A fleet that has keys: its contract's version as text, and the seconds since its broker reported."""

    fleet_id: str
    contract: str
    reported_age_s: float | None


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key: its name after the prefix, its type, fields or entries, bytes, and seconds until it expires."""

    name: str
    type: str
    length: int
    nbytes: int
    expires_s: float | None

    @property
    def key(self) -> keys.Key | None:
        """Return the contract's entry for this key; None for a key that is not in the contract."""
        return next((key for pattern, key in _WITH_PARTS if pattern.fullmatch(self.name)), None)


class Inventory:
    """The fleets in the Redis at `url`. Use it within `with`. All calls may raise `RedisUnavailableError`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = connect(url, TIMEOUT_S)

    def fleets(self) -> list[FleetEntry]:
        """Return every fleet with a `fleet` key, by name. Looks at all keys of this database."""
        with self._failures():
            found = {match[1] for name in self._matching("headrace:{*}:fleet") if (match := _FLEET_ID.fullmatch(name))}
            return [self._entry(fleet_id.decode(errors="replace")) for fleet_id in sorted(found)]

    def keys(self, fleet_id: str) -> list[KeyEntry]:
        """Return all keys of a fleet, by name."""
        with self._failures():
            return [entry for name in self._names(fleet_id) if (entry := self._describe(name, fleet_id)) is not None]

    def reports(self, fleet_id: str) -> bool:
        """Return whether a broker has reported in the last seconds."""
        with self._failures():
            age_s = self._entry(fleet_id).reported_age_s
        return age_s is not None and age_s < LIVE_S

    def forget(self, fleet_id: str) -> int:
        """Remove all keys of a fleet. Return their number."""
        with self._failures():
            names, count = self._names(fleet_id), 0
            for start in range(0, len(names), _MANY):
                count += int(ask(self._client, "UNLINK", *names[start : start + _MANY]))
            return count

    def _entry(self, fleet_id: str) -> FleetEntry:
        reader, name = RedisReader(self._client), keys.key_name(fleet_id, keys.FLEET)
        reported = HashParser().moment("fleet", reader.field(name, "reported_unix_s"))
        contract = (reader.field(name, "contract_version") or b"").decode(errors="replace")
        return FleetEntry(fleet_id, contract, None if reported is None else time.time() - reported)

    def _names(self, fleet_id: str) -> list[bytes]:
        prefix = f"headrace:{{{fleet_id}}}:"
        return sorted(name for name in self._matching(_SPECIAL.sub(r"\\\1", prefix) + "*"))

    def _matching(self, pattern: str) -> set[bytes]:
        found: Any = self._client.scan_iter(match=pattern, count=_MANY)
        return set(found)

    def _describe(self, name: bytes, fleet_id: str) -> KeyEntry | None:
        kind = ask(self._client, "TYPE", name).decode()
        if kind == "none":
            return None  # the key has expired meanwhile
        sizes = {"hash": "HLEN", "stream": "XLEN", "string": "STRLEN", "list": "LLEN", "set": "SCARD", "zset": "ZCARD"}
        length = int(ask(self._client, sizes[kind], name)) if kind in sizes else 0
        left_ms = int(ask(self._client, "PTTL", name))
        nbytes = int(ask(self._client, "MEMORY", "USAGE", name) or 0)
        own = name.decode(errors="replace").removeprefix(f"headrace:{{{fleet_id}}}:")
        return KeyEntry(own, kind, length, nbytes, left_ms / 1000 if left_ms >= 0 else None)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.NoPermissionError as error:
            advice = "name a user who may list and remove keys; the users of `headrace keys redis` may not"
            raise RedisUnavailableError(without_password(self._url), str(error), TIMEOUT_S, advice) from error
        except REDIS_FAILURES as error:
            raise unusable(self._url, error, TIMEOUT_S) from error

    def __enter__(self) -> Inventory:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
