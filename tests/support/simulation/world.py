"""A seeded world for the three protocol state machines: a network that breaks, delays, drops and repeats, and processes
that crash, stop and come back. Time is simulated; the same seed gives the same history.

The state machines under test are the product's own. What is simulated is everything around them: sockets, the worker's
recorder file, the broker's state file, Redis, the learner's checkpoint, and the supervisor.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.sessions.core import BrokerCore
from headrace.learner_stub.streaming.session import LearnerSession, StreamLimits
from headrace.learner_stub.streaming.session import LearnerSessionState as LearnerState
from headrace.learner_stub.streaming.source_progress import ArrivalKind
from headrace.learner_stub.streaming.update_size import UpdateSize
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.lag_buckets import LAG_BUCKETS
from headrace.schemas.accounts.ledger import Drop, HeldBatch, LedgerRow, Settled, WorkerTotals, plus
from headrace.schemas.basics.bounds import TRAIN
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.chunks.module_spaces import module_spaces_to_json
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.schemas.messages import (
    Ack,
    LearnerFigures,
    Message,
    Obituary,
    SourceGap,
    SourcePosition,
    SupervisorHello,
    WorkerHello,
)
from headrace.schemas.messages.learner_messages import LEARNER_PARTS
from headrace.workers.fleet.session import SessionState as WorkerState
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.window import SessionLimits, Shipment
from support.simulation.strangers import Strangers

FLEET = "simulated"
LEASE_S = 4.0
IDLE_S = 8.0
SPACES = module_spaces_to_json(
    {"default_policy": Spaces(observation=Box(shape=(1,), dtype="<f4"), action=Discrete(n=2))}
)
TICK_S = 0.5
FRAGMENT_STEPS = 9
"""The most steps that a worker cuts at once."""


@dataclass(frozen=True)
class Faults:
    """How hostile the world is. Rates are chances for each message; counts are events in the hostile phase."""

    drop: float = 0.0
    repeat: float = 0.0
    breaks: int = 4
    worker_kills: int = 1
    worker_stops: int = 1
    broker_kills: int = 2
    learner_kills: int = 2
    reader_kills: int = 0
    """Kills of readers of other consumer groups."""
    rival_learners: int = 0
    """A second learner starts while the first lives; the older must be fenced."""
    whole_kills: int = 0
    """All processes die at once, the supervisor too, and a new fleet starts from what is on disk and in Redis."""
    joint_kills: int = 0
    """Two or three of worker, broker and learner die at the same instant."""
    redis_stops: int = 0
    """Nothing reaches Redis for some seconds."""
    redis_absent: bool = False
    keep_state_file: bool = True


@dataclass(frozen=True)
class Settings:
    """One schedule."""

    seed: int
    workers: int = 2
    batches: int = 12
    hostile_s: float = 12.0
    faults: Faults = Faults()
    limits: BrokerLimits = BrokerLimits(lease_s=LEASE_S, max_held_bytes=1 << 20)
    session: SessionLimits = SessionLimits(window_batches=4)
    learner_window: int = 3
    tells_size: bool = False
    """The learner says how many steps it wants under way, and the workers' windows follow."""
    round_steps: int = 0
    """Synchronous sampling with rounds of so many steps; 0: not synchronous."""
    publishes: bool = False
    """The learner publishes weights while it trains."""
    strangers: bool = False
    """Other connections send faulty messages beside the honest ones, while the world is hostile."""


@dataclass
class Recorder:
    """The content of the worker's memory-mapped file. It survives the process."""

    totals: WorkerTotals = WorkerTotals()
    settled: Settled = Settled()
    window: list[HeldBatch] = field(default_factory=list)


