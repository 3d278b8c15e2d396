"""The broker's side towards workers and their supervisors: slots, acceptance, fencing, closing the books."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from itertools import count
from typing import Any

from headrace.broker.batches.batch_store import BatchStore
from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.batches.source import Peer, Source, StoredBatch
from headrace.broker.sessions.acknowledgements import Acknowledgements
from headrace.broker.sessions.consumer_groups import ConsumerGroups
from headrace.broker.sessions.outbox import Outbox
from headrace.schemas.accounts.ledger import Discard, Drop
from headrace.schemas.accounts.runner_counters import Counters, larger
from headrace.schemas.basics.bounds import BROKER_CONNECTIONS
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.chunks.module_spaces import module_spaces_from_json, told_by_module
from headrace.schemas.credentials.tokens import same_token
from headrace.schemas.frames.compression import readable_encodings
from headrace.schemas.frames.wire import Buffer
from headrace.schemas.messages import (
    Ack,
    Bye,
    Fenced,
    Heartbeat,
    LastWords,
    Obituary,
    Reject,
    Skip,
    SupervisorHello,
    WorkerHello,
    WorkerWelcome,
    tellable_shapes,
)

log = logging.getLogger(__name__)

FIRST_ASSIGNED_SLOT = 1000
"""Slots below this number belong to supervisors, which name them. A worker that names no slot gets one from this number
on.
"""

UNHEARD_S = 60.0
"""Seconds after the lease of a superseded life during which its supervisor may still report its end.

