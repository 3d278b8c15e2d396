"""The broker's side towards workers and their supervisors: slots, acceptance, fencing, closing the books."""

from __future__ import annotations

from typing import Any

from headrace.broker.acknowledgements import Acknowledgements
from headrace.broker.batch_store import BatchStore
from headrace.broker.limits import BrokerLimits, BrokerState
from headrace.broker.outbox import Outbox
from headrace.broker.source import Peer, Source, StoredBatch
from headrace.schemas.batch import BatchHeader
from headrace.schemas.ledger import Discard
from headrace.schemas.messages import (
    Bye,
    Fenced,
    Heartbeat,
    LastWords,
    Obituary,
    Skip,
    SupervisorHello,
    WorkerHello,
    WorkerWelcome,
    tellable_shapes,
)
from headrace.schemas.module_spaces import told_by_module
from headrace.schemas.runner_counters import Counters, larger
from headrace.schemas.wire import Buffer

FIRST_ASSIGNED_SLOT = 1000
"""Slots below this belong to supervisors, which name them. A worker that names none gets one from here on."""

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
        acks: Acknowledgements,
    ) -> None:
        self.fleet_id = fleet_id
        self.spaces: dict[str, Any] = {}
        self.peers: dict[Peer, Source] = {}
        self._limits = limits
        self._state = state
        self._store = store
        self._outbox = outbox
        self._acks = acks
        self._obituaries: dict[tuple[int, int], tuple[Peer, LastWords]] = {}
        self._supervisors: set[Peer] = set()

    # -- joining ------------------------------------------------------------------------------------------------------

    def on_hello(self, peer: Peer, hello: WorkerHello, now: float) -> None:
        """Handle a worker's HELLO: give it its slot and incarnation, if they are still its own."""
        if not self._same_fleet(peer, hello.fleet_id):
            return
        if not self._same_spaces(peer, hello):
            self._refuse_life(peer, hello)
            return
        source = self._place(hello)
        slot, highest = source.slot, self._state.incarnations.get(source.slot, 0)
        self._store.merge_settled(source, hello.settled)
        if source.incarnation < highest or source.ended:
            self._fence(peer, source)
            return
        if source.token not in ("", hello.token):
            detail = f"slot {slot} incarnation {source.incarnation} already belongs to another process"
            self._outbox.reject(peer, "slot_taken", detail)
            return
        source.token = hello.token
        self._supersede(slot, source.incarnation, now)
        self._state.incarnations[slot] = source.incarnation
        self._attach(peer, source, hello, now)
        self._outbox.send(peer, self._welcome(source))

    def _place(self, hello: WorkerHello) -> Source:
        """Return the source that a HELLO asks for.

        A HELLO that names none, repeated because the answer was slow, gets the same source again.
        """
        if not hello.incarnation:
            given = next((source for source in self.peers.values() if source.token == hello.token), None)
            if given is not None:
                return given
        slot = hello.slot if hello.slot is not None else self._free_slot()
        return self._store.source(slot, hello.incarnation or self._state.incarnations.get(slot, 0) + 1)

    def on_supervisor_hello(self, peer: Peer, hello: SupervisorHello, now: float) -> None:
        """Note a supervisor, which may report deaths from now on. Refuse one of another fleet; ours gets no answer."""
        if self._same_fleet(peer, hello.fleet_id):
            self._supervisors.add(peer)

    def _same_fleet(self, peer: Peer, fleet_id: str) -> bool:
        if fleet_id != self.fleet_id:
            detail = f"this broker serves fleet {self.fleet_id!r}, not {fleet_id!r}; check the endpoint"
            self._outbox.reject(peer, "wrong_fleet", detail)
        return fleet_id == self.fleet_id

    def _same_spaces(self, peer: Peer, hello: WorkerHello) -> bool:
        told = told_by_module(hello.spaces)
        self.spaces = self.spaces or told
        if told and told != self.spaces:
            detail = (
                "this worker's observation or action space differs from the fleet's; give every worker the same env "
                "and env_config, or start a fleet of its own for the other env"
            )
            self._outbox.reject(peer, "spaces_differ", detail)
            return False
        return True

    def _refuse_life(self, peer: Peer, hello: WorkerHello) -> None:
        """Close the books of a worker that joined and is refused now that its envs are known. It has taken no step."""
        source = self.peers.get(peer)
        if source is not None and source.token == hello.token and not source.accepted:
            self.forget_peer(source)
            source.close(source.totals, [], Discard.SHUTDOWN)
            self._store.end(source, Discard.SHUTDOWN)

    def _free_slot(self) -> int:
        taken = {source.slot for source in self.peers.values()}
        slots = range(FIRST_ASSIGNED_SLOT, FIRST_ASSIGNED_SLOT + len(taken) + 1)
        return next(slot for slot in slots if slot not in taken)

    def _supersede(self, slot: int, incarnation: int, now: float) -> None:
        """Fence every older life of this slot: none of its later batches counts."""
        for source in self._store.sources.values():
            if source.slot == slot and source.incarnation < incarnation and not source.ended:
                source.adopt_with_learner(now)
                if source.peer is not None:
                    self._fence(source.peer, source)
                    self.forget_peer(source)
                self._store.end(source, Discard.FENCED)

    def _fence(self, peer: Peer, source: Source) -> None:
        detail = f"slot {source.slot} has a newer incarnation than {source.incarnation}; this one must stop"
        self._outbox.send(peer, Fenced(detail=detail, accepted=source.accepted, settled=source.settled))

    def _attach(self, peer: Peer, source: Source, hello: WorkerHello, now: float) -> None:
        self.forget_peer(source)
        source.peer = peer
        self.peers[peer] = source
        source.host, source.pid = hello.host[:_LONGEST_HOST], hello.pid
        source.silent_until = now + self._limits.lease_s + hello.silence_s
        source.introduced = bool(hello.spaces)
        source.num_envs, source.cut_steps = max(1, hello.num_envs), max(1, hello.cut_steps)
        source.weight_shapes = tellable_shapes(hello.weight_shapes)
        if hello.totals.seq == source.accepted:
            source.totals = hello.totals

    def forget_peer(self, source: Source) -> None:
        """Forget this source's connection; send nothing to it any more."""
        if source.peer is not None:
            self.peers.pop(source.peer, None)
            source.peer = None

    def _welcome(self, source: Source) -> WorkerWelcome:
        return WorkerWelcome(
            fleet_id=self.fleet_id,
            slot=source.slot,
            incarnation=source.incarnation,
            accepted=source.accepted,
            settled=source.settled,
            credit=self._acks.credit(source, len(self.peers)),
            window_steps=self._acks.window_steps(source, len(self.peers)),
            synchronous=self._store.rounds.known,
            round_steps=self._store.rounds.share(source),
            max_batch_bytes=self._limits.max_batch_bytes,
            lease_s=self._limits.lease_s,
            heartbeat_interval_s=self._limits.heartbeat_interval_s,
            weights_endpoint=self._limits.weights_endpoint,
            weights=self._store.weights,
            steps_elsewhere=self._store.rounds.steps_elsewhere(source, self._store.steps),
            steps_share=self._acks.steps_share(len(self.peers)),
            counters=self._state.counters.get(source.slot, {}),
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
        held = StoredBatch(batch.seq, batch.steps, batch.chunks, 0, None, 0, now, dropped=skip.reason)
        self._accept(peer, skip, held, now)

    def _accept(self, peer: Peer, told: BatchHeader | Skip, held: StoredBatch, now: float) -> bool:
        source = self._source_of(peer, told.slot, told.incarnation)
        if source is None:
            return False
        self._store.changed.add(source.key)
        if held.seq != source.accepted + 1:
            return False
        source.silent_until = now + self._limits.lease_s
        self._store.accept(source, held, told.totals)
        return True

    def on_heartbeat(self, peer: Peer, beat: Heartbeat, now: float) -> None:
        """Note the state that a worker reports, and answer with an Ack."""
        source = self._source_of(peer, beat.slot, beat.incarnation)
        if source is None:
            return
        source.silent_until = now + self._limits.lease_s
        source.weights, source.blocked = beat.weights, beat.blocked
        source.refused = beat.refused and beat.refused.model_copy(update={"slot": source.slot})
        source.metrics = beat.metrics or source.metrics
        if beat.totals.seq == source.accepted:
            source.totals = beat.totals
            self._store.rounds.learn(source, beat.weights, beat.round_steps)
        self._keep_counters(source.slot, beat.counters)
        self._store.changed.add(source.key)

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
        else:
            self._outbox.ask_hello(peer)
        return None

    # -- leaving ------------------------------------------------------------------------------------------------------

    def on_bye(self, peer: Peer, bye: Bye, now: float) -> None:
        """Close the books of a worker that leaves.

        Only the worker can say so, or repeat it when it missed the answer.
        """
        known = self._store.sources.get((bye.slot, bye.incarnation))
        if (known is not None and known.closed) or self._source_of(peer, bye.slot, bye.incarnation) is not None:
            self._keep_counters(bye.slot, bye.counters)
            if known is not None:
                known.metrics = bye.metrics or known.metrics
            self._close_books(peer, bye, now)

    def on_obituary(self, peer: Peer, obituary: Obituary, now: float) -> None:
        """Note a supervisor's report that a worker is dead.

        The learner may hold batches of it that this broker never saw, so the books stay open until the learner was
        heard.
        """
        if peer not in self._supervisors:
            self._outbox.ask_hello(peer, "say HELLO first: this may be another fleet's broker")
            return
        self._obituaries[(obituary.slot, obituary.incarnation)] = (peer, obituary)
        self.close_dead(now)

    def close_dead(self, now: float) -> None:
        """Close the books of all workers reported dead, once the learner has said which batches it has."""
        if self._obituaries and self._store.is_reconciled:
            for peer, words in self._obituaries.values():
                self._close_books(peer, words, now)
            self._obituaries.clear()

    def _close_books(self, peer: Peer, words: LastWords, now: float) -> None:
        """Close an incarnation's books with what it left behind. A repeated message is only acknowledged again."""
        source = self._store.source(words.slot, words.incarnation)
        if not source.closed:
            self._store.merge_settled(source, words.settled)
            source.adopt_with_learner(now)
            self.forget_peer(source)
            source.close(words.totals, words.window, words.reason)
            highest = self._state.incarnations.get(words.slot, 0)
            self._state.incarnations[words.slot] = max(highest, words.incarnation)
            self._store.end(source, words.reason)
        self._outbox.send(peer, self._acks.ack(source, len(self.peers)))

    # -- telling ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Forget the connections of workers whose lease ran out."""
        for source in [source for source in self.peers.values() if now > source.silent_until]:
            self.forget_peer(source)
        self.close_dead(now)

    def mark_all_changed(self) -> None:
        """Mark every worker's source as changed, so that each gets the cumulative state."""
        self._store.changed.update(source.key for source in self.peers.values())
