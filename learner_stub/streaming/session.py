"""The learner's side of the protocol as a state machine: messages and time in, messages out, no I/O of its own.

It takes every batch of each source (one incarnation of a worker) exactly once and in order. Each arrival becomes an
`Arrival` in one queue. The stream takes arrivals from there and calls `settle` with the result for each batch. `commit`
declares everything taken so far as settled.
"""

from __future__ import annotations

import logging
import os
import platform
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any

from headrace.learner_stub.streaming.source_progress import (
    Arrival,
    ArrivalKind,
    SourceKey,
    SourceProgress,
    growth,
    position_of,
)
from headrace.schemas.accounts.ledger import Count, Drop, HeldBatch
from headrace.schemas.basics.bounds import TRAIN, Version
from headrace.schemas.basics.headrace_version import headrace_version, program_name
from headrace.schemas.chunks.batch import BatchCounts
from headrace.schemas.chunks.module_spaces import module_spaces_from_json
from headrace.schemas.errors import DecodeError
from headrace.schemas.frames.compression import readable_encodings
from headrace.schemas.messages import (
    Commit,
    Fenced,
    GroupHello,
    LearnerFigures,
    LearnerHello,
    LearnerWelcome,
    Message,
    Ranks,
    Reject,
    SourceEnd,
    SourceGap,
    SourcePosition,
    SourceStart,
    Status,
)

log = logging.getLogger("headrace.learner")

SILENCE_S = 5.0
"""Seconds without a word of the broker after which a stream says HELLO again."""

_FIGURES_S = 0.25
"""Figures of the learner go with a commit at this interval, and with each that is urgent."""

_REPEATED = 64
"""Sources whose progress is sent again, at the interval of heartbeats."""