A supervisor kills a silent worker after three leases, and then reports the end.
"""

_LOOK_S = 1.0
_LONGEST_HOST = 64


class WorkerSessions:
    """The sessions of all workers and supervisors of one fleet. A core has one such object."""

    def __init__(
        self,
        fleet_id: str,
        limits: BrokerLimits,
        state: BrokerState,
        store: BatchStore,
        outbox: Outbox,
        groups: ConsumerGroups,
        acks: Acknowledgements,
        is_final: Callable[[Source], bool],
    ) -> None:
        self.fleet_id = fleet_id
        self._is_final = is_final
        self.spaces: dict[str, Any] = {}
        self.peers: dict[Peer, Source] = {}
        self._limits = limits
        self._state = state
        self._store = store
        self._outbox = outbox
        self._groups = groups
        self._acks = acks
        self._ends: dict[tuple[int, int], tuple[Peer | None, LastWords]] = {}
        """Ends by (slot, incarnation) that wait for the first learner, each with the peer that gets the Ack."""
        self.supervisors: dict[Peer, None] = {}
        """The connections of supervisors. The newest HELLO is last."""
        self.last_close_at = math.inf
        """Time at which the books of all lost and superseded lives are closed; infinity if there are none."""
        self._next_look = 0.0
        self._lapse_at = math.inf
        """No worker's lease runs out before this time."""
        self._began = math.inf
        """Time of the first tick."""

    # -- joining ------------------------------------------------------------------------------------------------------

    def on_hello(self, peer: Peer, hello: WorkerHello, now: float, group: str) -> None:
        """Handle a worker's HELLO: give it its slot and incarnation, if they are still its own.

        `group`: of its key; "" also without keys.
        """
        if not self.same_fleet(peer, hello.fleet_id):
            return
        if hello.slot is not None and self._store.is_folded(hello.slot, hello.incarnation):
            self._fence_folded(peer, hello.slot, hello.incarnation)
            return
        if not self._same_spaces(peer, hello):
            self.refuse_life(peer, hello)
            return
        source = self._place(hello, now)
        slot, highest = source.slot, self._state.incarnations.get(source.slot, 0)
        if source.token and not same_token(source.token, hello.token) and not source.ended:
            detail = f"slot {slot} incarnation {source.incarnation} already belongs to another process"
            self._outbox.reject(peer, "slot_taken", detail)
            return
        if source.incarnation < highest or source.ended:
            self._fence(peer, source)
            return
        source.met_at = now if source.met_at is None else source.met_at
        self._store.merge_settled(source, hello.settled)
        self._store.prove(source, hello.totals)
        self._groups.meet(source, hello.groups, hello.totals)
        source.token = hello.token
        self._supersede(slot, source.incarnation, now)
        source.key_group = group
        self._state.incarnations[slot] = source.incarnation
        self._attach(peer, source, hello, now)
        self._outbox.send(peer, self._welcome(source))

    def _place(self, hello: WorkerHello, now: float) -> Source:
        """Return the source that a HELLO asks for.

        A HELLO without an incarnation, repeated because the answer was slow, gets the same source again.
        """
        if not hello.incarnation:
            given = next((source for source in self.peers.values() if same_token(source.token, hello.token)), None)
            if given is not None:
                return given
        slot = hello.slot if hello.slot is not None else self._free_slot(now)
        return self._store.source(slot, hello.incarnation or self._state.incarnations.get(slot, 0) + 1)

    def _refuse(self, peer: Peer, who: str, code: str, detail: str) -> None:
        """Refuse one message, which its sender may repeat. Count that."""
        self._store.refusals.note(who, code, detail)
        self._outbox.send(peer, Reject(code=code, detail=detail, fatal=False))

    def on_supervisor_hello(self, peer: Peer, hello: SupervisorHello, now: float, _group: str) -> None:
        """Note a supervisor, which may report deaths from now on. Refuse one of another fleet; do not answer ours.

        If it drains the fleet, end sampling.
        """
        if self.same_fleet(peer, hello.fleet_id):
            self.supervisors.pop(peer, None)
            self.supervisors[peer] = None
            if len(self.supervisors) > BROKER_CONNECTIONS:  # the first has gone, or says HELLO with its next obituary
                del self.supervisors[next(iter(self.supervisors))]
            if hello.draining:
                self._store.end_sampling()

    def same_fleet(self, peer: Peer, fleet_id: str) -> bool:
        """Return whether a peer asks for this fleet. Reject one that does not."""
        if fleet_id != self.fleet_id:
            detail = f"this broker serves fleet {self.fleet_id!r}, not {fleet_id!r}; check the endpoint"
            self._outbox.reject(peer, "wrong_fleet", detail)
        return fleet_id == self.fleet_id

    def check_spaces(self, hello: WorkerHello) -> None:
        """Raise `DecodeError` if no learner could read the spaces that a worker tells."""
        if hello.spaces and told_by_module(hello.spaces) != self.spaces:
            module_spaces_from_json(hello.spaces)

    def forget_unused_spaces(self) -> None:
        """Forget the spaces of workers that are gone and left no batch. Call it only while no learner knows them."""
        if self._store.held_batches():
            return
        if not any(s.introduced and (s.peer is not None or s.accepted) for s in self._store.sources.values()):
            self.spaces = {}

    def _same_spaces(self, peer: Peer, hello: WorkerHello) -> bool:
        """Return whether a worker has the fleet's spaces, which the first worker sets. Reject another one."""
        told = told_by_module(hello.spaces)
        if told and not self.spaces:
            self.spaces = told
        if told and told != self.spaces:
            detail = (
                "this worker's observation or action space differs from the fleet's; give every worker the same env "
                "and env_config, or start a fleet of its own for the other env"
            )
            self._outbox.reject(peer, "spaces_differ", detail)
            return False
        return True

    def refuse_life(self, peer: Peer, hello: WorkerHello) -> None:
        """Close the books of a worker that joined and is refused now that its envs are known. It has taken no step."""
        if (source := self.peers.get(peer)) and same_token(source.token, hello.token) and not source.accepted:
            self.forget_peer(source)
            source.close(source.totals, [], Discard.SHUTDOWN)
            self._store.end(source, Discard.SHUTDOWN)

    def _free_slot(self, now: float) -> int:
        taken = {source.slot for source in self.peers.values()} | self._awaited(now)
        brokers = self._limits.brokers
        first = max(FIRST_ASSIGNED_SLOT, self._limits.workers)
        slots = count(first + (self._limits.index - first) % brokers, brokers)
        return next(slot for slot in slots if slot not in taken)

    def _awaited(self, now: float) -> set[int]:
        """Return the slots whose workers may be on their way to this broker, which has just started.

        A new worker in such a slot would supersede the worker that has it.
        """
        if now > self._began + self._limits.lease_s:
            return set()
        newest = self._state.incarnations.items()
        return {slot for slot, incarnation in newest if not self._store.has_ended(slot, incarnation)}

    def _supersede(self, slot: int, incarnation: int, now: float) -> None:
        """Fence every older life of this slot: none of its later batches counts."""
        for source in self._store.by_slot.get(slot, {}).values():
            if source.incarnation < incarnation and not source.ended:
                source.adopt_with_learner(now)
                if source.peer is not None:
                    self._fence(source.peer, source)
                    self.forget_peer(source)
                self._store.fence(source)
                if source.met_at is None:
                    source.silent_until = now

    def _fence(self, peer: Peer, source: Source) -> None:
        detail = f"slot {source.slot} has a newer incarnation than {source.incarnation}; this one must stop"
        self._outbox.send(peer, Fenced(detail=detail, accepted=source.accepted, settled=source.settled))

    def _fence_folded(self, peer: Peer, slot: int, incarnation: int) -> None:
        detail = f"incarnation {incarnation} of slot {slot} has ended, and its books are closed; this one must stop"
        self._outbox.send(peer, Fenced(detail=detail))

    def _attach(self, peer: Peer, source: Source, hello: WorkerHello, now: float) -> None:
        self.forget_peer(source)
        if (before := self.peers.get(peer)) is not None:  # a connection speaks for one life
            self.forget_peer(before)
        self._store.unreported.add(source.key)
        source.peer = peer
        self.peers[peer] = source
        source.host, source.pid = hello.host[:_LONGEST_HOST], hello.pid
        source.headrace_version = hello.headrace_version
        self._hear(source, now, hello.silence_s)
        source.introduced = bool(hello.spaces)
        source.num_envs, source.cut_steps = max(1, hello.num_envs), max(1, hello.cut_steps)
        shapes = tellable_shapes(hello.weight_shapes)
        kinds = {module_id: hello.weight_kinds.get(module_id, "")[: len(own)] for module_id, own in shapes.items()}
        source.weights_told = {"weight_shapes": shapes, "weight_kinds": kinds} if shapes else {}
        source.weights = max(source.weights, hello.weights)
        if hello.totals.seq == source.accepted:
            source.totals = hello.totals

    def forget_peer(self, source: Source) -> None:
        """Forget this source's connection; send nothing to it any more."""
        if source.peer is not None:
            self.peers.pop(source.peer, None)
            self._store.unreported.add(source.key)
            source.peer = None

    def expel(self, peer: Peer) -> None:
        """Forget a connection that the broker ends, of a worker or a supervisor."""
        self.supervisors.pop(peer, None)
        if (source := self.peers.get(peer)) is not None:
            self.forget_peer(source)

    def _welcome(self, source: Source) -> WorkerWelcome:
        return WorkerWelcome(
            fleet_id=self.fleet_id,
            max_batch_bytes=self._limits.max_batch_bytes,
            lease_s=self._limits.lease_s,
            weights_endpoint=self._limits.weights_endpoint,
            maps_weights=True,
            counters=self._state.counters.get(source.slot, {}),
            encodings=readable_encodings(),
            **self._acks.told(source, len(self.peers)),
        )

    # -- working ------------------------------------------------------------------------------------------------------

    def on_batch(self, peer: Peer, header: BatchHeader, frames: list[Buffer], nbytes: int, now: float) -> bool:
        """Accept a batch if it is the next one of a live incarnation. Return whether it was accepted."""
        version = (header.learner_epoch, header.weights_seq)
        held = StoredBatch(header.seq, header.steps, header.chunks, nbytes, frames, 0, now, version)
        return self._accept(peer, header, held, now)

    def on_skip(self, peer: Peer, skip: Skip, now: float) -> None:
        """Accept, in place of a batch, the message that the batch exists no more."""
        batch = skip.batch
        reason = skip.reason if skip.reason in set(Drop) else Drop.OTHER
        held = StoredBatch(batch.seq, batch.steps, batch.chunks, 0, None, 0, now, dropped=reason)
        self._accept(peer, skip, held, now)

    def _accept(self, peer: Peer, told: BatchHeader | Skip, held: StoredBatch, now: float) -> bool:
        source = self._source_of(peer, told.slot, told.incarnation)
        if source is None:
            return False
        is_next = held.seq == source.accepted + 1
        self._hear(source, now)
        excess = self._store.excess(source, held) if is_next else None
        if excess := excess or (self._groups.excess(source, held) if self._groups.holding else None):
            self._store.note_changed(source)
            self._refuse(peer, f"worker {source.slot} (incarnation {source.incarnation})", *excess)
            return False
        if is_next:
            self._store.accept(source, held, told)
            return True
        self._store.note_changed(source)
        return self._groups.resent(source, held, told)

    def on_heartbeat(self, peer: Peer, beat: Heartbeat, now: float) -> None:
        """Note the state that a worker reports, and answer with an Ack."""
        source = self._source_of(peer, beat.slot, beat.incarnation)
        if source is None:
            return
        self._hear(source, now)
        source.weights, source.blocked = beat.weights, beat.blocked
        source.figures.take(beat, now)
        source.refused = beat.refused and beat.refused.model_copy(update={"slot": source.slot})
        source.metrics = beat.metrics or source.metrics
        source.know_cut(beat.totals)
        if beat.totals.seq == source.accepted:
            source.totals = beat.totals
            self._store.rounds.learn(source, beat.weights, beat.round_steps)
        self._keep_counters(source.slot, beat.counters)
        self._store.note_changed(source)

    def _keep_counters(self, slot: int, counters: Counters) -> None:
        """Keep the counters of the slot's runner; a worker that is still building its envs sends none."""
        if counters:
            self._state.counters[slot] = larger(self._state.counters.get(slot, {}), counters)

    def _source_of(self, peer: Peer, slot: int, incarnation: int) -> Source | None:
        """Return the source that this peer speaks for. Ask an unknown peer for a HELLO; fence a superseded one."""
        source = self.peers.get(peer)
        if source is not None and source.key == (slot, incarnation):
            return source
        known = self._store.sources.get((slot, incarnation))
        if known is not None and known.ended:
            self._fence(peer, known)
        elif self._store.is_folded(slot, incarnation):
            self._fence_folded(peer, slot, incarnation)
        else:
            self._outbox.ask_hello(peer)
        return None

    # -- leaving ------------------------------------------------------------------------------------------------------

    def on_bye(self, peer: Peer, bye: Bye, now: float) -> None:
        """Close the books of a worker that leaves.

        Only the worker itself can send this. It repeats the message if it missed the answer.
        """
        if self._store.is_folded(bye.slot, bye.incarnation):
            self._acknowledge_folded(peer, bye)
            return
        known = self._store.sources.get((bye.slot, bye.incarnation))
        if known is not None and known.closed:
            # Any peer can send this for a closed life, so take over no part of it.
            self._outbox.send(peer, self._acks.ack(known, len(self.peers)))
        elif (source := self._source_of(peer, bye.slot, bye.incarnation)) is not None:
            self._keep_counters(bye.slot, bye.counters)
            source.metrics = bye.metrics or source.metrics
            for group in bye.env_errors:
                source.figures.note_env_error(group)
            self._close_books(peer, bye, now)

    def on_obituary(self, peer: Peer, obituary: Obituary, now: float) -> None:
        """Note a supervisor's report that a worker is dead.

        The learner may hold batches of it that this broker never saw, so the books stay open until the learner was
        heard.
        """
        if peer not in self.supervisors:
            self._outbox.ask_hello(peer, "say HELLO first: this may be another fleet's broker")
            return
        life = obituary.slot, obituary.incarnation
        source = self._store.sources.get(life)
        if source is not None and source.is_unrecorded(obituary):
            obituary = self._end_as_told(source, obituary.reason, now, "its supervisor found no recorder of it")
        self._ends[life] = peer, obituary
        self.close_dead(now)

    def close_dead(self, now: float) -> None:
        """Close the books of all workers reported dead, once the learner has said which batches it has.

        Without a learner ever, close those of workers that never cut a batch at once: there is nothing to say.
        """
        for life, (peer, words) in [*self._ends.items()]:
            if self._store.is_reconciled or not (self._state.epoch or words.totals.seq):
                del self._ends[life]
                self._close_books(peer, words, now)

    def _close_books(self, peer: Peer | None, words: LastWords, now: float) -> None:
        """Close an incarnation's books with what it left behind. A repeated message is only acknowledged again.

        If an earlier broker closed them and no learner has taken the end, tell this broker's learner of the end.
        """
        if self._store.is_folded(words.slot, words.incarnation):
            self._acknowledge_folded(peer, words)
            return
        source = self._store.source(words.slot, words.incarnation)
        if not source.closed:
            self._store.merge_settled(source, words.settled)
            self._store.prove(source, words.totals)
            source.adopt_with_learner(now, {batch.seq: batch for batch in words.window})
            self.forget_peer(source)
            # A recorder may be older than the worker's batches where its machine lost its power.
            totals = max(words.totals, source.totals, source.cut, key=lambda told: (told.seq, told.stepped))
            window = words.window if totals.seq == words.totals.seq else []
            source.close(totals, window or source.rest_of(totals), words.reason)
            highest = self._state.incarnations.get(words.slot, 0)
            self._state.incarnations[words.slot] = max(highest, words.incarnation)
            self._store.end(source, words.reason)
        elif source.restored is not None and not source.end_taken:
            self._store.end(source, words.reason)
        final = self._is_final(source)
        self._outbox.send(peer, self._acks.ack(source, len(self.peers)).model_copy(update={"final": final}))

    def _acknowledge_folded(self, peer: Peer | None, words: LastWords) -> None:
        """Acknowledge the end of a life that was folded: all of it is in the books already."""
        seq = words.totals.seq
        ack = Ack(
            slot=words.slot,
            incarnation=words.incarnation,
            accepted=seq,
            settled=words.settled,
            credit=seq,
            closed=True,
            final=True,
        )
        self._outbox.send(peer, ack)

    # -- telling ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Forget the connections of workers whose lease ran out."""
        self._began = min(self._began, now)
        if now > self._lapse_at:
            for source in [source for source in self.peers.values() if now > source.silent_until]:
                self.forget_peer(source)
            self._lapse_at = min((source.silent_until for source in self.peers.values()), default=math.inf)
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._note_unheard(now)
        self.close_dead(now)

    def _hear(self, source: Source, now: float, silence_s: float = 0.0) -> None:
        """Note that a worker was heard. Its lease begins again; it may be silent for `silence_s` before."""
        source.silent_until = now + self._limits.lease_s + silence_s
        self._lapse_at = min(self._lapse_at, source.silent_until)

    def _note_unheard(self, now: float) -> None:
        """Note the end of superseded lives whose end no supervisor has reported.

        Their machine was lost with their recorder, so their steps since the last message are unknown. The same holds
        for lives that this broker knows only from Redis, unless a learner claims more batches of a life than Redis
        knows.
        """
        last = 0.0
        for source in self._store.sources.values():
            if source.ended and not source.closed and now > source.silent_until + UNHEARD_S:
                self._store.end(source, source.end_reason)
            if source.restored is not None and not source.end_due and now > self._began + UNHEARD_S:
                self._store.take_end(source)  # no supervisor has reported it
            closes_at = self._closes_at(source)
            if now > closes_at:
                why = "no supervisor has told of its end"
                self._ends[source.key] = None, self._end_as_told(source, Discard.WORKER_KILLED, now, why)
            elif closes_at < math.inf:
                last = max(last, closes_at)
        self.last_close_at = last or math.inf

    def _end_as_told(self, source: Source, reason: str, now: float, why: str) -> Obituary:
        """Return the end of a life whose recorder is lost, with the steps that it had told of. Log it."""
        if source.met_at is None:
            source.totals = source.cut
        if source.key not in self._ends:  # supervisors repeat it
            log.warning(
                "worker %d (incarnation %d, %s) was lost, and %s: its books are closed with the %d steps that it had "
                "told of",
                *source.key,
                "known from Redis" if source.met_at is None else f"pid {source.pid} on {source.host!r}",
                why,
                max(source.totals.stepped, source.cut.stepped),
            )
        return Obituary(
            slot=source.slot,
            incarnation=source.incarnation,
            totals=source.totals,
            settled=source.settled,
            reason=reason,
        )

    def _closes_at(self, source: Source) -> float:
        """Return when to close the books of a life whose end no supervisor reports; infinity for a life that may go on.

        A superseded life cannot go on.
        """
        newest = self._state.incarnations.get(source.slot, 0)
        if source.closed or source.peer is not None or source.incarnation >= newest or source.key in self._ends:
            return math.inf
        silent_until = source.silent_until
        if source.met_at is None:
            if not source.cut.stepped or self._store.is_claimed(source):
                return math.inf
            silent_until = max(silent_until, self._began)
        return silent_until + UNHEARD_S

    def mark_all_changed(self) -> None:
        """Mark every worker's source as changed, so that each gets the cumulative state."""
        self._store.changed.update(source.key for source in self.peers.values())

    def mark_silent_changed(self, now: float) -> None:
        """Mark the sources of workers that said nothing for longer than a heartbeat should take.

        The others had the cumulative state as an answer.
        """
        limits = self._limits
        heard_since = now - 1.5 * limits.heartbeat_interval(len(self.peers))
        silent = (s.key for s in self.peers.values() if s.silent_until - limits.lease_s < heard_since)
        self._store.changed.update(silent)
