"""A runner's counters, as plain integers that are true after every poll, its timers, and the failures of its envs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from headrace.schemas.accounts.env_errors import (
    INFO_LEFT_OUT,
    MOST_GROUPS,
    MOST_TOLD_TASKS,
    MOST_TRACEBACK,
    OTHERS,
    EnvErrorGroup,
    fingerprint_of,
)
from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.basics.bounds import MOST_TASKS, OTHER_TASKS
from headrace.schemas.basics.printable import one_line
from headrace.schemas.chunks.batch import MOST_ENDED
from headrace.workers.metrics.call_mark import CallMark
from headrace.workers.metrics.timers import Timers

log = logging.getLogger(__name__)

_NOTING = threading.Lock()
"""The ports of a served env note what they see in threads of their own."""


class FailureGroups:
    """At most `MOST_GROUPS` groups, and one for all further failures. Counts are of this life."""

    def __init__(self) -> None:
        self._groups: dict[str, EnvErrorGroup] = {}
        self._left_out: dict[str, tuple[int, str, float, float]] = {}
        """Place in an info -> (how many infos go without it, the newest in words, times of the first and the last)."""
        self._turn = 0

    def note(
        self,
        kind: str,
        env: str,
        exception: str,
        where: str,
        message: str,
        read_traceback: Callable[[], str],
        task: str = "",
    ) -> None:
        """Count a failure, of an episode with this task or without one. Read the traceback only for a new group."""
        env, exception, where, now = env[:200], exception[:200], where[-300:], time.time()
        name = fingerprint_of(kind, env, exception, where)
        if name not in self._groups and len(self._groups) + len(self._left_out) >= MOST_GROUPS:
            name, kind, exception, where = OTHERS, OTHERS, "", ""
        known = self._groups.get(name)
        if known is None:
            known = EnvErrorGroup(
                kind=kind, env=env, exception=exception, where=where, first_unix_s=now, traceback=read_traceback()
            )
        else:
            known = known.model_copy(update={"count": known.count + 1})
        tasks = [*known.tasks, task][-MOST_TOLD_TASKS:] if task or known.tasks else []
        self._groups[name] = known.model_copy(update={"message": message[:500], "last_unix_s": now, "tasks": tasks})

    def note_left_out(self, place: str, told: str) -> int:
        """Count what an info goes without, and return how often by now; 0 where no group is left for it."""
        if place not in self._left_out and len(self._groups) + len(self._left_out) >= MOST_GROUPS // 2:
            place, told = "", "infos go without further values"  # the other groups are for failures
            if place not in self._left_out and len(self._groups) + len(self._left_out) >= MOST_GROUPS:
                return 0
        now = time.time()
        times, _, first, _ = self._left_out.get(place, (0, "", now, now))
        self._left_out[place] = times + 1, told, first, now
        return times + 1

    def next(self) -> EnvErrorGroup | None:
        """Return the next group in turn, for ever; None without any."""
        groups = self.all()
        if not groups:
            return None
        self._turn = (self._turn + 1) % len(groups)
        return groups[self._turn]

    def all(self) -> list[EnvErrorGroup]:
        """Return all groups."""
        left_out = [
            EnvErrorGroup(
                kind=INFO_LEFT_OUT, where=place, message=told[:500], count=times, first_unix_s=first, last_unix_s=last
            )
            for place, (times, told, first, last) in list(self._left_out.items())
        ]
        return [*self._groups.values(), *left_out]


def last_bytes(text: str) -> str:
    """Return the end of a traceback, where its error is, in at most `MOST_TRACEBACK` bytes."""
    return text.encode(errors="replace")[-MOST_TRACEBACK:].decode(errors="ignore")


def first_bytes(text: str) -> str:
    """Return the beginning of a stack whose newest call comes first, in at most `MOST_TRACEBACK` bytes."""
    return text.encode(errors="replace")[:MOST_TRACEBACK].decode(errors="ignore")


def _reported(name: str) -> int:
    """Declare a counter that a runner's report has under `name`, summed up over all lives of the slot."""
    counter: int = field(default=0, metadata={"report": name})
    return counter