class Link:
    """One peer's connection to the broker. A break loses what is under way and makes it another peer."""

    def __init__(self, world: World, owner: Any) -> None:
        self.world = world
        self.owner = owner
        self.peer = b""
        self.up_at = 0.0
        self._last: dict[bool, float] = {True: 0.0, False: 0.0}
        self.reconnect(0.0)

    def reconnect(self, pause: float) -> None:
        self.world.links.pop(self.peer, None)
        self.world.peers += 1
        self.peer = str(self.world.peers).encode()
        self.world.links[self.peer] = self
        self.up_at = self.world.now + pause

    def cut(self) -> None:
        """Never connect again."""
        self.world.links.pop(self.peer, None)
        self.peer = b"gone"

    def to_broker(self, content: Any) -> None:
        self._carry(True, lambda peer: self.world.broker_gets(peer, content))

    def to_owner(self, content: Any) -> None:
        self._carry(False, lambda _: self.owner.gets(content))

    def _carry(self, up: bool, deliver: Callable[[bytes], None]) -> None:
        """Deliver in order on this connection, unless it breaks first; sometimes twice, sometimes not at all."""
        world, peer = self.world, self.peer
        if world.hostile and world.random.random() < world.settings.faults.drop:
            return
        twice = world.hostile and world.random.random() < world.settings.faults.repeat
        for _ in range(1 + twice):
            at = max(self._last[up], self.up_at, world.now) + world.random.random() * 0.05
            self._last[up] = at
            world.at(at, lambda: deliver(peer) if peer == self.peer else None)


class SimWorker:
    """A worker process with its sampler: cuts batches while its window has room."""

    def __init__(self, world: World, slot: int, incarnation: int) -> None:
        self.world = world
        self.slot = slot
        self.incarnation = incarnation
        self.recorder = world.recorders[(slot, incarnation)] = Recorder()
        self.alive = True
        self.stopped = False
        self.inbox: list[Any] = []
        self.cut = 0
        hello = WorkerHello(
            fleet_id=FLEET, token=f"w{slot}/{incarnation}", slot=slot, incarnation=incarnation, spaces=SPACES
        )
        self.session = WorkerSession(hello, world.settings.session)
        self.link = Link(world, self)
        self.run()

    def run(self) -> None:
        if not self.alive:
            return
        if not self.stopped:
            self.work()
        self.world.at(self.world.now + TICK_S * (0.5 + self.world.random.random()), self.run)

    def work(self) -> None:
        world, session = self.world, self.session
        for content in self.inbox:
            session.receive(content, world.now)
        self.inbox.clear()
        self._sample()
        session.tick(world.now)
        self._flush()
        if session.state is WorkerState.FENCED or session.state is WorkerState.LEFT:
            self.exit("fenced" if session.state is WorkerState.FENCED else "shutdown")

    def _sample(self) -> None:
        session, world = self.session, self.world
        totals = self.recorder.totals
        session.weights = session.weights_known
        synchronous = session.is_synchronous or world.settings.round_steps
        room = session.round_left() if synchronous else FRAGMENT_STEPS
        may_cut = session.state is WorkerState.ACTIVE and self.cut < world.settings.batches and session.has_room()
        if may_cut and room and session.may_step():
            steps = world.random.randint(1, min(room, FRAGMENT_STEPS))
            chunks = min(steps, world.random.randint(1, 3))
            self.cut += 1
            totals = WorkerTotals(
                seq=session.next_seq,
                stepped=totals.stepped - totals.open + steps,
                shipped=totals.shipped + steps,
                shipped_chunks=totals.shipped_chunks + chunks,
            )
            batch = HeldBatch(seq=totals.seq, steps=steps, chunks=chunks)
            self._record(totals, [*session.window(), batch])
            header = batch_header(self, batch, totals)
            session.submit(Shipment(batch, 100, [header], totals))  # type: ignore[list-item]
            for history in (world.history, *world.histories.values()):
                history.cut(self.slot, self.incarnation, batch)
            world.versions[(self.slot, self.incarnation, batch.seq)] = session.weights
        elif world.hostile and session.welcome is not None and self._may_go_on():
            open_steps = world.random.randint(0, 3)
            more = totals.model_copy(update={"stepped": totals.stepped - totals.open + open_steps, "open": open_steps})
            self._record(more, session.window())

    def _may_go_on(self) -> bool:
        return self.cut < self.world.settings.batches and self.session.may_step()

    def _record(self, totals: WorkerTotals, window: list[HeldBatch]) -> None:
        self.recorder.totals, self.recorder.window = totals, window
        self.recorder.settled = self.session.settled

    def _flush(self) -> None:
        for out in self.session.take_outbox():
            if isinstance(out, Shipment):
                self.link.to_broker(out.frames[0])  # type: ignore[index]
            else:
                self.link.to_broker(out)

    def gets(self, content: Any) -> None:
        if self.alive:
            self.inbox.append(content)
            if not self.stopped:
                self.work()

    def exit(self, reason: str) -> None:
        self.recorder.settled = self.session.settled if reason != "worker_killed" else self.recorder.settled
        self.die()
        self.world.supervisor.died((self.slot, self.incarnation), reason)
        if reason == "worker_killed":
            self.world.replace(self)

    def die(self) -> None:
        """End without a word; only the recorder is left."""
        self.alive = False
        self.link.cut()
        for history in (self.world.history, *self.world.histories.values()):
            history.died(self.slot, self.incarnation, self.recorder.totals.stepped)


