"""The wait for env hosts while none is connected: its log lines."""

from __future__ import annotations

import logging
import platform
import time
from urllib.parse import urlsplit

from headrace.workers.config import EnvRunnerConfig

log = logging.getLogger(__name__)

_SAY_WAITING_S = 10.0
_PAUSE_S = 5.0
"""Seconds without a call of `look` after which the count starts again: no worker was waiting."""


class HostWait:
    """Measures how long a worker at `endpoint` has waited without any host."""

    def __init__(self, config: EnvRunnerConfig, endpoint: str) -> None:
        self._endpoint = endpoint
        self._remedy = f"headrace env-host --connect {_address(endpoint)} --env {config.env or 'ENV'}"
        self._begin(time.monotonic())
        log.info("waiting for env hosts at %s: %s", endpoint, self._remedy)

    def _begin(self, now: float) -> None:
        self._since = self._looked_at = now
        self._say_at = now + _SAY_WAITING_S

    def look(self, is_one_here: bool, now: float) -> None:
        """Note that the worker waits `now`, in monotonic seconds. Warn from time to time."""
        if is_one_here or now - self._looked_at > _PAUSE_S:
            self._begin(now)
        self._looked_at = now
        if now >= self._say_at:
            self._say_at += _SAY_WAITING_S
            waited_s = now - self._since
            log.warning("no env host at %s for %.0f s; start one: %s", self._endpoint, waited_s, self._remedy)


def _address(endpoint: str) -> str:
    """Return the endpoint as other machines reach it: with this machine's name if it listens at all addresses."""
    url = urlsplit(endpoint)
    return f"tcp://{platform.node()}:{url.port}" if url.hostname in ("0.0.0.0", "::") else endpoint