@dataclass(slots=True)
class RunnerTotals:
    """Agent steps since the runner was built: stepped = open + discarded + delivered, at any moment.

    A step counts once `env.step` has returned. `open` steps are in the fragment, or wait for the observation that
    completes them. `delivered` steps were in a batch. With one agent in an env, its steps are the env's.

    Counters with the name of a counter of `WorkerTotals` (`schemas/accounts/ledger.py`) go to the broker with each
    batch.
    """

    stepped: int = 0
    open: int = 0
    delivered: int = 0
    delivered_chunks: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    env_steps: int = 0
    env_steps_delivered: int = 0
    """Env steps whose agents' steps were delivered, or still wait for the observation that completes them."""
    env_steps_discarded: int = _reported("num_env_steps_discarded_lifetime")
    """Env steps of abandoned episodes, counted from their last cut."""
    episodes: int = 0
    env_failures: int = _reported("num_env_step_failures_lifetime")
    newest_env_failure: str = field(default="", compare=False)
    """The newest env failure in words: its kind, env, place and error."""
    failure_groups: FailureGroups = field(default_factory=FailureGroups, compare=False)
    env_rebuilds: int = _reported("num_env_rebuilds_lifetime")
    observations_outside: int = 0
    """Observations with values outside their Box, which were delivered as told."""
    named_excess: dict[tuple[str, str], float] = field(default_factory=dict, compare=False)
    """(env, part of its observation) -> how far outside its Box it was when the log last named it."""
    aborted: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MOST_ENDED), compare=False)
    """(return, env steps) of episodes that were aborted and are in no batch header yet."""
    ended_by_task: dict[str, tuple[int, float, int]] = field(default_factory=dict, compare=False)
    """Task -> (episodes, sum of returns, sum of env steps) of those that ended and are in no batch header yet."""
    timers: Timers = field(default_factory=Timers, compare=False)
    calls: CallMark = field(default_factory=CallMark, compare=False)
    kept: Any = field(default=None, compare=False)
    """The `KeptFailures` of a worker, which keeps failed episodes so that they can be repeated. None: none are kept."""

    def count_ended(self, task: str, episode_return: float, length: int) -> None:
        """Count an episode that ended, by the name of its task."""
        name = task if task in self.ended_by_task or len(self.ended_by_task) < MOST_TASKS else OTHER_TASKS
        episodes, returns, lengths = self.ended_by_task.get(name, (0, 0.0, 0))
        if math.isfinite(returns + episode_return):
            self.ended_by_task[name] = episodes + 1, returns + episode_return, lengths + length

    def note_left_out(self, left_out: Sequence[str]) -> None:
        """Count what infos go without, each as "PLACE (why)". Log it the first time, the tenth, and so on."""
        with _NOTING:
            for name in left_out:
                times = self.failure_groups.note_left_out(name.partition(" (")[0][:300], f"infos go without {name}")
                if f"{times}".strip("0") == "1":
                    log.warning("infos go without %s, %s so far; tell plain values instead", name, f"{times:,}")

    def note_outside(self, env: str, observations: int, farthest: Mapping[str, tuple[float, float]]) -> None:
        """Count observations outside their Box. Name each part of them in the log, again once it is ten times as far.

        `farthest`: part -> (the value farthest outside, the bound it has left).
        """
        with _NOTING:
            self.observations_outside += observations
            for part, (value, bound) in farthest.items():
                excess, named = abs(value - bound), self.named_excess.get((env, part))
                if named is None or 10 * named <= excess != named:  # both may be infinite
                    self.named_excess[env, part] = excess
                    told = f"{one_line(part)} of {one_line(env)} is {value:.6g}, and its Box ends at {bound:.6g}"
                    log.warning("%s; delivered as told and counted (sampling.strict_bounds = true fails the env)", told)

    def discard(self, reason: Discard, steps: int, env_steps: int | None = None) -> None:
        """Count `steps` that will not become a chunk, open or never opened. `env_steps` None: each was an env step."""
        self.env_steps_discarded += steps if env_steps is None else env_steps
        if steps:
            self.discarded[reason.value] = self.discarded.get(reason.value, 0) + steps


REPORTED = {name: one.name for one in fields(RunnerTotals) if (name := one.metadata.get("report"))}
"""The counters of `RunnerTotals` by their names in a report."""