def batch_header(worker: SimWorker, batch: HeldBatch, totals: WorkerTotals) -> BatchHeader:
    return BatchHeader(
        fleet_id=FLEET,
        slot=worker.slot,
        incarnation=worker.incarnation,
        seq=batch.seq,
        steps=batch.steps,
        chunks=batch.chunks,
        learner_epoch=worker.session.weights[0],
        weights_seq=worker.session.weights[1],
        totals=totals,
    )


class SimLearner:
    """A learner process, or a reader of another `group`: takes arrivals, trains, writes its checkpoint, commits."""

    def __init__(self, world: World, group: str = TRAIN) -> None:
        self.world = world
        self.group = group
        self.alive = True
        world.learners += 1
        position, self.trained, self.ends = world.checkpoints[group]
        self.trained, self.ends = list(self.trained), list(self.ends)
        round_steps = world.settings.round_steps if group == TRAIN else 0
        limits = StreamLimits(
            window_batches=world.settings.learner_window,
            window_bytes=1 << 20,
            synchronous=bool(round_steps),
            steps_per_update=round_steps,
        )
        self.published = 0
        self.gathered, self.idle_since = 0, world.now
        self.session = LearnerSession(f"l{world.learners}", limits, position=position, group=group)
        self.session.figures = self._figures
        self._began, self._handed = world.now, 0
        self.updates = UpdateSize(None, auto_commit=False)
        self.link = Link(world, self)
        self.run()

    def run(self) -> None:
        if self.alive:
            self.work()
            self.world.at(self.world.now + TICK_S * (0.5 + self.world.random.random()), self.run)

    def work(self) -> None:
        world, session = self.world, self.session
        for _ in range(world.random.randint(0, 4)):
            arrival = session.take()
            if arrival is None:
                break
            if arrival.kind is ArrivalKind.BATCH and arrival.batch is not None:
                self.trained.append((*arrival.key, arrival.batch.seq, arrival.batch.steps, arrival.batch.chunks))
                self.updates.take(arrival.batch.steps)
                self._handed += arrival.batch.steps
                self.gathered, self.idle_since = self.gathered + arrival.batch.steps, world.now
                session.settle(arrival, (arrival.batch.steps, arrival.batch.chunks), {})
            elif arrival.kind is ArrivalKind.GAP and arrival.batch is not None:
                session.settle(arrival, (0, 0), {arrival.reason: (arrival.batch.steps, arrival.batch.chunks)})
            elif arrival.kind is ArrivalKind.END:
                if arrival.content.seq:  # type: ignore[attr-defined]
                    self.ends.append(arrival.key)  # else it says that the life is folded, or left no batch
                session.settle(arrival, (0, 0), {})
        if session.uncommitted() and world.random.random() < 0.6:
            if session.state is not LearnerState.STOPPED:
                world.checkpoints[self.group] = (session.position(), list(self.trained), list(self.ends))
            if world.random.random() < 0.9:
                session.commit(world.now, at_once=world.random.random() < 0.5)
                self.updates.end()
        if self.group == TRAIN:
            self._publish()
        if world.settings.tells_size and self.group == TRAIN:
            session.want_window(self.updates.window_steps())
        session.tick(world.now)
        for out in session.take_outbox():
            self.link.to_broker(out)
        if session.state is LearnerState.STOPPED:
            self.alive = False

    def _figures(self) -> LearnerFigures:
        return LearnerFigures(
            time_spent=dict.fromkeys(LEARNER_PARTS, (self.world.now - self._began) / len(LEARNER_PARTS)),
            consumed_lag=[self._handed, *[0] * (LAG_BUCKETS - 1)],
        )

    def _publish(self) -> None:
        """Publish after each update, and when nothing more comes; say the newest version again each time."""
        world, session = self.world, self.session
        if session.state is LearnerState.ACTIVE and world.settings.round_steps:
            if (
                not self.published
                or self.gathered >= world.settings.round_steps
                or world.now - self.idle_since > IDLE_S
            ):
                self.published += 1
                self.gathered, self.idle_since = 0, world.now
            self.link.to_broker((session.epoch, self.published))
        elif session.state is LearnerState.ACTIVE and world.settings.publishes and world.random.random() < 0.5:
            self.published += 1
            self.link.to_broker((session.epoch, self.published))

    def gets(self, content: Any) -> None:
        if not self.alive:
            return
        if isinstance(content, BatchHeader):
            self.session.receive_batch(content, [], self.world.now)
        else:
            self.session.receive(content, self.world.now)

    def kill(self) -> None:
        self.alive = False
        self.link.cut()


