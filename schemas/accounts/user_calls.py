"""The call of a user's code that is in progress in a worker, and how long it may last.

It needs the standard library alone, as a check of a worker's health reads it from the recorder.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class UserCall(IntEnum):
    """A kind of call of the user's code. The values stand in the recorder's file."""

    NONE = 0
    """Headrace's own code runs, and gives signs of life itself."""
    OTHER = 1
    """The policy, a connector or a callback; or a wait for envs in processes, with signs of life meanwhile."""
    CONSTRUCTION = 2
    RESET = 3
    STEP = 4
    RENDER = 5
    PROCESSES = 6
    """The construction of envs in processes, which have deadlines of their own."""


SETTINGS = {
    UserCall.CONSTRUCTION: "2 * env_reset_timeout_s",
    UserCall.RESET: "env_reset_timeout_s",
    UserCall.STEP: "env_step_timeout_s",
    UserCall.RENDER: "env_step_timeout_s",
}
"""The time limit of each kind of env call, in terms of settings."""


@dataclass(frozen=True, slots=True)
class CallInProgress:
    """A call that is in progress. `lane` is its env; -n: all n envs of a vector, one after the other."""

    kind: UserCall
    lane: int
    limit_s: float
    """Seconds that the call may last."""

    def in_words(self, lasted_s: float) -> str:
        """Say what has been in progress for `lasted_s` seconds, and what limits it."""
        if self.kind is UserCall.PROCESSES:
            return f"envs in processes have been in construction for {lasted_s:.0f} s"
        if self.kind not in SETTINGS:
            return f"the policy, a connector or a callback has not returned for {lasted_s:.0f} s"
        env = f"env {self.lane}" if self.lane >= 0 else "the vector of envs"
        limit = f"{SETTINGS[self.kind]} = {self.limit_s / max(1, -self.lane):g}"
        each = "" if self.lane >= -1 else f", for each of {-self.lane} envs"
        return f"{env} has been in {self.kind.name.lower()} for {lasted_s:.0f} s ({limit}{each})"
