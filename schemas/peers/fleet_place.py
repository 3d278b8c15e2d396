"""The address at which a peer finds its fleet, which may move, and the end of its wait for it."""

from __future__ import annotations

import logging
import math

from headrace.schemas.errors import HeadraceError, UnreachableError
from headrace.schemas.peers.fleet_address import AddressSource
from headrace.schemas.peers.handshakes import patience_setting

log = logging.getLogger("headrace.fleet")

_OF_ANOTHER = ("wrong_fleet", "other_broker")
"""Codes by which a broker refuses peers of another fleet, or of another broker of this one."""
_LOOK_S, _LONGEST_LOOK_S = 0.5, 10.0
"""Seconds between two looks for the server, and the most of them. Each move since the server last answered doubles it,
so a source that alternates between addresses leaves each one time to answer.
"""
_MOST_PATIENCES = 2
"""A server that moves gets as much patience again. All its moves together get so many times the patience."""
_FIRST_WORD_S, _SAY_WAITING_S = 5.0, 10.0


def broker_fleet_id(fleet_id: str, index: int, count: int) -> str:
    """Return the fleet id of one of `count` brokers, which has books of its own; "" where the fleet's is not known."""
    return f"{fleet_id}.{index}" if fleet_id and count > 1 else fleet_id


def not_found_error(server: str, problem: str, deadline_s: float) -> UnreachableError:
    """Return the error for a server whose address is not known after `deadline_s`, for the reason `problem`."""
    why = problem or "its rendezvous names no address"
    return UnreachableError(server, "", deadline_s, sentence=f"no {server} is found within {deadline_s:g} s: {why}")


