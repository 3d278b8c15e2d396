"""Limits how often an env may fail, and how long it waits before it is built again."""

from __future__ import annotations

from collections import deque

from headrace.schemas.errors import CallbackError, EnvContractError, EnvHangError, EnvRestartBudgetError, words_of
from headrace.workers.envs.error_text import seed_hint

BACKOFF_S = 0.05
"""Seconds before the second rebuild in a row. The wait doubles with each further one."""
_LONGEST_BACKOFF = 100.0
"""Waits before a rebuild grow to so many times `BACKOFF_S`."""
_WINDOW_S = 60.0
PER_WINDOW = 75
"""So many times `env_restart_attempts` are tolerated within `_WINDOW_S`, delivered or not."""


class RestartBudget:
    """Counts the failures of one env. The first after a delivery has no wait; the waits after it double."""

    def __init__(self, attempts: int, max_env_seed: int, env_index: int) -> None:
        self.attempts = attempts
        self._max_env_seed, self._env_index = max_env_seed, env_index
        self._recent: deque[float] = deque()
        self.in_a_row = 0

    def delivered(self) -> None:
        """Note that the env has delivered data since it last failed."""
        self.in_a_row = 0

    def change_host(self) -> None:
        """Note that the env is built on another host next. Its failures so far say nothing about that one."""
        self.in_a_row = 0

    def spend(self, error: BaseException, now: float, hint: str = "", about: str = "") -> float:
        """Count one failure, and return the seconds to wait. `hint` and `about`: see `Failure`.

        Raises `EnvRestartBudgetError` if it was one too many.
        """
        self._recent.append(now)
        while self._recent[0] <= now - _WINDOW_S:
            self._recent.popleft()
        self.in_a_row += 1
        if self.in_a_row > self.attempts:
            raise self._exhausted(error, self.in_a_row, now, hint or _remedy(error, about)) from error
        if len(self._recent) > PER_WINDOW * self.attempts:
            raise self._exhausted(error, len(self._recent), now, hint or _remedy(error, about)) from error
        if self.in_a_row == 1:
            return 0.0
        return BACKOFF_S * min(2.0 ** min(self.in_a_row - 2, 60), _LONGEST_BACKOFF)

    def _exhausted(self, error: BaseException, failures: int, now: float, remedy: str) -> EnvRestartBudgetError:
        first = self._recent[-min(failures, len(self._recent))]
        last = words_of(error)
        last += seed_hint(last, self._max_env_seed)
        window_s = round(max(now - first, 0.001), 3)
        return EnvRestartBudgetError(self._env_index, failures, window_s, last, remedy)


def _remedy(error: BaseException, about: str) -> str:
    """Return what helps, in words. More attempts do not help an env that gives something wrong."""
    remedy = "repair the env, or raise env_restart_attempts"
    if isinstance(error, EnvContractError):
        remedy = "give what it should be, in the env or in a wrapper"
    elif isinstance(error, EnvHangError):
        remedy = f"repair the env, or raise {error.setting}"
    elif isinstance(error, CallbackError):
        remedy = "repair the callback"
    return f"{about}; {remedy}" if about else remedy
