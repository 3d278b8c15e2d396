"""The worker's side of the protocol as a state machine: messages and time in, messages out, no I/O of its own.

The session keeps every batch until the learner, and each consumer group that the broker names, have settled it. It
sends in order, as far as the broker's credit goes. If the broker forgot batches or a connection broke, it sends again
from the last accepted batch. The caller checks `has_room` before it adds batches: a full window stops the sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from headrace.schemas.accounts.env_errors import EnvErrorGroup
from headrace.schemas.accounts.ledger import Discard, Drop, HeldBatch, Settled, WorkerTotals
from headrace.schemas.accounts.logged_metrics import LoggedMetrics
from headrace.schemas.accounts.runner_counters import Counters, fitting
from headrace.schemas.accounts.worker_figures import Ports
from headrace.schemas.basics.bounds import MOST_SILENCE_S, Version
from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.frames.compression import LZ4
from headrace.schemas.messages import (
    Ack,
    Bye,
    Fenced,
    Heartbeat,
    Message,
    Reject,
    Skip,
    Tasks,
    WeightsRefusal,
    WorkerHello,
    WorkerWelcome,
)
from headrace.schemas.messages.message_base import MOST_DETAIL, MOST_SHORT_DETAIL
from headrace.workers.fleet.window import SessionLimits, Shipment, Window

log = logging.getLogger("headrace.worker")


class SessionState(Enum):
    """JOINING until the broker's WELCOME, then ACTIVE, LEAVING from BYE on. LEFT, FENCED and REFUSED are final."""

    JOINING = "joining"
    ACTIVE = "active"
    LEAVING = "leaving"
    LEFT = "left"
    FENCED = "fenced"
    REFUSED = "refused"


Outgoing = Message | Shipment

_TRIES = 3


