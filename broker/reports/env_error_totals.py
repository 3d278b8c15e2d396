"""Failures of envs in groups, over all workers and lives, for Redis.

Each worker tells the counts of its life, one group in each heartbeat. The broker adds what is new in them. So a
repeated heartbeat adds nothing, and a lost one costs nothing. The broker keeps what the newest life of each slot has
told. Earlier lives tell nothing more. Redis and `lifetime_file.py` keep it too, so a broker that starts later goes on
counting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.accounts.env_errors import MOST_GROUPS as MOST_OF_A_LIFE
from headrace.schemas.accounts.env_errors import MOST_SLOTS, OTHERS, EnvErrorGroup, EnvErrorRow
from headrace.schemas.accounts.redis_keys import source_name
from headrace.schemas.basics.bounds import MOST_COUNT

MOST_GROUPS = 100
"""Most groups in Redis. Beyond that number the group seen longest ago is added to `OTHERS`."""


@dataclass(slots=True)
class _Life:
    incarnation: int
    told: dict[str, int] = field(default_factory=dict)
    """By fingerprint, failures of this life that are counted already."""


class EnvErrors:
    """The groups of a fleet."""

    def __init__(self) -> None:
        self._groups: dict[str, EnvErrorRow] = {}
        self._lives: dict[int, _Life] = {}
        self._rows: dict[str, Mapping[str, Any]] = {}
        """Rows of the groups that have not changed since `rows` made them."""

    def take(self, slot: int, incarnation: int, group: EnvErrorGroup, unix_s: float) -> int:
        """Take what a life has told of a group, and return how many failures are new.

        A life older than the newest of its slot is ignored.
        """
        life = self._lives.get(slot)
        if life is None or incarnation > life.incarnation:
            self._forget(slot)
            life = self._lives[slot] = _Life(incarnation)
        name = group.fingerprint
        if incarnation < life.incarnation or (name not in life.told and len(life.told) > MOST_OF_A_LIFE):
            return 0
        more = group.count - life.told.get(name, 0)
        if more > 0:
            life.told[name] = group.count
            last = min(group.last_unix_s, unix_s)
            self._add(name, group, more, min(group.first_unix_s, last), last, [slot])
        return max(0, more)

    def _add(
        self, name: str, group: EnvErrorGroup, count: int, first_unix_s: float, last_unix_s: float, slots: list[int]
    ) -> None:
        known, tasks = self._groups.get(name), group.tasks
        if known is not None:
            count, first_unix_s = known.count + count, min(known.first_unix_s, first_unix_s)
            slots = [*(slot for slot in known.slots if slot not in slots), *slots]
            tasks = [*known.tasks, *tasks]
            group = group if last_unix_s >= known.last_unix_s else known
            last_unix_s = max(known.last_unix_s, last_unix_s)
        self._groups[name] = EnvErrorRow.model_construct(
            **{fact: getattr(group, fact) for fact in ("kind", "env", "exception", "where", "message", "traceback")},
            count=min(count, MOST_COUNT),
            first_unix_s=first_unix_s,
            last_unix_s=last_unix_s,
            slots=slots[-MOST_SLOTS:],
            tasks=[*dict.fromkeys(task for task in reversed(tasks) if task)][MOST_SLOTS - 1 :: -1],
            lives={},
        )
        self._rows.pop(name, None)
        if len(self._groups) > MOST_GROUPS:
            self._sum_up()

    def _sum_up(self) -> None:
        """Add the group that was seen the longest ago to `OTHERS`."""
        name = min((name for name in self._groups if name != OTHERS), key=lambda name: self._groups[name].last_unix_s)
        gone = self._groups.pop(name)
        self._rows.pop(name, None)
        others = EnvErrorGroup(kind=OTHERS, message=gone.message, last_unix_s=gone.last_unix_s)
        self._add(OTHERS, others, gone.count, gone.first_unix_s, gone.last_unix_s, gone.slots)

    def _forget(self, slot: int) -> None:
        """Forget the life of a slot that a newer one follows. Its failures stay counted."""
        life = self._lives.pop(slot, None)
        for name in life.told if life is not None else ():
            self._rows.pop(name, None)

    def rows(self) -> dict[str, Mapping[str, Any]]:
        """Return all groups as Redis has them, by fingerprint. A group without news is the same object as before."""
        for name, group in self._groups.items():
            if name not in self._rows:
                lives = {
                    source_name(slot, life.incarnation): life.told[name]
                    for slot, life in self._lives.items()
                    if name in life.told
                }
                self._rows[name] = {**group.model_dump(), "lives": lives}
        return {name: self._rows[name] for name in self._groups}

    def go_on_from(self, saved: Mapping[str, EnvErrorRow]) -> None:
        """Take over what an earlier broker of this fleet saved.

        Failures that live workers have reported since then count once.
        """
        for name, row in sorted(saved.items(), key=lambda item: item[1].last_unix_s):
            twice = 0
            for source, told in row.lives.items():
                slot, incarnation = map(int, source.split("/"))
                life = self._lives.setdefault(slot, _Life(incarnation))
                if incarnation > life.incarnation:
                    self._forget(slot)
                    life = self._lives[slot] = _Life(incarnation)
                if incarnation == life.incarnation:
                    ours = life.told.get(name, 0)
                    twice += min(ours, told)
                    life.told[name] = max(ours, told)
            self._add(name, row, max(0, row.count - twice), row.first_unix_s, row.last_unix_s, row.slots)
