"""Finds a learner's fleet and notices its end, by its run directory and the broker's answers."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import orjson

from headrace.schemas.errors import UnreachableError
from headrace.schemas.keys import DIR_VARIABLE

log = logging.getLogger("headrace.learner")

STOPPED_WAIT_S = 10.0
"""Seconds that a stopped fleet may take to start again before a stream ends."""

_LOOK_S = 0.5
_SAY_WAITING_S = 10.0
_LARGEST_FILE = 16 << 20


class FleetPlace:
    """The address of one fleet's broker, which changes when `headrace up` starts again.

    - run_dir: the fleet's run directory, if it is on this machine.
    - patience_s: how long the broker may be silent before the fleet counts as ended; None: it never does.
    """

    def __init__(self, endpoint: str, run_dir: Path | None, patience_s: float | None) -> None:
        self.endpoint = endpoint
        self.ended = ""
        """Reason for which the fleet counts as ended; "" while it does not."""
        self._run_dir = run_dir
        self._patience_s = patience_s
        self._was_present = False
        self._gone_since: float | None = None
        self._look_at = 0.0
        self._say_at = 0.0

    def observe(self, present: bool, now: float) -> str | None:
        """Note whether the broker answers. Return its new address if it has moved, which is `endpoint` from then on."""
        if present:
            if self._gone_since is not None and self._was_present:
                log.info("the broker at %s answers", self.endpoint)
            self._was_present, self._gone_since, self.ended = True, None, ""
            return None
        if self._gone_since is None:
            self._gone_since, self._say_at = now, now + _SAY_WAITING_S
        if now < self._look_at:
            return None
        self._look_at = now + _LOOK_S
        moved = learner_endpoint(self._run_dir) if self._run_dir is not None else None
        if moved is not None and moved != self.endpoint:
            log.info("the broker has moved from %s to %s", self.endpoint, moved)
            self.endpoint = moved
            return moved
        if self._was_present and self._patience_s is not None:
            self._judge(now - self._gone_since, self._patience_s, now)
        return None

    def _judge(self, gone_s: float, patience_s: float, now: float) -> None:
        stopped = self._run_dir is not None and _json(self._run_dir / "fleet.json").get("state") == "stopped"
        wait_s = min(STOPPED_WAIT_S, patience_s) if stopped else patience_s
        what = f"the fleet in {self._run_dir} was stopped" if stopped else f"no word from the broker at {self.endpoint}"
        if gone_s >= wait_s and not self.ended:
            self.ended = f"{what}, {gone_s:.0f} s ago"
            log.warning("the stream ends: %s", self.ended)
        elif now >= self._say_at and not self.ended:
            self._say_at = now + _SAY_WAITING_S
            log.warning("%s for %.0f s; the stream ends after %g s", what, gone_s, wait_s)


def await_endpoint(run_dir: str | Path, timeout_s: float) -> str:
    """Return the address for learners of the fleet in `run_dir`. Wait for its broker to write it.

    Raises `UnreachableError` when that takes longer than `timeout_s`.
    """
    deadline, say_at = time.monotonic() + timeout_s, time.monotonic() + _SAY_WAITING_S
    while (endpoint := learner_endpoint(Path(run_dir))) is None:
        now = time.monotonic()
        if now > deadline:
            raise UnreachableError("broker", f"any address in {Path(run_dir) / 'broker.json'}", timeout_s)
        if now > say_at:
            say_at += _SAY_WAITING_S
            log.warning("waiting for a fleet in %s: start it with `headrace up --run-dir %s`", run_dir, run_dir)
        time.sleep(0.1)
    return endpoint


def learner_endpoint(run_dir: Path) -> str | None:
    """Return the address for learners in the broker's file, or None while there is none."""
    endpoints = _json(run_dir / "broker.json").get("endpoints")
    endpoint = endpoints.get("learner") if isinstance(endpoints, dict) else None
    return endpoint if isinstance(endpoint, str) and endpoint and not endpoint.endswith(":0") else None


def keys_folder(run_dir: str | Path) -> str | None:
    """Return the folder of keys in the config of the fleet in `run_dir`; None: as the environment says, or none."""
    section = _json(Path(run_dir) / "config.json").get("keys")
    folder = section.get("dir") if isinstance(section, dict) and DIR_VARIABLE not in os.environ else None
    return folder if isinstance(folder, str) and folder else None


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a file that is replaced in one step; empty where there is none."""
    try:
        with path.open("rb") as file:
            content = orjson.loads(file.read(_LARGEST_FILE))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
