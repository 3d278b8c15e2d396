"""The failures of a runner's envs, in groups of the same cause."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.schemas.accounts.env_errors import MOST_GROUPS, MOST_TRACEBACK, OTHERS, EnvErrorGroup, fingerprint_of


class FailureGroups:
    """At most `MOST_GROUPS` groups, and one for all further failures. Counts are of this life."""

    def __init__(self) -> None:
        self._groups: dict[str, EnvErrorGroup] = {}
        self._turn = 0

    def note(
        self, kind: str, env: str, exception: str, where: str, message: str, read_traceback: Callable[[], str]
    ) -> None:
        """Count a failure. Read the traceback only for a new group."""
        env, exception, where, now = env[:200], exception[:200], where[-300:], time.time()
        name = fingerprint_of(kind, env, exception, where)
        if name not in self._groups and len(self._groups) >= MOST_GROUPS:
            name, kind, exception, where = OTHERS, OTHERS, "", ""
        known = self._groups.get(name)
        if known is None:
            known = EnvErrorGroup(
                kind=kind, env=env, exception=exception, where=where, first_unix_s=now, traceback=read_traceback()
            )
        else:
            known = known.model_copy(update={"count": known.count + 1})
        self._groups[name] = known.model_copy(update={"message": message[:500], "last_unix_s": now})

    def next(self) -> EnvErrorGroup | None:
        """Return the next group in turn, for ever; None without any."""
        groups = self.all()
        if not groups:
            return None
        self._turn = (self._turn + 1) % len(groups)
        return groups[self._turn]

    def all(self) -> list[EnvErrorGroup]:
        """Return all groups."""
        return list(self._groups.values())


def last_bytes(text: str) -> str:
    """Return the end of a traceback, where its error is, in at most `MOST_TRACEBACK` bytes."""
    return text.encode(errors="replace")[-MOST_TRACEBACK:].decode(errors="ignore")


def first_bytes(text: str) -> str:
    """Return the beginning of a stack whose newest call comes first, in at most `MOST_TRACEBACK` bytes."""
    return text.encode(errors="replace")[:MOST_TRACEBACK].decode(errors="ignore")
