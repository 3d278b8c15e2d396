"""Figures by task: episodes with their returns and lengths, and failures of envs.

Episodes come in headers of batches, failures in the groups of env errors. Both count once. Redis and `lifetime_file.py`
keep the counts, so a broker that starts later goes on counting.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.schemas.accounts.env_errors import MOST_TOLD_TASKS
from headrace.schemas.basics.bounds import MOST_COUNT, MOST_TASKS, OTHER_TASKS


@dataclass(slots=True)
class _Counts:
    episodes: int = 0
    failures: int = 0
    last_unix_s: float = 0.0
    recent: deque[tuple[int, float, int]] = field(default_factory=deque)
    """(episodes, sum of their returns, sum of their lengths) of the newest episodes, as headers told them."""

    def row(self) -> dict[str, float]:
        row: dict[str, float] = {"last_unix_s": round(self.last_unix_s, 3)}
        row["episodes"], row["env_failures"] = min(self.episodes, MOST_COUNT), min(self.failures, MOST_COUNT)
        if self.recent:
            episodes, returns, lengths = (sum(told) for told in zip(*self.recent, strict=True))
            row["return_mean"], row["len_mean"] = returns / episodes, lengths / episodes
        return {name: value for name, value in row.items() if math.isfinite(value)}


class TaskFigures:
    """The figures of the `MOST_TASKS` tasks seen last, and of all others together as `OTHER_TASKS`.

    `window`: means are over so many episodes at least, the newest ones.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._tasks: dict[str, _Counts] = {}
        """The task seen the longest ago first."""

    def add_ended(self, task: str, episodes: int, returns: float, lengths: int) -> None:
        """Count episodes that ended, with the sums of their returns and lengths."""
        counts = self._newest(task, time.time())
        counts.episodes += episodes
        self._observe(counts, (episodes, returns, lengths))

    def add_failures(self, tasks: Sequence[str], count: int) -> None:
        """Count the newest `count` failures of a group, of which the newest have these tasks.

        Those before them have no task, or are of other tasks where a group tells no more.
        """
        for task in tasks[-count:] if count else ():
            if task:
                self._newest(task, time.time()).failures += 1
        if count > len(tasks) >= MOST_TOLD_TASKS:
            self._newest(OTHER_TASKS, time.time()).failures += count - len(tasks)

    def rows(self) -> dict[str, dict[str, float]]:
        """Return all figures as Redis has them, by the name of the task."""
        return {task: counts.row() for task, counts in self._tasks.items()}

    def go_on_from(self, saved: Mapping[str, Mapping[str, float]]) -> None:
        """Take over the counts that an earlier broker of this fleet saved.

        They include most failures that this broker has heard of before, as those of a whole life. So it drops these.
        """
        ours, self._tasks = self._tasks, {}
        for task, row in sorted(saved.items(), key=lambda item: item[1].get("last_unix_s", 0.0)):
            episodes, failures = (int(min(max(row.get(n, 0), 0), MOST_COUNT)) for n in ("episodes", "env_failures"))
            self._add(task, _Counts(episodes, failures, row.get("last_unix_s", 0.0)))
        for task, counts in ours.items():
            counts.failures = 0 if saved else counts.failures
            self._add(task, counts)

    def _newest(self, task: str, unix_s: float) -> _Counts:
        """Return the counts of a task, which is the one seen last now. Sum up the one seen the longest ago."""
        counts = self._tasks[task] = self._tasks.pop(task, _Counts())
        counts.last_unix_s = max(counts.last_unix_s, unix_s)
        named = [name for name in self._tasks if name != OTHER_TASKS]
        if len(named) > MOST_TASKS:
            self._add(OTHER_TASKS, self._tasks.pop(named[0]))
        return counts

    def _add(self, task: str, more: _Counts) -> None:
        counts = self._newest(task, more.last_unix_s)
        counts.episodes, counts.failures = counts.episodes + more.episodes, counts.failures + more.failures
        for told in more.recent:
            self._observe(counts, told)

    def _observe(self, counts: _Counts, told: tuple[int, float, int]) -> None:
        recent = counts.recent
        recent.append(told)
        while sum(episodes for episodes, *_ in recent) - recent[0][0] >= self._window:
            recent.popleft()