class LearnerSessionState(Enum):
    """JOINING until the broker's WELCOME; STOPPED after a refusal or a fencing, which `refusal` then holds."""

    JOINING = "joining"
    ACTIVE = "active"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of what the broker may send ahead to one stream, in batches and bytes, and intervals in seconds."""

    window_batches: int = 64
    window_bytes: int = 256 << 20
    synchronous: bool = False
    steps_per_update: int = 0
    """Steps of an update, as in `LearnerHello`."""
    retry_s: float = 1.0
    connect_retry_s: float = 0.02
    """While there is no connection: short, since no message is sent, and not 0, since the caller waits as long."""
    heartbeat_s: float = 0.5
    silence_s: float = SILENCE_S
    gather_s: float = 0.002
    gather_batches: int = 8
    """A commit that is not urgent may wait this long, and for this many batches, to be sent together with the next one.
    It waits for half as many once the user waits for a batch, since workers may wait for the commit.
    """


class LearnerSession:
    """The stream of one learner process. It shares `token` with the publisher."""

    def __init__(
        self,
        token: str,
        limits: StreamLimits,
        *,
        fleet_id: str = "",
        position: list[SourcePosition] | None = None,
        group: str = TRAIN,
    ) -> None:
        self.token = token
        self.limits = limits
        self.fleet_id = fleet_id
        self.group = group
        self.ranks: Callable[[], Ranks | None] | None = None
        """Returns what the HELLO tells of the ranks that share the batches."""
        self.state = LearnerSessionState.JOINING
        self.epoch = 0
        self.spaces: dict[str, Any] = {}
        self.status: Status | None = None
        self.published: Version = (0, 0)
        """The newest weights at the broker, as far as it told."""
        self.refusal: tuple[str, str] | None = None
        self.exhausted = False
        """True while the broker's newest message says that no worker is left, and no batch held."""
        self.arrivals: deque[Arrival] = deque()
        self.redelivered = 0
        self.missed_steps = 0
        """Steps that an earlier life of this learner committed after `position`, as far as the broker has told."""
        self.received_batches = 0
        self.consumed_batches = 0
        self.window_steps: int | None = None
        """Steps to have under way in the whole fleet; see `LearnerHello.window_steps`."""
        self._window_told: int | None = None
        self.figures: Callable[[], LearnerFigures] | None = None
        """Returns what the learner measures of itself."""
        self._figures_due = 0.0
        self._sources: dict[SourceKey, SourceProgress] = {}
        self._changed: set[SourceKey] = set()
        self._to_tell: set[SourceKey] = set()
        """Sources whose progress was committed and not sent yet."""
        self._told: dict[SourceKey, None] = {}
        """Sources whose progress was sent, the one that was sent longest ago first."""
        self._next_repeat = 0.0
        self._outbox: list[Message] = []
        self._gathered = 0
        """Batches committed that the broker has not been told of."""
        self._next_send = 0.0
        self._heard = 0.0
        for place in position or []:
            known = SourceProgress(place.settled.seq, place.settled, place.settled)
            known.ended = known.end_taken = known.end_committed = place.ended
            self._sources[(place.slot, place.incarnation)] = known
        self._handlers: dict[type, Callable[[Any], None]] = {
            LearnerWelcome: self._on_welcome,
            Status: self._on_status,
            SourceStart: self._on_start,
            SourceGap: self._on_gap,
            SourceEnd: self._on_end,
            Fenced: self._on_fenced,
            Reject: self._on_reject,
        }

    def receive(self, message: Message, now: float) -> None:
        """Take any control message from the broker."""
        self._heard = now
        self.exhausted = isinstance(message, Status) and not message.workers and not message.held_batches
        handler = self._handlers.get(type(message))
        if handler is not None and self.state is not LearnerSessionState.STOPPED:
            handler(message)

    def receive_batch(self, header: BatchCounts, content: object, now: float) -> None:
        """Take a BATCH; `take` returns its `content`. Keep the next batch of its source; ignore earlier ones."""
        self._heard = now
        self.exhausted = False
        if self.state is not LearnerSessionState.ACTIVE:
            return
        self.received_batches += 1
        key = (header.slot, header.incarnation)
        source = self._sources.get(key) or self._sources.setdefault(key, SourceProgress())
        if header.seq != source.received + 1:
            self.consumed_batches += 1
            if header.seq <= source.received:
                self.redelivered += 1
            else:
                self.state, self._next_send = LearnerSessionState.JOINING, 0.0
            return
        batch = HeldBatch(seq=header.seq, steps=header.steps, chunks=header.chunks)
        source.received = header.seq
        source.in_hand.append(batch)
        self.arrivals.append(Arrival(ArrivalKind.BATCH, key, batch, content))

    def take(self) -> Arrival | None:
        """Return the next arrival for the user, in order. Call `settle` after a batch or a gap."""
        if not self.arrivals:
            return None
        arrival = self.arrivals.popleft()
        if arrival.kind is ArrivalKind.BATCH:
            self.consumed_batches += 1
        return arrival

    def settle(self, arrival: Arrival, committed: Count, dropped: dict[str, Count]) -> None:
        """Record the result for a batch, or that the user took an end. The next `commit` counts it."""
        source = self._sources[arrival.key]
        if arrival.kind is ArrivalKind.END:
            source.end_taken = True
            self._changed.add(arrival.key)
        if arrival.batch is None or arrival.batch.seq != source.taken.seq + 1:
            return
        source.taken = source.taken.add(committed, dropped)
        self._changed.add(arrival.key)

    def position(self) -> list[SourcePosition]:
        """Return everything taken so far, as if committed, for the learner's own checkpoint."""
        return [
            position_of(key, source.taken, ended=source.end_taken)
            for key, source in self._sources.items()
            if source.taken.seq or source.end_taken
        ]

    def commit(self, now: float, *, at_once: bool = True) -> None:
        """Settle everything taken so far, and tell the broker: now, or soon, by a call of `commit` or `tick`."""
        for key in self._changed:
            source = self._sources[key]
            self._gathered += source.uncommitted()
            source.committed, source.end_committed = source.taken, source.end_taken
            while source.in_hand and source.in_hand[0].seq <= source.committed.seq:
                source.in_hand.popleft()
        self._to_tell |= self._changed
        self._changed.clear()
        if self.state is LearnerSessionState.ACTIVE and not at_once:
            self._next_send = min(self._next_send, now + self.limits.gather_s)
        if at_once:
            self._figures_due = 0.0
        if at_once or now >= self._next_send or self._gathered >= self.limits.gather_batches:
            self._send_commit(now)

    def want_window(self, steps: int | None) -> None:
        """Tell the broker how many steps to have under way: at once if that is a new limit or much more, else soon."""
        told, self.window_steps = self._window_told, steps
        if steps != told and self.state is LearnerSessionState.ACTIVE and (not told or (steps or 0) > told + told // 4):
            self._next_send = 0.0

    def uncommitted(self) -> int:
        """Return the number of batches and ends that the user has taken and not yet committed."""
        return sum([self._sources[key].uncommitted() for key in self._changed])

    def silent_s(self, now: float) -> float:
        """Return for how long the broker has sent nothing."""
        return now - self._heard

    def idle_s(self, now: float) -> float:
        """Return the seconds until something is due if nothing arrives."""
        return max(0.0, self._next_send - now)

    def tick(self, now: float, *, waiting: bool = False) -> None:
        """Say HELLO until welcomed, repeat the cumulative state, and notice a broker that has gone. Call it often."""
        is_active = self.state is LearnerSessionState.ACTIVE
        enough = waiting and is_active and 2 * self._gathered >= self.limits.gather_batches
        if self.state is LearnerSessionState.STOPPED or (now < self._next_send and not enough):
            return
        if is_active and now - self._heard > self.limits.silence_s:
            self.state = LearnerSessionState.JOINING
        if self.state is LearnerSessionState.JOINING:
            self._say_hello(now)
        else:
            self._send_commit(now, waiting=waiting)

    def take_outbox(self) -> list[Message]:
        """Return and forget the messages due for the broker."""
        out, self._outbox = self._outbox, []
        return out

    def not_sent(self, now: float) -> None:
        """Note that there was no connection for a message. Without a WELCOME so far, try a HELLO again soon."""
        if self.state is LearnerSessionState.JOINING:
            self._next_send = now + self.limits.connect_retry_s

    def _say_hello(self, now: float) -> None:
        self._next_send = now + self.limits.retry_s
        known = ((k, s) for k, s in self._sources.items() if s.committed.seq or s.end_committed)
        hello = LearnerHello if self.group == TRAIN else partial(GroupHello, group=self.group)
        self._outbox.append(
            hello(
                fleet_id=self.fleet_id,
                token=self.token,
                channel="stream",
                epoch=self.epoch,
                position=[position_of(key, source.committed, ended=source.end_committed) for key, source in known],
                held={f"{k[0]}/{k[1]}": list(s.in_hand) for k, s in self._sources.items() if s.in_hand},
                received_batches=self.received_batches,
                window_batches=self.limits.window_batches,
                window_bytes=self.limits.window_bytes,
                window_steps=self.window_steps,
                synchronous=self.limits.synchronous,
                steps_per_update=self.limits.steps_per_update,
                host=platform.node(),
                pid=os.getpid(),
                program=program_name(),
                headrace_version=headrace_version(),
                encodings=readable_encodings(),
                ranks=self.ranks() if self.ranks is not None else None,
            )
        )

    def _send_commit(self, now: float, *, waiting: bool = False) -> None:
        if self.state is not LearnerSessionState.ACTIVE:
            return
        self._next_send = now + self.limits.heartbeat_s
        self._gathered = 0
        self._outbox.append(
            Commit(
                epoch=self.epoch,
                position=[
                    position_of(key, self._sources[key].committed, ended=self._sources[key].end_committed)
                    for key in self._take_to_tell(now)
                ],
                in_hand=sum(len(source.in_hand) for source in self._sources.values()),
                consumed_batches=self.consumed_batches,
                waiting=waiting,
                window_steps=self.window_steps,
                figures=self._take_figures(now),
            )
        )
        self._window_told = self.window_steps

    def _take_to_tell(self, now: float) -> list[SourceKey]:
        """Return the sources whose progress is news, and now and then some others: a commit may have been lost.

        A HELLO repeats all. To repeat them in each commit would cost the broker 20 us for each worker.
        """
        keys = self._to_tell
        if now >= self._next_repeat:
            self._next_repeat = now + self.limits.heartbeat_s
            keys = keys | set(islice(self._told, _REPEATED))
        for key in keys:
            self._told.pop(key, None)
            self._told[key] = None
        self._to_tell = set()
        return list(keys)

    def _take_figures(self, now: float) -> LearnerFigures | None:
        if self.figures is None or now < self._figures_due:
            return None
        self._figures_due = now + _FIGURES_S
        return self.figures()

    def _on_welcome(self, welcome: LearnerWelcome) -> None:
        self.fleet_id, self.epoch = welcome.fleet_id, welcome.epoch
        self._learn_spaces(welcome.spaces)
        self.published = max(self.published, welcome.published)
        if self.state is LearnerSessionState.JOINING:
            self.state = LearnerSessionState.ACTIVE
            self._next_send = 0.0

    def _on_status(self, status: Status) -> None:
        self.status = status
        self.epoch = max(self.epoch, status.epoch)  # the WELCOME with it may be lost
        self.published = max(self.published, status.published)
        self._learn_spaces(status.spaces)

    def _learn_spaces(self, told: dict[str, Any]) -> None:
        """Take the spaces that the broker passes on, unless no batch could be read with them. They never change."""
        if not told or self.spaces:
            return
        try:
            module_spaces_from_json(told)
        except DecodeError as error:
            log.warning("the broker tells spaces that cannot be read, which are ignored: %s", error)
        else:
            self.spaces = told

    def _on_start(self, start: SourceStart) -> None:
        """Skip the batches up to `start.settled.seq`, which will not come.

        Dropped ones leave a hole in their episodes. So do those that an earlier life of this learner committed after
        the checkpoint that was left.
        """
        key = (start.slot, start.incarnation)
        source = self._sources.setdefault(key, SourceProgress())
        if start.settled.seq <= source.received:
            return
        lost = growth(source.taken.dropped, start.settled.dropped)
        if lost or source.received:
            # The one with the most steps; of equal ones the last in the alphabet.
            reason = max(lost, key=lambda reason: (lost[reason][0], reason), default=Drop.GAP.value)
            self.arrivals.append(Arrival(ArrivalKind.GAP, key, None, None, reason, lost))
        source.received = start.settled.seq
        self.missed_steps += max(0, start.settled.committed[0] - source.taken.committed[0])
        source.taken = source.committed = start.settled
        if len(lost) > 1:  # the markers of its episodes name only the main reason
            named = ", ".join(f"{lost[reason][0]} {reason}" for reason in sorted(lost))
            steps = sum(count[0] for count in lost.values())
            log.info("worker %d (incarnation %d): %d steps will not come: %s", *key, steps, named)

    def _on_gap(self, gap: SourceGap) -> None:
        key = (gap.slot, gap.incarnation)
        source = self._sources.setdefault(key, SourceProgress())
        if gap.batch.seq != source.received + 1:
            return
        source.received = gap.batch.seq
        source.in_hand.append(gap.batch)
        lost = {gap.reason: (gap.batch.steps, gap.batch.chunks)}
        self.arrivals.append(Arrival(ArrivalKind.GAP, key, gap.batch, None, gap.reason, lost))

    def _on_end(self, end: SourceEnd) -> None:
        key = (end.slot, end.incarnation)
        source = self._sources.setdefault(key, SourceProgress())
        if source.end_committed and not end.seq and not source.in_hand:
            # The life is folded at the broker, which needs no position of it any more.
            del self._sources[key]
            self._to_tell.discard(key)
            self._told.pop(key, None)
            self._changed.discard(key)
        elif source.end_committed:
            self._to_tell.add(key)
        elif not source.ended and end.seq <= source.received:
            source.ended = True
            self.arrivals.append(Arrival(ArrivalKind.END, key, None, end, end.reason))

    def _on_fenced(self, fenced: Fenced) -> None:
        self.state, self.refusal = LearnerSessionState.STOPPED, ("fenced", fenced.detail)

    def _on_reject(self, reject: Reject) -> None:
        if reject.fatal:
            self.state, self.refusal = LearnerSessionState.STOPPED, (reject.code, reject.detail)
        else:
            self.state = LearnerSessionState.JOINING
            self._next_send = 0.0
