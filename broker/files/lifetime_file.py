"""run_dir/lifetime.json: counters, sums, env failures and tasks of earlier lives, for an empty Redis. Mode 0600.

Redis has them too, and its values are the newer ones. The reporter's thread writes the file when they have changed, and
pauses after each write by its size.

The file also has a sum of all lives that have ended, added up life by life. It is a witness: no broker goes on from it,
and the audit compares the ledger with it. So the loss of books.json and Redis together cannot go unseen. A damaged file
is a finding of the audit. The broker keeps it as lifetime.json.damaged, a finding too until a person deletes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from headrace.broker.files.books_file import EndedLives
from headrace.broker.redis.parser import HashParser
from headrace.schemas.accounts.env_errors import EnvErrorRow
from headrace.schemas.accounts.folded_lives import FoldedLives, fold
from headrace.schemas.accounts.logged_metrics import SumsOfLife
from headrace.schemas.accounts.runner_counters import Counters
from headrace.schemas.basics.run_files import read_regular, replace_private
from headrace.schemas.errors import reading

log = logging.getLogger(__name__)

SHORTEST_PAUSE_S = 1.0
_BYTES_PER_S = 100_000
"""A pause is so long that the file takes no more of the disk, and of this process, in the long run."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The content of the file, as Redis has it under the keys of these names; `env_errors` is `errors` there.

    Redis does not have `ended`.
    """

    runner_state: Mapping[int, Counters] = field(default_factory=dict)
    metric_sums: Mapping[str, SumsOfLife] = field(default_factory=dict)
    env_errors: Mapping[str, EnvErrorRow] = field(default_factory=dict)
    ended: Mapping[int, FoldedLives] = field(default_factory=dict)
    """By slot, the sum of the lives that have ended."""
    damage: str = ""
    """The part of the file that could not be read, in words; "" if it was whole, or if there is none."""
    task_figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class LifetimeFile:
    """The file of one fleet. One thread at a time."""

    def __init__(self, run_dir: Path, fleet_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = run_dir / "lifetime.json"
        self.set_aside = self._path.with_suffix(".json.damaged")
        """Path to which `write` moves a file that `read` has found damaged. The first of several stays."""
        self._is_damaged = False
        self._fleet_id = fleet_id
        self._clock = clock
        self._written = b""
        self._not_before = clock()
        self._ended: dict[int, FoldedLives] = {}
        self._ended_as_json: dict[int, Any] = {}

    def read(self) -> Lifetime:
        """Return the content of the file; empty if there is none. Log and leave out what is damaged.

        Raises `RunDirError` where the disk does not give it: it may be whole.
        """
        lifetime = self._read()
        self._is_damaged = bool(lifetime.damage)
        return lifetime

    def _read(self) -> Lifetime:
        try:
            with reading(self._path, "the sums of earlier lives"):
                text = read_regular(self._path)
            found: Any = orjson.loads(text)
            if found["fleet_id"] != self._fleet_id:
                raise ValueError(f"it is of fleet {found['fleet_id']!r}")
            hashes = [
                {name.encode(): orjson.dumps(value) for name, value in found[kind].items()}
                for kind in ("runner_state", "metric_sums", "env_errors")
            ]
            tasks, ended = (
                {name.encode(): orjson.dumps(value) for name, value in found.get(kind, {}).items()}
                for kind in ("task_figures", "ended")
            )
        except FileNotFoundError:
            return Lifetime()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("%s cannot be used (%s); what it had is known from Redis only", self._path, error)
            return Lifetime(damage=str(error))
        values = HashParser()
        lifetime = Lifetime(
            values.runner_state(hashes[0]),
            values.metric_sums(hashes[1]),
            values.env_errors(hashes[2]),
            values.folded(ended),
            task_figures=values.task_figures(tasks),
            damage="; ".join(values.garbage),
        )
        for sentence in values.garbage:
            log.error("left out a value in %s: %s", self._path.name, sentence)
        for slot, lives in lifetime.ended.items():
            self._keep(slot, lives)
        return lifetime

    def add_ended(self, ended: EndedLives) -> None:
        """Add the lives of `ended` that are not in the sums yet. `write` writes them without a pause.

        A slot without a sum begins with its folded lives.
        """
        for slot, lives in ended.folded.items():
            if slot not in self._ended:
                self._keep(slot, lives)
        for row, counters in zip(ended.rows, ended.counters, strict=False):
            lives_with_it = fold(self._ended.get(row.slot), row, counters)
            if lives_with_it is not None:  # it is not in already
                self._keep(row.slot, lives_with_it)

    def _keep(self, slot: int, lives: FoldedLives) -> None:
        self._ended[slot] = lives
        self._ended_as_json[slot] = lives.model_dump(mode="json")
        self._not_before = self._clock()

    def write(
        self,
        runner_state: Mapping[int, Counters],
        metric_sums: Mapping[str, SumsOfLife],
        env_errors: Mapping[str, Mapping[str, object]],
        task_figures: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
        *,
        last: bool = False,
    ) -> bool:
        """Replace the file if anything has changed and its pause is over, or if this is the `last` write.

        Return False during the pause. Keep one that `read` has found damaged at `set_aside`. Raises `OSError`.
        """
        now = self._clock()
        if now < self._not_before and not last:
            return False
        content = {
            "fleet_id": self._fleet_id,
            "runner_state": runner_state,
            "metric_sums": {name: life.model_dump() for name, life in metric_sums.items()},
            "env_errors": env_errors,
            "task_figures": dict(task_figures),
            "ended": self._ended_as_json,
        }
        text = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
        self._not_before = now + max(SHORTEST_PAUSE_S, len(text) / _BYTES_PER_S)
        if self._is_damaged:
            if not self.set_aside.exists():
                with suppress(FileNotFoundError):  # it was deleted meanwhile
                    self._path.replace(self.set_aside)
            self._is_damaged = False
        if text != self._written:
            replace_private(self._path, text)
            self._written = text
        return True
