"""A runner's counters, as plain integers that are true after every poll, and its timers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import MOST_ABORTED
from headrace.workers.metrics.failure_groups import FailureGroups
from headrace.workers.metrics.timers import Timers


@dataclass(slots=True)
class RunnerTotals:
    """Agent steps since the runner was built: stepped = open + discarded + delivered, at any moment.

    A step counts once `env.step` has returned. `open` steps are in the fragment, or wait for the observation that
    completes them. `delivered` steps were in a batch. With one agent in an env, its steps are the env's.
    """

    stepped: int = 0
    open: int = 0
    delivered: int = 0
    delivered_chunks: int = 0
    discarded: dict[str, int] = field(default_factory=dict)
    env_steps: int = 0
    env_steps_delivered: int = 0
    """Env steps whose agents' steps were delivered, or still wait for the observation that completes them."""
    env_steps_discarded: int = 0
    """Env steps of abandoned episodes, counted from their last cut."""
    episodes: int = 0
    env_failures: int = 0
    newest_env_failure: str = field(default="", compare=False)
    """The newest of them in words: its kind, env, place and error."""
    failure_groups: FailureGroups = field(default_factory=FailureGroups, compare=False)
    env_rebuilds: int = 0
    aborted: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MOST_ABORTED), compare=False)
    """(return, env steps) of episodes that were given up before their end and are in no batch header yet."""
    timers: Timers = field(default_factory=Timers, compare=False)

    def discard(self, reason: Discard, steps: int, env_steps: int | None = None) -> None:
        """Count `steps`, open or never opened, that will not become a chunk. `env_steps` None: each was an env step."""
        self.env_steps_discarded += steps if env_steps is None else env_steps
        if steps:
            self.discarded[reason.value] = self.discarded.get(reason.value, 0) + steps
