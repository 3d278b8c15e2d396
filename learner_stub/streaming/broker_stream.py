"""The part of a learner's stream that comes from one broker."""

from __future__ import annotations

import logging
import math
from collections import deque
from functools import partial
from itertools import islice
from typing import Any

from headrace.learner_stub.link import connection
from headrace.learner_stub.link.broker_link import BrokerLink
from headrace.learner_stub.streaming.lag import LagMonitor
from headrace.learner_stub.streaming.ready_batches import ReadyBatches, Turns
from headrace.learner_stub.streaming.session import LearnerSession, LearnerSessionState, StreamLimits
from headrace.learner_stub.streaming.source_progress import Arrival, ArrivalKind, CheckpointPosition
from headrace.schemas.basics.bounds import TRAIN, Version
from headrace.schemas.basics.process_usage import own_cores, own_usage, torch_threads
from headrace.schemas.chunks.batch import BatchCounts, ChunkBatch
from headrace.schemas.errors import DecodeError, refusal
from headrace.schemas.frames.wire import MessageKind, decode_header
from headrace.schemas.messages import LearnerFigures, LearnerWelcome, Reject, Status, messages_to, read

log = logging.getLogger("headrace.learner")

_CONTROL = messages_to("stream")
_MAX_PUMPED = 256
_TELL_MISSED_S = 10.0
"""Seconds after which the log is told again that steps are missed, if there are more."""
_QUIET_S = 1.0
"""Seconds of silence from which on a broker may be that of a fleet that is done: it answers twice a second."""


