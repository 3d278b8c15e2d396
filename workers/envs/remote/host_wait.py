"""While no env host is there: who is waited for, said now and then, and for how long."""

from __future__ import annotations

import logging
import platform
import time
from urllib.parse import urlsplit

from headrace.schemas.errors import NoEnvHostError
from headrace.workers.config import EnvRunnerConfig

log = logging.getLogger(__name__)

_SAY_WAITING_S = 10.0
_PAUSE_S = 5.0
"""After so long without a look nobody was waiting, and the count begins anew."""


class HostWait:
    """Counts the time in which somebody waits at `endpoint` and no host is there."""

    def __init__(self, config: EnvRunnerConfig, endpoint: str) -> None:
        self._timeout_s = config.env_hosts_timeout_s
        self._endpoint = endpoint
        self._remedy = f"headrace env-host --connect {_address(endpoint)} --env {config.env or 'ENV'}"
        self._begin(time.monotonic())
        log.info("waiting for env hosts at %s: %s", endpoint, self._remedy)

    def _begin(self, now: float) -> None:
        self._since = self._looked_at = now
        self._say_at = now + _SAY_WAITING_S

    def look(self, is_one_here: bool, now: float) -> None:
        """Somebody waits at this moment, in monotonic seconds. Raises `NoEnvHostError` after `env_hosts_timeout_s`."""
        if is_one_here or now - self._looked_at > _PAUSE_S:
            self._begin(now)
        self._looked_at = now
        if now >= self._say_at:
            self._say_at += _SAY_WAITING_S
            waited_s = now - self._since
            log.warning("no env host at %s for %.0f s; start one: %s", self._endpoint, waited_s, self._remedy)
        if self._timeout_s is not None and now - self._since >= self._timeout_s:
            self._begin(now)
            raise NoEnvHostError(self._endpoint, self._timeout_s, self._remedy)


def _address(endpoint: str) -> str:
    """As another process has to call it: where this machine listens at all its addresses, by its name."""
    url = urlsplit(endpoint)
    return f"tcp://{platform.node()}:{url.port}" if url.hostname in ("0.0.0.0", "::") else endpoint