class WorkerSession:
    """One incarnation's delivery of batches. `hello` names the worker; the broker may still have to assign its slot."""

    def __init__(self, hello: WorkerHello, limits: SessionLimits) -> None:
        self.limits = limits
        self.state = SessionState.JOINING
        self.slot = hello.slot
        self.incarnation = hello.incarnation
        self.settled = Settled()
        self.groups: dict[str, Settled] = {}
        """Settled batches by group, as the broker last told: each other group for which workers keep batches."""
        self.accepted = 0
        self.weights: Version = (0, 0)
        """The version in use by this worker."""
        self.weights_known: Version = (0, 0)
        """The newest version that the broker has announced."""
        self.refused: WeightsRefusal | None = None
        """The newest version that this worker could not load."""
        self.tasks: Tasks | None = None
        self.tasks_in_use: Version | None = None
        """The newest tasks from the broker are `tasks`. The runner's next resets take those of this version."""
        self.totals = WorkerTotals()
        self.env_failures: tuple[int, str] = (0, "")
        """Failures of this worker's envs, and the newest in words."""
        self.env_silence_s = 0.0
        """Seconds for which no env has answered, while the worker waits for one."""
        self.env_call = ""
        """The env call that has been in progress longest, in words; "" while envs answer."""
        self.blocked = ""
        self.welcome: WorkerWelcome | None = None
        self.refusal: tuple[str, str] | None = None
        self.waiting_for = ""
        self.steps_elsewhere = 0
        """Env steps of all other lives of workers. It never decreases, although a broker may forget."""
        self.steps_share: int | None = None
        """This worker's share of the env steps that the fleet may still take; None while there is no bound."""
        self.read_counters: Callable[[], Counters] = dict
        """Function that returns the runner's lifetime counters; called for each message that carries them."""
        self.read_metrics: Callable[[], LoggedMetrics] = dict
        """Function that returns the metrics that callbacks have logged; called for each message that carries them."""
        self.read_env_errors: Callable[[], list[EnvErrorGroup]] = list
        """Function that returns the groups of failures of envs, for the BYE."""
        self.read_figures: Callable[[], dict[str, Any]] = dict
        """Function that returns further fields of a heartbeat, called for each."""
        self.repeats_figures = False
        """True while the runner is in the midst of a call, so that a heartbeat repeats the figures of the last one."""
        self._figures: dict[str, Any] = {}
        self.ports: Ports | None = None
        """Ports at which env hosts and clients reach this worker."""
        self._hello = hello
        self._window = Window(limits)
        self._round: tuple[Version, int] | None = None
        """Synchronous sampling: a version, and the steps to ship with it."""
        self._shipped: tuple[Version, int] = ((0, 0), 0)
        """A version, and the steps that were shipped with it."""
        self._steps_told = 0
        """Env steps of this worker in the newest batch or heartbeat."""
        self._steps_counted = 0
        """Env steps of this worker that the broker has counted, as far as its Acks tell."""
        self._sent = 0
        self._credit = 0
        self._rejected: dict[int, int] = {}
        self._control: list[Message] = []
        self._warnings = CountedWarnings(log)
        self._next_send = 0.0
        self._interval_s = limits.retry_s
        """Seconds between two heartbeats, as the broker last said."""
        self._heard = 0.0
        self._progress_at = 0.0
        self._bye: Bye | None = None
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            WorkerWelcome: self._on_welcome,
            Ack: self._on_ack,
            Fenced: self._on_fenced,
            Reject: self._on_reject,
            Tasks: self._on_tasks,
        }

    @property
    def next_seq(self) -> int:
        """Number that the next batch must have."""
        return self._window.next_seq

    @property
    def over(self) -> bool:
        """Return whether the session has ended, so that no message is sent any more."""
        return self.state in (SessionState.LEFT, SessionState.FENCED, SessionState.REFUSED)

    def has_room(self, batches: int = 1) -> bool:
        """Return whether the window has room for the `batches` of one cut; see `Window.has_room`."""
        return self._window.has_room(batches)

    def late_groups(self, batches: int) -> list[str]:
        """Return the groups that alone leave no room for the `batches` of one cut; none where there is room."""
        if not self._window.waits_for_groups(batches):
            return []
        return sorted(name for name, told in self.groups.items() if told.seq < self.settled.seq)

    def may_step(self) -> bool:
        """Return whether the fleet's bound of env steps lets this worker begin another fragment.

        Near the bound an Ack must first have shown that the broker has counted all steps of this worker. So the fleet
        stops within one fragment of each worker: no worker begins one on an old count. "Near" is less than what all
        windows hold, because a worker may fill its window before it hears that the bound is near. A broker that has
        just restarted may know of fewer steps than were taken, and lets the fleet take some more. Steps that are in no
        batch, such as those of frozen modules, go with a heartbeat; an Ack that crosses it lets the worker begin one
        fragment more.
        """
        if self.is_synchronous:  # the broker plans no round beyond the bound; one of frozen modules alone has no end
            return self.steps_share != 0 or bool(self.totals.shipped) or Discard.FROZEN not in self.totals.discarded
        if not self._is_near_bound():
            return True
        return self.steps_share != 0 and not self.unaccepted() and not self._uncounted_steps()

    def _is_near_bound(self) -> bool:
        share, window = self.steps_share, self.limits.window_env_steps
        if share is None or window is None:
            return share is not None
        return share - self._uncounted_steps() <= window + self._window.learner_steps

    def _uncounted_steps(self) -> int:
        return self.totals.steps_of_envs - self._steps_counted

    def submit(self, shipment: Shipment) -> None:
        """Take a batch for delivery. Its number must be `next_seq`."""
        self._window.add(shipment)
        self.totals = shipment.totals
        self._steps_told = shipment.totals.steps_of_envs
        if shipment.frames is not None:  # batches without frames will not reach the learner
            self._shipped = (self.weights, self._shipped_now() + shipment.batch.steps)

    @property
    def is_synchronous(self) -> bool:
        """Return whether this worker ships a share with each version of the weights, then waits for the next."""
        return self._round is not None

    def round_left(self) -> int:
        """Return the steps that are left to ship with the weights in use, in synchronous sampling."""
        version, steps = self._round or ((0, 0), 0)
        return max(0, steps - self._shipped_now()) if version == self.weights else 0

    def _shipped_now(self) -> int:
        version, steps = self._shipped
        return steps if version == self.weights else 0

    def refuse_weights(self, version: Version, detail: str) -> None:
        """Tell the broker at once that this worker cannot load a version."""
        self.refused = WeightsRefusal(version=version, detail=detail[:MOST_DETAIL])
        self._next_send = 0.0

    def window(self) -> list[HeldBatch]:
        """Return the counts of every batch not known to be settled by all."""
        return self._window.held()

    def unaccepted(self) -> int:
        """Return how many batches the broker has not accepted."""
        return self.next_seq - 1 - self.accepted

    def introduce(self, **built: Any) -> None:
        """Send the facts known since envs and modules are built, in a second HELLO. The broker answers with a WELCOME.

        `built`: fields of `WorkerHello`.
        """
        self._hello = self._hello.model_copy(update={**built, "silence_s": 0.0})
        self.state = SessionState.JOINING
        self._next_send = 0.0

    def leave(self, reason: str) -> None:
        """Send a last heartbeat, then BYE with the counts of unsettled batches, until the broker has taken it."""
        if self.state is SessionState.ACTIVE and self.slot is not None:
            self._control.append(self._heartbeat())
            self.state = SessionState.LEAVING
            self._bye = Bye(
                slot=self.slot,
                incarnation=self.incarnation,
                totals=self.totals,
                settled=self.settled,
                groups=self.groups,
                window=self.window(),
                reason=reason,
                counters=fitting(self.read_counters()),
                metrics=self.read_metrics(),
                env_errors=self.read_env_errors(),
            )
            self._next_send = 0.0

    def receive(self, message: Message, now: float) -> None:
        """Handle any control message from the broker."""
        self._heard = now
        handler = self._handlers.get(type(message))
        if handler is not None and not self.over:
            handler(message, now)

    def tick(self, now: float) -> None:
        """Queue the messages that are due: HELLO until welcomed, then heartbeats. Call it often.

        It also rejoins when the broker is silent for its lease. If no batch was accepted for 2 * `retry_s` seconds, and
        the broker was heard meanwhile, it sends again from the last accepted batch. A broker that stands still has all
        of them already.
        """
        if self.over:
            return
        if self.welcome is not None and now - self._heard > self.welcome.lease_s:
            self._rejoin(now)
            self._heard = now
        if self._sent <= self.accepted:
            self._progress_at = now  # nothing is under way, so nothing is late
        elif now - self._progress_at > 2 * self.limits.retry_s and self._heard > self._progress_at:
            self._sent = self.accepted
            self._progress_at = now
        is_late = self._is_near_bound() and self.totals.steps_of_envs > self._steps_told and not self.unaccepted()
        if now >= self._next_send or (is_late and self.state is SessionState.ACTIVE):
            self._speak(now)

    def take_outbox(self) -> list[Outgoing]:
        """Return the messages due for the broker, in order: control first, then batches as far as credit goes."""
        out: list[Outgoing] = [*self._control]
        self._control.clear()
        if self.state is SessionState.ACTIVE:
            last = min(self._credit, self.next_seq - 1)
            for seq in range(self._sent + 1, last + 1):
                out.append(self._outgoing(self._window[seq]))
                self._sent = seq
        return out

    def not_sent(self, now: float) -> None:
        """Return to the last accepted batch: the connection did not take a message. If joining, retry HELLO soon."""
        self._sent = self.accepted
        if self.state is SessionState.JOINING:
            self._next_send = now + self.limits.connect_retry_s

    def connected(self, now: float, *, again: bool) -> None:
        """Note that a connection has come up, so that the next HELLO is sent without delay.

        again: it is not the first one. Brokers know a worker by its connection, so this one needs a HELLO too.
        """
        if again and self.state in (SessionState.ACTIVE, SessionState.LEAVING):
            self._rejoin(now)
        elif self.state is SessionState.JOINING:
            self._next_send = 0.0

    def _outgoing(self, shipment: Shipment) -> Outgoing:
        if shipment.frames is not None:
            return shipment
        return Skip(
            slot=self.slot or 0,
            incarnation=self.incarnation,
            batch=shipment.batch,
            reason=shipment.reason,
            totals=shipment.totals,
        )

    def _speak(self, now: float) -> None:
        self._next_send = now + self._interval_s
        if self.state is SessionState.JOINING:
            self._next_send = now + self.limits.retry_s
            update = {
                "slot": self.slot,
                "incarnation": self.incarnation,
                "settled": self.settled,
                "groups": self.groups,
                "totals": self.totals,
                "weights": self.weights,
            }
            self._control.append(self._hello.model_copy(update=update))
        elif self._bye is not None:
            self._control.append(self._bye)
        else:
            self._control.append(self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        if not self.repeats_figures:
            told = {"counters": fitting(self.read_counters()), "metrics": self.read_metrics()}
            self._figures = {**told, **self.read_figures()}
        if not self.unaccepted():  # else the broker does not take these totals
            self._steps_told = self.totals.steps_of_envs
        return Heartbeat(
            slot=self.slot or 0,
            incarnation=self.incarnation,
            totals=self.totals,
            settled=self.settled.seq,
            weights=self.weights,
            blocked=self.blocked,
            round_steps=self._shipped_now(),
            refused=self.refused,
            env_failures=self.env_failures[0],
            env_failure=self.env_failures[1][:MOST_SHORT_DETAIL],
            env_silence_s=min(self.env_silence_s, MOST_SILENCE_S),
            env_call=self.env_call[:MOST_SHORT_DETAIL],
            ports=self.ports,
            window=(len(self._window), self._window.nbytes),
            tasks=self.tasks_in_use,
            **self._figures,
        )

    def _rejoin(self, now: float) -> None:
        self.state = SessionState.JOINING
        self._next_send = now

    def _on_welcome(self, welcome: WorkerWelcome, now: float) -> None:
        if not self._is_possible(welcome.accepted, welcome.settled, *welcome.groups.values()):
            return
        self.welcome, self._interval_s = welcome, welcome.heartbeat_interval_s
        if LZ4 not in welcome.encodings:
            self._window.decompress()
        self.slot, self.incarnation = welcome.slot, welcome.incarnation
        is_repeated = self.state is not SessionState.JOINING  # it answers a HELLO that was repeated before the first
        self.state = SessionState.LEAVING if self._bye else SessionState.ACTIVE
        self._progress_at = now
        self._window.forget(self._learn_settled(welcome.settled, welcome.groups))
        self.accepted = max(welcome.accepted, self._window.first - 1)
        self._sent = max(self._sent, self.accepted) if is_repeated else self.accepted
        self._credit, self._window.learner_steps = welcome.credit, welcome.window_steps
        self.weights_known = max(self.weights_known, welcome.weights)
        self._hear_of_round(welcome)
        self.steps_elsewhere = max(self.steps_elsewhere, welcome.steps_elsewhere)
        self.steps_share = welcome.steps_share
        self._next_send = now

    def _on_ack(self, ack: Ack, now: float) -> None:
        if self.state is SessionState.JOINING or (ack.slot, ack.incarnation) != (self.slot, self.incarnation):
            return
        if not self._is_possible(ack.accepted, ack.settled, *ack.groups.values()):
            return
        settled_by_all = self._learn_settled(ack.settled, ack.groups)
        accepted = max(ack.accepted, settled_by_all)
        if accepted > self.accepted:
            self.accepted, self._progress_at = accepted, now
            self._steps_counted = self._window[accepted].totals.steps_of_envs
        if not self.unaccepted():
            self._steps_counted = self._steps_told
        self._sent = max(self._sent, self.accepted)
        self._window.forget(settled_by_all)
        for reason, seqs in ack.dropped.items():
            for seq in seqs:
                self._window.skip(seq, reason, keep_bytes=bool(self.groups))
        self._credit, self._window.learner_steps = max(ack.credit, ack.accepted), ack.window_steps
        self.weights_known = max(self.weights_known, ack.weights)
        self._hear_of_round(ack)
        self.steps_elsewhere = max(self.steps_elsewhere, ack.steps_elsewhere)
        self.steps_share = ack.steps_share
        self.waiting_for = ack.waiting_for
        self._interval_s = ack.heartbeat_interval_s or self._interval_s
        if ack.closed and self._bye is not None:
            self.state = SessionState.LEFT

    def _hear_of_round(self, told: WorkerWelcome | Ack) -> None:
        if told.synchronous is not None:
            self._round = (told.weights, told.round_steps) if told.synchronous else None

    def _is_possible(self, accepted: int, *settled: Settled) -> bool:
        """Return whether these numbers are possible. A broker cannot know of a batch that was not cut."""
        told = max(accepted, *(one.seq for one in settled))
        if told >= self.next_seq:
            text = f"ignored a message of the broker: it tells of batch {told}, and {self.next_seq - 1} were cut"
            self._warnings.warn(b"", "not_cut", text)
        return told < self.next_seq

    def _learn_settled(self, settled: Settled, groups: Mapping[str, Settled]) -> int:
        """Note what the learner and other groups have settled. Return the number of the last batch that all have.

        A group that is not named any more keeps no batch.
        """
        self.settled = _newer(self.settled, settled)
        self.groups = {name: _newer(self.groups.get(name, told), told) for name, told in groups.items()}
        self._window.settled = self.settled.seq
        return min(told.seq for told in (self.settled, *self.groups.values()))

    def _on_fenced(self, fenced: Fenced, now: float) -> None:
        if self._is_possible(fenced.accepted, fenced.settled):
            self._window.forget(self._learn_settled(fenced.settled, self.groups))
            self.accepted = max(self.accepted, fenced.accepted, self._window.first - 1)
        self.state, self.refusal = SessionState.FENCED, ("fenced", fenced.detail)

    def _on_tasks(self, tasks: Tasks, now: float) -> None:
        if self.tasks is None or tasks.version > self.tasks.version:
            self.tasks = tasks

    def _on_reject(self, reject: Reject, now: float) -> None:
        if reject.seq:
            self._on_refused_batch(reject)
        elif reject.fatal:
            self.state, self.refusal = SessionState.REFUSED, (reject.code, reject.detail)
        elif self.state is not SessionState.JOINING:
            self._rejoin(now)

    def _on_refused_batch(self, reject: Reject) -> None:
        """Retry a batch that the broker cannot read. After `_TRIES` refusals, skip it as POISON."""
        if not self.accepted < reject.seq < self.next_seq:
            return
        self._rejected[reject.seq] = self._rejected.get(reject.seq, 0) + 1
        self._sent = min(self._sent, reject.seq - 1)
        if self._rejected[reject.seq] >= _TRIES:
            self._window.skip(reject.seq, Drop.POISON)


def _newer(known: Settled, told: Settled) -> Settled:
    return told if told.seq > known.seq else known