class SimSupervisor:
    """Reads recorders of the dead and reports each until a broker has taken it, all of them again to a restarted
    broker. It deletes a recorder once Redis has the final books of that life: nothing else outlives all processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.written: dict[tuple[int, int], Obituary] = {}
        self.due: dict[tuple[int, int], Obituary] = {}
        self.link = Link(world, self)
        for key in world.recorders:  # those of an earlier fleet
            self.died(key, "worker_killed")
        self.run()

    def run(self) -> None:
        if not self.alive:
            return
        for obituary in self.due.values():
            self.link.to_broker(SupervisorHello(fleet_id=FLEET, token="supervisor"))
            self.link.to_broker(obituary)
        for key in self.written.keys() & self.world.recorders.keys():
            row = self.world.redis.get(key)
            if self.world.is_folded(key) or (row is not None and row.end_taken and row.held == (0, 0)):
                del self.world.recorders[key]
        for key in [key for key in self.written if self.world.is_folded(key) and key not in self.due]:
            del self.written[key]
        self.world.at(self.world.now + 1.0, self.run)

    def died(self, key: tuple[int, int], reason: str) -> None:
        r = self.world.recorders[key]
        window = [batch for batch in r.window if batch.seq > r.settled.seq]
        self.written[key] = self.due[key] = Obituary(
            slot=key[0],
            incarnation=key[1],
            totals=r.totals,
            settled=r.settled,
            window=window,
            reason=reason,
        )

    def gets(self, content: Any) -> None:
        if self.alive and isinstance(content, Ack) and content.closed:
            self.due.pop((content.slot, content.incarnation), None)

    def kill(self) -> None:
        self.alive = False
        self.link.cut()


class World:
    """Runs one schedule: a hostile phase, then peace until everything is settled or the deadline has passed."""

    hears_ends_once = True
    """False where a learner's next process may begin from the broker's commits, without a position."""

    def __init__(self, settings: Settings, history: Any, histories: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.settings = settings
        self.histories = histories
        """The histories of other consumer groups, by name."""
        self.random = random.Random(settings.seed)
        self.history = history
        self.strangers = Strangers(settings.seed) if settings.strangers else None
        self.now = 0.0
        self.hostile = True
        self.links: dict[bytes, Link] = {}
        self.versions: dict[tuple[int, ...], tuple[int, int]] = {}
        """Weights of each batch that was cut: (slot, incarnation, seq) -> version."""
        self.given: set[tuple[int, ...]] = set()
        """(slot, incarnation, seq) of each batch that a learner has got, or of whose gap it was told.

        A learner that outlives its broker reports both alike. So the next broker may not drop the batch.
        """
        self.peers = 0
        self.learners = 0
        self.checkpoints: dict[str, tuple[list[SourcePosition], list[tuple[int, ...]], list[tuple[int, int]]]] = {
            group: ([], [], []) for group in (TRAIN, *histories)
        }
        """By group: the position, the batches that were trained on, and the ends of lives that were heard."""
        self.redis: dict[tuple[int, int], LedgerRow] = {}
        self.redis_of_groups: dict[str, dict[tuple[int, int], LedgerRow]] = {group: {} for group in histories}
        self.redis_folded: dict[int, FoldedLives] = {}
        self.file_folded: dict[int, FoldedLives] = {}
        """The folded lives in Redis, and those in their file, which is written first."""
        self._unsaved: dict[int, FoldedLives] = {}
        self.redis_back_at = 0.0
        self.recorders: dict[tuple[int, int], Recorder] = {}
        """The files of the run directory."""
        self.broker: BrokerCore | None = BrokerCore(FLEET, settings.limits)
        self.state_file = BrokerState()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0
        self.supervisor = SimSupervisor(self)
        self.workers = [SimWorker(self, slot, 1) for slot in range(settings.workers)]
        self.begun: dict[int, int] = {}
        """The newest incarnation of each slot that is alive or about to start; 1 where there is none here."""
        self.learner = self.new_learner()
        self.readers = {group: self.new_learner(group) for group in histories}
        self._plan()
        self.at(0.25, self._broker_ticks)

    @property
    def checkpoint(self) -> tuple[list[SourcePosition], list[tuple[int, ...]], list[tuple[int, int]]]:
        return self.checkpoints[TRAIN]

    def new_learner(self, group: str = TRAIN) -> SimLearner:
        """Return a new process that reads for the group."""
        return SimLearner(self, group)

    def at(self, time: float, event: Callable[[], None]) -> None:
        self._counter += 1
        heapq.heappush(self._events, (time, self._counter, event))

    def run(self, deadline_s: float = 120.0) -> bool:
        """Play the schedule; True when everything that was cut is settled before the deadline."""
        while self._events and self.now < deadline_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
            if self.hostile and self.now > self.settings.hostile_s:
                self.hostile = False
                self._make_peace()
            if not self.hostile and self._counter % 16 == 0 and self.settled():
                break
        for row in self._honest_rows():
            self.history.row(row)
        self._report_groups()
        if self.broker is not None:
            honest = [lives for slot, lives in self.broker.store.folded.items() if slot < self.settings.workers]
            self.history.folded(honest, {(row.slot, row.incarnation) for row in self._honest_rows()})
        self._note_refusals()
        twice = {key for key in self.checkpoint[2] if self.checkpoint[2].count(key) > 1}
        if self.hears_ends_once:
            self.history.problems += [f"{key}: the learner heard its end twice" for key in sorted(twice)]
        return self.settled()

    def settled(self) -> bool:
        """Every live worker has cut all its batches and knows them settled; the dead are buried."""
        if not self.supervisor.alive:
            return False
        live = [worker for worker in self.workers if worker.alive]
        done = all(w.cut >= self.settings.batches and not w.session.window() for w in live)
        if not done or self.supervisor.due or self.broker is None:
            return False
        return self._nothing_held() and self._all_ended() and self._groups_settled(self.broker)

    def _groups_settled(self, broker: BrokerCore) -> bool:
        """The groups have settled whatever their books say is accepted, and every life that was cut is in them."""
        for group in self.histories:
            rows = {(row.slot, row.incarnation): row for row in broker.groups.by_name[group].rows(broker.sources)}
            for key, batches in self.history.batches.items():
                row = rows.get(key)
                if batches and (row is None or row.held != (0, 0)):
                    return False
                if batches and not (row.closed or row.settled.seq == max(batches)):  # type: ignore[union-attr]
                    return False
        return True

    def _all_ended(self) -> bool:
        """The learner has heard the end of each dead life of which it has a batch.

        An end that a connection has lost is told again only in the next one, so in a lossy world that may never be.
        """
        if self.settings.faults.drop or not self.hears_ends_once:
            return True
        dead = {(worker.slot, worker.incarnation) for worker in self.workers if not worker.alive}
        return dead & {batch[:2] for batch in self.checkpoint[1]} <= set(self.checkpoint[2])

    def _nothing_held(self) -> bool:
        assert self.broker is not None
        rows = {(row.slot, row.incarnation): row for row in self.broker.rows()}
        # A broker that has just restarted holds nothing because it knows nothing: it must have heard of every batch.
        return all(
            self.broker.store.is_folded(*key)
            or (
                key in rows and rows[key].held == (0, 0) and (rows[key].closed or rows[key].settled.seq == max(batches))
            )
            for key, batches in self.history.batches.items()
            if batches
        )

    def _plan(self) -> None:
        faults, hostile = self.settings.faults, self.settings.hostile_s
        plan: list[tuple[int, Callable[[], None]]] = [
            (faults.breaks, self._break),
            (faults.worker_kills, self._kill_worker),
            (faults.worker_stops, self._stop_worker),
            (faults.broker_kills, self._kill_broker),
            (faults.learner_kills, self._kill_learner),
            (faults.reader_kills, self._kill_reader),
            (faults.rival_learners, self._start_rival),
            (faults.whole_kills, self._kill_all),
            (faults.joint_kills, self._kill_some),
            (faults.redis_stops, self._stop_redis),
        ]
        for count, fault in plan:
            for _ in range(self.random.randint(0, count)):
                self.at(self.random.uniform(0.2, hostile), fault)

    def _break(self) -> None:
        if self.links:
            self.random.choice(list(self.links.values())).reconnect(self.random.random())

    def _live_worker(self) -> SimWorker | None:
        live = [w for w in self.workers if w.alive and not w.stopped]
        return self.random.choice(live) if live else None

    def _kill_worker(self) -> None:
        if worker := self._live_worker():
            worker.exit("worker_killed")

    def _stop_worker(self) -> None:
        """SIGSTOP for longer than the lease: a replacement starts, later the zombie wakes up and speaks on."""
        if worker := self._live_worker():
            worker.stopped = True
            self.replace(worker)
            self.at(self.now + LEASE_S + self.random.random() * 3, lambda: setattr(worker, "stopped", False))

    def replace(self, worker: SimWorker) -> None:
        incarnation = self.begun[worker.slot] = 1 + self.begun.get(worker.slot, 1)
        supervisor = self.supervisor

        def start() -> None:
            if supervisor.alive:
                self.workers.append(SimWorker(self, worker.slot, incarnation))

        self.at(self.now + 0.3, start)

    def _kill_some(self) -> None:
        """Kill two of worker, broker and learner, or all three, with nothing between."""
        kills = [self._kill_worker, self._kill_broker, self._kill_learner]
        for kill in self.random.sample(kills, self.random.randint(2, 3)):
            kill()

    def _kill_all(self) -> None:
        for worker in [worker for worker in self.workers if worker.alive]:
            worker.die()
        for learner in (self.learner, *self.readers.values()):
            learner.kill()
        self.supervisor.kill()
        self.broker = None
        self.at(self.now + self.random.random() * 2, self._start_all)

    def _start_all(self) -> None:
        if self.supervisor.alive:
            return
        self._start_broker()
        self.supervisor = SimSupervisor(self)
        for slot in range(self.settings.workers):
            self.begun[slot] = 1 + self.begun.get(slot, 1)
            self.workers.append(SimWorker(self, slot, self.begun[slot]))
        self._start_learner()
        self._start_readers()

    def _stop_redis(self) -> None:
        self.redis_back_at = max(self.redis_back_at, self.now + 1.0 + 5.0 * self.random.random())

    def _kill_broker(self) -> None:
        if self.broker is None:
            return
        self._note_refusals()
        self.broker = None
        for link in list(self.links.values()):
            link.reconnect(0.2)
        supervisor = self.supervisor
        self.at(self.now + self.random.random() * 2, lambda: self._start_broker() if supervisor.alive else None)

    def _honest_rows(self) -> list[LedgerRow]:
        rows = self.broker.rows() if self.broker is not None else []
        return [row for row in rows if row.slot < self.settings.workers]

    def _note_refusals(self) -> None:
        """A broker that refuses a claim where all peers are honest is too strict.

        A broker with little room may be full by the time that a batch comes. Its worker sends the batch again. No
        honest worker sends more batches than it was told.
        """
        is_tight = self.settings.limits.max_held_bytes < 1 << 20
        counts = self.broker.refusals.counts if self.broker is not None and self.strangers is None else {}
        for (peer, kind), count in counts.items():
            if is_tight and kind == "no_room":
                continue
            self.history.problems.append(f"{count} messages of {peer} refused: {kind}")

    def _start_broker(self) -> None:
        state = self.state_file if self.settings.faults.keep_state_file else BrokerState()
        groups = {name: replace(lease) for name, lease in state.groups.items()}
        copy = replace(state, incarnations=dict(state.incarnations), groups=groups)
        self._unsaved = {}
        self.broker = BrokerCore(FLEET, self.settings.limits, copy, self.now)
        if self.settings.faults.keep_state_file and not self.settings.faults.redis_absent:
            self.broker.restore([], {}, 0, None, self.file_folded)
        self.supervisor.due = dict(self.supervisor.written)
        if not self.settings.faults.redis_absent:
            self.broker.restore(self.redis.values(), {}, 0, None, self.redis_folded)
            for group, rows in self.redis_of_groups.items():
                self.broker.groups.restore(group, rows.values(), {})

    def _kill_learner(self) -> None:
        if self.learner.alive:
            self.learner.kill()
            self.at(self.now + self.random.random(), self._start_learner)

    def _kill_reader(self) -> None:
        reader = self.random.choice(list(self.readers.values()))
        if reader.alive:
            reader.kill()
            self.at(self.now + self.random.random() * 8, self._start_readers)

    def _start_readers(self) -> None:
        for group, reader in self.readers.items():
            if not reader.alive and self.supervisor.alive:
                self.readers[group] = self.new_learner(group)

    def _start_learner(self) -> None:
        if not self.learner.alive and self.supervisor.alive:
            self.learner = self.new_learner()

    def _start_rival(self) -> None:
        if self.supervisor.alive:
            self.learner = self.new_learner()

    def _make_peace(self) -> None:
        if not self.learner.alive:
            self._start_learner()
        self._start_readers()

    def _broker_ticks(self) -> None:
        if self.broker is not None:
            self.broker.tick(self.now)
            self._flush_broker()
            for row in self._honest_rows():
                self.history.row(row)
                if self.random.random() < 0.5:
                    self._report(row)
            self._report_groups()
            self._fold(self.broker)
        self.at(self.now + 0.5, self._broker_ticks)

    def _report_groups(self) -> None:
        for group, history in self.histories.items():
            known, rows = (
                self.redis_of_groups[group],
                self.broker.groups.by_name[group].rows(self.broker.sources) if self.broker is not None else [],
            )
            for row in rows:
                if row.slot < self.settings.workers:
                    history.row(row)
                    if self.random.random() < 0.5 and self.now >= self.redis_back_at:
                        known[(row.slot, row.incarnation)] = row

    def _fold(self, broker: BrokerCore) -> None:
        """Fold as the broker's loop and its reporter do: file first, then Redis, with any crash in between."""
        if self.settings.faults.redis_absent:
            return  # what Redis has not confirmed does not fold
        broker.folding.stored(row for row in self.redis.values() if row.closed)
        for group, rows in self.redis_of_groups.items():
            broker.groups.by_name[group].folding.stored(row for row in rows.values() if row.closed)
        broker.fold(lambda _: {})
        self._unsaved |= broker.folding.take_news()
        if self.random.random() < 0.5:
            self.file_folded |= self._unsaved
            if self.now >= self.redis_back_at and self.random.random() < 0.5:
                self.redis_folded |= self._unsaved
                self._unsaved = {}
                self.redis = {key: row for key, row in self.redis.items() if not self.is_folded(key)}

    def is_folded(self, key: tuple[int, int]) -> bool:
        """Return whether Redis has the life in a sum."""
        return key[0] in self.redis_folded and key[1] in self.redis_folded[key[0]]

    def _report(self, row: LedgerRow) -> None:
        if self.now < self.redis_back_at:
            return
        key = (row.slot, row.incarnation)
        if self.is_folded(key):
            return
        old = self.redis.get(key)
        if old is None or row.closed or (row.totals.seq >= old.totals.seq and row.settled.seq >= old.settled.seq):
            self.redis[key] = row

    def broker_gets(self, peer: bytes, content: Message | BatchHeader | tuple[int, int]) -> None:
        if self.broker is None:
            return
        if self.strangers is not None and self.hostile and not isinstance(content, tuple):
            for stranger, message in self.strangers.beside(content):
                self._hand_over(stranger, message)
        self._hand_over(peer, content)
        self._flush_broker()

    def _hand_over(self, peer: bytes, content: Message | BatchHeader | tuple[int, int]) -> None:
        assert self.broker is not None
        if isinstance(content, tuple):
            lease = self.broker.learners.lease
            if lease is not None and lease.stream == peer and content > self.broker.weights:
                self.broker.published(content, self.now)
        elif isinstance(content, BatchHeader):
            self.broker.receive_batch(peer, content, [content], 100, self.now)  # type: ignore[list-item]
        else:
            self.broker.receive(peer, content, self.now)

    def _flush_broker(self) -> None:
        assert self.broker is not None
        groups = {name: replace(lease) for name, lease in self.broker.state.groups.items()}
        self.state_file = replace(self.broker.state, incarnations=dict(self.broker.state.incarnations), groups=groups)
        for send in self.broker.take_outbox(self.now):
            if isinstance(send.content, list):
                self._note_given(send.content[0])  # type: ignore[arg-type]
            elif isinstance(send.content, SourceGap):
                self._note_in_hand(send.content.slot, send.content.incarnation, send.content.batch.seq)
            link = self.links.get(send.peer)
            if link is not None:
                link.to_owner(send.content[0] if isinstance(send.content, list) else send.content)

    def _note_given(self, header: BatchHeader) -> None:
        """Complain of a batch that is too old when a learner gets it for the first time."""
        assert self.broker is not None
        epoch, newest = self.broker.weights
        most, key = self.settings.limits.max_staleness, (header.slot, header.incarnation, header.seq)
        if most is not None and key not in self.given and header.learner_epoch == epoch:
            lag = newest - header.weights_seq
            if lag > most and self.broker.store.is_reconciled:
                self.history.problems.append(f"batch {key} goes out {lag} versions behind, with max_staleness {most}")
        self._note_in_hand(*key)

    def _note_in_hand(self, slot: int, incarnation: int, seq: int) -> None:
        self.given.add((slot, incarnation, seq))


__all__ = ["Drop", "Faults", "Recorder", "Settings", "World", "plus"]
