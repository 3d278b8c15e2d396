"""Keeps broker.json as the broker's state changes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.broker.batches.broker_observer import BrokerObserver
from headrace.broker.batches.limits import BrokerState
from headrace.broker.files.state_file import Endpoints, write_broker_file
from headrace.broker.sessions.core import BrokerCore
from headrace.schemas.errors import HeadraceError

log = logging.getLogger(__name__)


class StateWriter(BrokerObserver):
    """Writes the file of one broker: its state when asked, and every `interval_s` what has changed of its notes.

    Notes are whether a learner is connected, and which weights workers load.
    """

    def __init__(self, core: BrokerCore, run_dir: Path, fleet_id: str, endpoints: Endpoints, interval_s: float) -> None:
        self._core = core
        self._file = run_dir, fleet_id, endpoints
        self._interval_s = interval_s
        self._written: BrokerState | None = None
        self._write_again = 0.0
        self._noted: tuple[bool | None, dict[str, Any]] = None, {}
        self._next_note = 0.0

    def write(self) -> None:
        """Write the state. Raises `RunDirError`."""
        state = self._core.state
        write_broker_file(*self._file, state, *self._noted)
        groups = {name: replace(lease) for name, lease in state.groups.items()}
        self._written = replace(state, incarnations=dict(state.incarnations), groups=groups)

    def has_written(self, now: float) -> bool:
        """Write the state if it has changed. If that fails, return False, and try again after a while.

        Peers that join must wait until then: numbers that the file lacks would be given out twice.
        """
        core = self._core
        if core.state == self._written:
            return True
        if now < self._write_again:
            return False
        try:
            self.write()
        except HeadraceError as error:
            if not core.joins_blocked:
                log.error("%s; until then nobody can join", error)
            core.joins_blocked, self._write_again = str(error), now + self._interval_s
            return False
        core.joins_blocked = ""
        return True

    def tick(self, now: float) -> None:
        """Note what the supervisor must know while Redis is away, and a learner that saves when no worker lives."""
        if now < self._next_note:
            return
        self._next_note = now + self._interval_s
        before, core = self._noted, self._core
        self._noted = core.has_learner, core.weights_told or before[1]
        if before == self._noted:
            return
        try:
            self.write()
        except HeadraceError as error:
            self._noted = before
            log.debug("the broker's notes cannot be written now: %s", error)