class FleetPlace:
    """The address of one fleet's broker, or of a worker for env hosts, which changes when `headrace up` starts again.

    - role: the kind of peer for which `source` names the address.
    - source: the fleet's run directory or rendezvous; None: the address stays.
    - server: what answers there: "broker" or "worker".
    - patience_s: how long it may be gone before `ended` is set, and `stopped_patience_s` where `source` says that the
      fleet has stopped. A peer that names the latter does not wait for a fleet that has reached its goal.
    - first_patience_s: how long its first answer may take; infinite for a peer that has a deadline of its own for that.
    - end: the place that says that the fleet has stopped; None: `source`.
    - says_waiting: False if another place of this process logs whom it waits for, and that it answers.
    """

    def __init__(
        self,
        endpoint: str,
        role: str = "",
        source: AddressSource | None = None,
        *,
        server: str = "broker",
        patience_s: float = math.inf,
        first_patience_s: float = math.inf,
        stopped_patience_s: float | None = None,
        end: AddressSource | None = None,
        says_waiting: bool = True,
    ) -> None:
        self.endpoint = endpoint
        self.ended: HeadraceError | None = None
        """The reason for which the fleet counts as ended; None while it does not."""
        self._role = role
        self._source = source
        self._end = source if end is None else end
        self._server = server
        self._patience_s = patience_s
        self._first_patience_s = first_patience_s
        self._stopped_patience_s = patience_s if stopped_patience_s is None else stopped_patience_s
        self._goal_patience_s = patience_s if stopped_patience_s is None else 0.0
        self._says_waiting = says_waiting
        self._was_present = self._has_said = self._stopped = False
        self._gone_since: float | None = None
        self._lost_since = 0.0
        """Time since which no server answers, wherever it moved."""
        self._met_at = self._disowned = ""
        """Addresses at which the server answered last, and at which another one refused this peer."""
        self._look_s = _LOOK_S
        self._look_at = self._look_if_stopped_at = 0.0
        self._say_at = 0.0

    def not_found(self, deadline_s: float) -> UnreachableError:
        """Return the error for a server whose address is still not known after `deadline_s`."""
        return not_found_error(self._server, self._source.problem if self._source is not None else "", deadline_s)

    def stopped(self) -> HeadraceError | None:
        """Return an error that says so, if the fleet has stopped."""
        return self._source.stopped() if self._source is not None else None

    @property
    def is_lost(self) -> bool:
        """Return whether the server answered and does not answer now."""
        return self._was_present and self._gone_since is not None

    def observe(self, present: bool, now: float) -> str | None:
        """Note whether the server answers. Return its new address if it has moved, which is `endpoint` from then on.

        A peer that has never met the server says itself what it waits for: here it only hears that the run has stopped.
        """
        if present:
            if self._has_said:
                log.info("the %s at %s answers", self._server, self.endpoint)
            self._was_present, self._gone_since, self.ended, self._has_said = True, None, None, False
            self._look_s, self._met_at, self._disowned = _LOOK_S, self.endpoint, ""
            return None
        if self._gone_since is None:
            self._gone_since = self._lost_since = self._look_at = now
            self._say_at = now + (_FIRST_WORD_S if self._was_present else 0.0)
        if now < self._look_at:
            return None
        moved = self._source.find(self._role) if self._source is not None else ""
        moves = bool(moved) and moved != self.endpoint
        if moves:
            before = f"moved from {self.endpoint} to" if self.endpoint else "appeared at"
            log.info("the %s has %s %s", self._server, before, moved)
            self.endpoint, self._gone_since, self._has_said = moved, now, self._says_waiting
            self._look_s = min(2 * self._look_s, _LONGEST_LOOK_S)
        self._look_at = now + self._look_s
        self._judge(now - self._gone_since, now)
        return moved if moves else None

    def disowns(self, code: str, detail: str) -> bool:
        """Return whether a refusal does not count, since the source led this peer from its server to another one.

        The peer then goes on looking. A peer that has never met its server is told that its settings are wrong.
        """
        if code not in _OF_ANOTHER or not self._was_present or self.endpoint == self._met_at:
            return False
        if self._disowned != self.endpoint:
            self._disowned = self.endpoint
            log.warning(
                "the %s at %s is another one: %s; looking for the right one", self._server, self.endpoint, detail
            )
        return True

    def move_to(self, endpoint: str, now: float) -> None:
        """Note that the peer leaves a server that answers for another one."""
        log.info("moving from the %s at %s to the one at %s", self._server, self.endpoint, endpoint)
        self.endpoint, self._gone_since, self._has_said = endpoint, now, self._says_waiting
        self._lost_since = now

    def has_stopped(self, now: float) -> bool:
        """Return whether the fleet says that it has stopped. It may have said so half a second ago."""
        if self._end is not None and now >= self._look_if_stopped_at:
            self._look_if_stopped_at = now + _LOOK_S
            self._stopped = self._end.stopped() is not None
        return self._stopped

    def is_done(self, now: float) -> bool:
        """Return whether the fleet says that it has stopped at its goal. It may have said so half a second ago."""
        return self.has_stopped(now) and self._end is not None and self._end.at_goal

    def _judge(self, gone_s: float, now: float) -> None:
        why = self.stopped()
        said, most_s = f"no {self._server} answers at {self.endpoint}", self._patience_s
        if self._source is not None and why is not None:
            said = self._source.problem
            most_s = self._goal_patience_s if self._source.at_goal else self._stopped_patience_s
        if not self._was_present:
            most_s = self._first_patience_s
        if gone_s >= most_s or now - self._lost_since >= _MOST_PATIENCES * most_s:
            setting = patience_setting(self._role, "silence_timeout_s")
            self.ended = self.ended or why or UnreachableError(self._server, self.endpoint, most_s, setting=setting)
        if self._says_waiting and now >= self._say_at and (self._was_present or why is not None):
            self._say_at, self._has_said = now + _SAY_WAITING_S, True
            is_bounded = not self.ended and not math.isinf(most_s)
            most = f" of at most {most_s:.0f} s" if is_bounded else ""
            log.warning("%s; waiting for it (%.0f s%s)", said, gone_s, most)
