"""Limits how long a sampler of external envs waits: for more steps before it ships, and for any client at all."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.schemas.errors import EnvError
from headrace.schemas.settings.sampling_settings import EXTERNAL_PATIENCE_S
from headrace.workers.envs.driver import ExternalDriver


class ExternalWait:
    """The waiting times of one sampler of `envs`, counted from `begin`."""

    def __init__(self, max_age_s: float, envs: ExternalDriver, read_version: Callable[[], tuple[int, int]]) -> None:
        self._envs = envs
        envs.read_version = read_version
        self._max_age_s = max_age_s
        self._begun_at = time.monotonic()
        self._has_polled = False

    def begin(self) -> None:
        """Start the clocks of a fragment."""
        self._has_polled = False
        self._begun_at = self._envs.heard_at = time.monotonic()

    @property
    def is_overdue(self) -> bool:
        """Return whether to ship the collected steps, because further ones may come late or never.

        False before the first poll, because a busy machine may take longer than the limit to start it.
        """
        return self._has_polled and time.monotonic() - self._begun_at >= self._max_age_s

    def check(self) -> None:
        """Begin a poll. Raise `EnvError` if no client spoke for 300 s."""
        self._has_polled = True
        if time.monotonic() - self._envs.heard_at > EXTERNAL_PATIENCE_S:
            raise EnvError(
                f"sample() got no call about an external episode for {EXTERNAL_PATIENCE_S:g} s "
                f"({self._envs.open_episodes} are open); what was sampled is kept for the next call"
            )