class BrokerStream:
    """The session with one broker, its batches in order, and how old they are.

    `fleet_id`, `position`, `warn_lag` and `group` are as of `EpisodeStream`. `turns` keep the batches that are handed
    out until they settle; None: a commit settles all of them.
    """

    def __init__(
        self,
        link: BrokerLink,
        limits: StreamLimits,
        fleet_id: str,
        position: list[CheckpointPosition],
        warn_lag: float | None,
        group: str = TRAIN,
        *,
        turns: Turns | None = None,
    ) -> None:
        self.link = link
        self.session = LearnerSession(link.token, limits, fleet_id=fleet_id, position=[*position], group=group)
        self.ready = ReadyBatches(self.session, position, turns)
        self.lag = LagMonitor(warn_lag if group == TRAIN else None)
        self._missed_told = 0 if position else math.inf
        """Missed steps that the log has told of. A stream that begins without a position misses none."""
        self._tell_missed_at = 0.0
        self._unread: deque[Arrival] = deque()
        """Arrivals that were taken and not read, as the round that they are for is not complete."""
        self.session.figures = partial(_figures, link.token, self.lag)  # not a method: a cycle would outlive the stream

    @property
    def is_active(self) -> bool:
        """Return whether the broker has welcomed this learner, and answers. Rank 0 answers as long as it is there."""
        is_patient = math.isinf(self.session.limits.silence_s)
        return self.session.state is LearnerSessionState.ACTIVE and (self.link.connected or not is_patient)

    @property
    def published(self) -> Version:
        """Return the newest version that this learner published to this broker; (0, 0) before the first."""
        shared = connection.shared(self.link.token)
        if shared.publishes_elsewhere:
            return self.session.published
        published = shared.published
        return published[self.link.number] if self.link.number < len(published) else (0, 0)

    @property
    def newest(self) -> Version:
        """Return the newest weights that this process knows to be at this broker."""
        return max(self.session.published, self.published)

    @property
    def pending(self) -> int:
        """Return the number of batches received and not handed out."""
        return len(self.session.arrivals) + len(self._unread) + len(self.ready)

    @property
    def coming(self) -> int:
        """Return the number of batches that are ready, or were taken to be read."""
        return len(self.ready) + sum(arrival.kind is ArrivalKind.BATCH for arrival in self._unread)

    def pending_steps(self) -> list[int]:
        """Return the steps of each batch that was received and not handed out."""
        arrivals = (*self.session.arrivals, *self._unread)
        return [*self.ready.steps(), *(arrival.batch.steps for arrival in arrivals if arrival.batch is not None)]

    def take_one(self) -> bool:
        """Take the next arrival, so that the broker may send another one. Return whether there was one."""
        arrival = self.session.take()
        if arrival is not None:
            self._unread.append(arrival)
        return arrival is not None

    def open_next(self) -> bool:
        """Read what has arrived until a batch is ready to be handed out. Return whether one is."""
        while not self.ready and self.open_one():
            pass
        return bool(self.ready)

    def open_one(self) -> bool:
        """Read the next arrival. Return whether there was one."""
        arrival = self._unread.popleft() if self._unread else self.session.take()
        if arrival is not None:
            self.ready.open(arrival, self.newest)
        return arrival is not None

    def hand_out(self) -> ChunkBatch:
        """Return the next batch; there must be one."""
        return self.ready.hand_out(self.newest)

    def commit(self, *, at_once: bool) -> None:
        """Settle every batch handed out."""
        if self.session.uncommitted():
            self.session.commit(connection.now(), at_once=at_once)
            self.flush()

    def position(self) -> list[dict[str, Any]]:
        """Return how far the learner is with the workers of this broker, as plain values."""
        fleet, group = {"fleet_id": self.session.fleet_id}, self.session.group
        fleet |= {} if group == TRAIN else {"group": group}
        places = []
        for place in self.session.position():
            told = None if place.ended else self.ready.open_episodes(place.slot, place.incarnation)
            known: dict[str, Any] = {"open_episodes": told.model_dump(mode="json")} if told is not None else {}
            if not place.ended and (reason := self.ready.gap_reason(place.slot, place.incarnation)):
                known["gap_reason"] = reason
            places.append(fleet | place.model_dump(mode="json") | known)
        return places

    def pump(self, *, waiting: bool = False) -> None:
        """Take what has arrived and send what is due."""
        for frames in islice(self.link.received(), _MAX_PUMPED):
            self._receive(frames)
        self.session.tick(connection.now(), waiting=waiting)
        self.flush()
        if self.session.missed_steps > self._missed_told and connection.now() >= self._tell_missed_at:
            self._tell_missed()

    def _tell_missed(self) -> None:
        self._missed_told, self._tell_missed_at = self.session.missed_steps, connection.now() + _TELL_MISSED_S
        text = (
            "%s: this learner goes on from an older position: %d steps or more were committed after it, do not come "
            "again, and are not in the weights of its checkpoint. Either an earlier learner was still alive when this "
            "one read the checkpoint, or there is a newer checkpoint: to have their training, stop this learner and "
            "start it from the newest one"
        )
        log.warning(text, self.link.name, self._missed_told)

    def flush(self) -> None:
        """Send what is due."""
        for message in self.session.take_outbox():
            if not self.link.send(message.frames()):
                self.session.not_sent(connection.now())

    def follow(self) -> None:
        """Connect to the broker's new address if it has one.

        A broker that is quiet and whose fleet is done does not answer any more, so its lease need not pass first.
        """
        now = connection.now()
        is_over = self.session.silent_s(now) > _QUIET_S and self.link.place.is_done(now)
        if self.link.follow(self.is_active and not is_over, now):
            self.session.not_sent(now)

    def close(self) -> None:
        """Close the connection."""
        self.link.close()

    def _receive(self, frames: list[memoryview]) -> None:
        try:
            kind, header = decode_header(frames)
            if kind is MessageKind.BATCH:
                # The garbage collector visits whatever waits: so frames that are read go, and `open` reads the rest.
                unread = header, [b"", b"", *frames[2:]]
                self.session.receive_batch(read(BatchCounts, header), unread, connection.now())
            elif kind in _CONTROL:
                message = read(_CONTROL[kind], header)
                if isinstance(message, LearnerWelcome | Status):
                    connection.shared(self.link.token).learn_weights(message)
                if isinstance(message, Status):
                    connection.warn_of_threads(message.workers_here)
                if isinstance(message, Reject) and self.link.disowns(message):
                    return
                self.session.receive(message, connection.now())
        except DecodeError as error:
            if error.reason == "version_mismatch":
                raise refusal(error.reason, f"broker at {self.link.endpoint}: {error.detail}") from error


def _figures(token: str, lag: LagMonitor) -> LearnerFigures:
    return LearnerFigures(
        time_spent=connection.shared(token).time_spent.seconds(),
        consumed_lag=lag.counts,
        usage=own_usage(),
        torch_threads=torch_threads(),
        cores=own_cores(),
    )
