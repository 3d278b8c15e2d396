"""Ranks of one consumer group in the simulated world: rank 0 reads from the broker, and hands batches to the others.

The state machines are the product's own. Simulated are the connections between the ranks, their processes, and the
users of their streams, who all ask for rounds of the same sizes.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.learner_stub.streaming.rank_sessions import RankSessions
from headrace.learner_stub.streaming.ready_batches import ReadyBatches, Turns
from headrace.learner_stub.streaming.session import LearnerSession, StreamLimits
from headrace.learner_stub.streaming.session import LearnerSessionState as LearnerState
from headrace.learner_stub.streaming.source_progress import CheckpointPosition
from headrace.schemas.basics.bounds import TRAIN
from headrace.schemas.chunks.batch import BatchHeader, ChunkBatch, encode_batch, read_batch_header
from headrace.schemas.chunks.chunk import CHUNK_TABLE, ChunkEnd
from headrace.schemas.chunks.spaces import Box, Discrete
from headrace.schemas.frames.wire import decode_header
from headrace.schemas.messages import LearnerWelcome, Message, Ranks
from support.simulation.world import Link, Settings, SimLearner, World

SPACE = Box(shape=(1,), dtype="<f4"), Discrete(n=2)
QUIET_S = 15.0
"""Seconds without a round, in peace, after which none can be filled. A stream of one process takes the rest."""

BatchId = tuple[int, ...]
"""(slot, incarnation, seq, steps, chunks), as the worker cut it."""


@dataclass(frozen=True)
class RankPlay:
    """How many ranks there are, and what becomes of their processes."""

    world_size: int = 3
    group: str = TRAIN
    is_fixed: bool = False
    commit_lag: int | None = 0
    """None: rank 0's user commits for all ranks, by hand."""
    most: int = 2
    """The largest number of batches in a round."""
    kills: int = 3
    """Kills of other ranks."""
    rivals: int = 0
    """Second processes of a rank that lives."""
    cuts: int = 4
    """Lost connections between rank 0 and the others."""
    from_position: bool = False
    """Rank 0's next process begins from the position of the last one; False: from what the broker knows."""


Unread = tuple[dict[str, Any], list[Any]]
"""The header and the frames of a batch that was received and not read."""


def real_batch(header: BatchHeader) -> Unread:
    """Return a batch of whole episodes as a worker would send it. Its rewards are its number."""
    table = np.zeros(header.chunks, CHUNK_TABLE)
    table["length"], table["end"] = 1, ChunkEnd.TERMINATED
    table["length"][0] = header.steps - header.chunks + 1
    table["id_low"] = np.arange(header.chunks) + (header.seq << 8) + (header.slot << 32)
    table["episode_length"] = table["length"]
    columns = {
        "obs": np.zeros((header.steps + header.chunks, 1), np.float32),
        "actions": np.zeros(header.steps, np.int64),
        "rewards": np.full(header.steps, float(header.seq)),
        "weights_seq": np.zeros(header.steps, np.int64),
    }
    return unread(encode_batch(ChunkBatch(table, columns, *SPACE), header))


def unread(frames: list[Any]) -> Unread:
    """Return a batch as a stream takes it from its connection."""
    _, header = decode_header(frames)
    return header, frames


def id_of(batch: ChunkBatch) -> BatchId:
    """Return which batch of a worker this is, whatever number it got on the way."""
    return batch.slot, batch.incarnation, int(batch.columns["rewards"][0]), batch.steps, len(batch)


class Truth:
    """The fate of each batch, as an outsider sees it. `problems` are the promises that were broken."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.committed: dict[BatchId, list[Process]] = defaultdict(list)
        """The processes that have committed each batch."""
        self.settled: dict[BatchId, None] = {}
        """Batches of which rank 0 has told the broker that they are trained on, in order."""
        self.rounds = 0

    def commit(self, batch: BatchId, process: Process) -> None:
        """A process says that it has trained on a batch. No other one may have, unless that was lost."""
        for other in self.committed[batch]:
            if other.zero is not process.zero or process.lost:
                continue  # rank 0 was lost, or this process is about to be fenced
            if batch in process.zero.known:
                self.problems.append(f"{batch} committed by {process.name}, and rank 0 knew that {other.name} had")
            elif other.alive and not other.lost:
                self.problems.append(f"{batch} committed by {other.name} and by {process.name}")
        self.committed[batch].append(process)

    def settle(self, batch: BatchId, *, by_hand: bool) -> None:
        """Rank 0 tells the broker that this batch is trained on."""
        if not by_hand and not self.committed[batch]:
            self.problems.append(f"{batch} settled before any rank committed it")
        self.settled[batch] = None


class Process:
    """A process of a rank, and the user of its stream."""

    zero: SimRankZero
    """The process of rank 0 that it belongs to."""

    def __init__(self, world: RankWorld, number: int, limits: StreamLimits, position: list[Any]) -> None:
        self.world, self.number, self.play = world, number, world.play
        world.learners += 1
        self.alive = True
        self.lost = False
        """True once rank 0 has given up this process."""
        self.name = f"process {world.learners} of rank {number}"
        lag = self.play.commit_lag
        self.turns = Turns(lag) if lag is not None else None
        self.session = LearnerSession(f"l{world.learners}", limits, position=position, group=self.play.group)
        places = [CheckpointPosition.model_validate(place.model_dump()) for place in position]
        self.ready = ReadyBatches(self.session, places, self.turns)
        self.kept: deque[list[BatchId]] = deque()
        """Rounds that the user got and has not committed."""
        self.busy_until = 0.0
        self._seen: dict[tuple[int, int], int] = {}
        world.processes.append(self)

    def run(self) -> None:
        """Call `work` again and again while the process lives."""
        if self.alive:
            self.work()
            self.world.at(self.world.now + 0.3 * (0.5 + self.world.random.random()), self.run)

    def work(self) -> None:
        """Do what is due."""
        raise NotImplementedError

    def kill(self) -> None:
        """End without a word."""
        self.alive = False
        self.link.cut()

    link: Link

    def train(self, batches: list[ChunkBatch]) -> None:
        """The user trains on a round for some time."""
        self.kept.append([id_of(batch) for batch in batches])
        self.busy_until = self.world.now + self.world.random.choice((0.0, 0.2, 1.0, 3.0))
        for slot, life, seq, *rest in self.kept[-1]:
            if (slot, life, seq, *rest) in self.zero.given_again:
                continue
            if seq <= self._seen.get((slot, life), 0):
                self.world.truth.problems.append(f"{self.name} got {slot, life, seq} after {self._seen[slot, life]}")
            self._seen[slot, life] = seq

    def commit_old(self) -> None:
        """Commit the rounds that are old enough, as asking for the next one does."""
        assert self.turns is not None
        while len(self.kept) > self.turns.lag:
            for batch in self.kept.popleft():
                self.world.truth.commit(batch, self)

    def open(self, count: int) -> bool:
        """Read what has arrived. Return whether so many batches are ready."""
        while len(self.ready) < count and (arrival := self.session.take()) is not None:
            self.ready.open(arrival)
        return len(self.ready) >= count


class SimRankZero(Process):
    """Rank 0: a stream at the broker, and sessions with the other ranks."""

    def __init__(self, world: RankWorld, group: str) -> None:
        play = world.play
        position, trained, ends = world.checkpoints[group]
        limits = StreamLimits(window_batches=world.settings.learner_window, window_bytes=1 << 20)
        super().__init__(world, 0, limits, list(position) if play.from_position else [])
        self.zero, self.group = self, group
        self.trained, self.ends = list(trained), list(ends)
        self.own = Ranks(rank=0, world_size=play.world_size, host="h", port=1, secret=self.session.token)
        self.session.ranks = lambda: self.own
        self.sessions = RankSessions(self.own, is_fixed=play.is_fixed, commit_lag=play.commit_lag)
        self.inbox: list[tuple[bytes, Message]] = []
        self.given_again: set[BatchId] = set()
        """Batches that a rank got after it was lost for another one."""
        self.known: set[BatchId] = set()
        """Batches that another rank has committed, as this process knows."""
        self.step, self.round_at = 0, world.now
        self._settling: list[BatchId] = []
        self._told_settle = self.session.settle
        self.session.settle = self._settle  # type: ignore[method-assign]
        self.link = Link(world, self)
        self.run()

    def gets(self, content: Any) -> None:
        """Take a message of the broker."""
        if not self.alive:
            return
        if isinstance(content, BatchHeader):
            self.session.receive_batch(content, real_batch(content), self.world.now)
        else:
            self.session.receive(content, self.world.now)

    def work(self) -> None:
        """Ask for a round if the user trains no more."""
        if self.world.now >= self.busy_until:
            self._pump()
            self._ask()
            self._pump()
        self.session.tick(self.world.now)
        for out in self.session.take_outbox():
            self.link.to_broker(out)
        if self.alive and self.session.state is LearnerState.STOPPED:
            self.kill()

    def _pump(self) -> None:
        sessions, now = self.sessions, self.world.now
        sessions.facts = LearnerWelcome.model_construct(
            fleet_id=self.session.fleet_id, epoch=max(1, self.session.epoch), spaces=self.session.spaces
        )
        inbox, self.inbox = self.inbox, []
        for peer, message in inbox:
            before, rank = self._uncommitted(), self._process_of(message)
            sessions.receive(peer, message, now)
            self.known |= before - self._uncommitted()
            if rank is not None and rank.session.epoch == 0 and peer in sessions._by_peer:
                rank.step = self.step
                for older in self.world.processes:
                    older.lost |= older.number == rank.number and older is not rank and older.zero is self
                self.world.ranks[rank.number] = rank
        tokens = {rank.token for rank in sessions._ranks.values() if not rank.is_missing}
        sessions.tick(now)
        tokens -= {rank.token for rank in sessions._ranks.values() if not rank.is_missing}
        for process in self.world.processes:
            process.lost |= process.session.token in tokens
        self._flush()

    def _process_of(self, message: Message) -> SimRank | None:
        """Return the process that says HELLO."""
        token = getattr(message, "token", None)
        return next((it for it in self.world.processes if it.session.token == token and isinstance(it, SimRank)), None)

    def _flush(self) -> None:
        for peer, content in self.sessions.take_outbox():
            link = self.world.links.get(peer)
            if link is None:
                self.sessions.gone(peer, self.world.now)
            else:
                link.to_owner(content)

    def _uncommitted(self) -> set[BatchId]:
        return {id_of(given.batch) for rank in self.sessions._ranks.values() for given in rank.uncommitted}

    # -- as the stream does it ----------------------------------------------------------------------------------------

    def _ask(self) -> None:
        if self.turns is not None:
            self.commit_old()
            self.turns.settle(self.sessions.settled_round(self.turns.round - self.turns.lag))
            self._commit()
        elif self.world.random.random() < 0.7 and not self._commit_by_hand():
            return  # killed
        sessions, count = self.sessions, self.world.size_of(self.step)
        if sessions.waits_for() or not self.open(sessions.new_batches(count)):
            return
        self.given_again |= {id_of(given.batch) for given in sessions.pool}
        peers = list(sessions._by_peer)
        new = [self.ready.hand_out() for _ in range(sessions.new_batches(count))]
        own = sessions.share(new, count)
        got = {peer: sum(isinstance(it, list) for to, it in sessions._outbox if to == peer) for peer in peers}
        if len(own) != count or set(got.values()) - {count}:
            self.world.truth.problems.append(f"a round of {count}: rank 0 got {len(own)}, the others {got}")
        if self.turns is not None:
            self.turns.begin()
        self.train(own)
        self.step, self.round_at = self.step + 1, self.world.now
        self.world.truth.rounds += 1
        self._flush()

    def _settle(self, arrival: Any, committed: Any, dropped: Any) -> None:
        if arrival.batch is not None and committed != (0, 0):
            self._settling.append((*arrival.key, arrival.batch.seq, arrival.batch.steps, arrival.batch.chunks))
        elif arrival.content is not None and arrival.batch is None and arrival.content.seq:
            self.ends.append(arrival.key)
        self._told_settle(arrival, committed, dropped)

    def _commit(self) -> bool:
        """Commit as the stream does. Return False if this process died right before."""
        if not self.session.uncommitted():
            return True
        for batch in self._settling:
            self.world.truth.settle(batch, by_hand=self.turns is None)
        self._settling.clear()
        if self.session.state is not LearnerState.STOPPED:
            trained = list(self.world.truth.settled) if self.turns is not None else list(self.trained)
            self.world.checkpoints[self.group] = (self.session.position(), trained, list(self.ends))
        if self.turns is None and self.world.random.random() < 0.05 and self.world.hostile:
            self.kill()
            self.world.at(self.world.now + 0.5, self.world.start_zero)
            return False
        self.session.commit(self.world.now, at_once=self.world.random.random() < 0.5)
        return True

    def _commit_by_hand(self) -> bool:
        """Commit if all ranks have trained on all that they got. Return False if this process died."""
        ranks = [(rank, self.world.ranks[rank.number]) for rank in self.sessions._ranks.values() if rank.token]
        lost = [rank for rank in self.sessions._ranks.values() if rank.is_missing]
        for rank, process in ranks:
            kept = {batch for ids in process.kept for batch in ids}
            got = {id_of(given.batch) for given in rank.uncommitted}
            if rank.token != process.session.token or not process.alive or not got <= kept:
                return True
        if lost or self.sessions.pool:
            return True
        for process in (self, *(process for _, process in ranks)):
            self.trained += [batch for ids in process.kept for batch in ids]
            process.kept.clear()
        self.sessions.settle_all()
        return self._commit()


class SimRank(Process):
    """A process of another rank."""

    def __init__(self, world: RankWorld, number: int, zero: SimRankZero) -> None:
        super().__init__(world, number, StreamLimits(silence_s=math.inf), [])
        self.zero = zero
        own = zero.own.model_copy(update={"rank": number, "host": "", "port": 0})
        self.session.ranks = lambda: own
        self.step: int | None = None
        """The number of its next round, by which all know the size; None before it belongs to them."""
        self.link = RankLink(world, self)
        self.run()

    def work(self) -> None:
        """Ask for a round if the user trains no more."""
        if self.world.now >= self.busy_until:
            self._ask()
            self.session.tick(self.world.now, waiting=True)
        for out in self.session.take_outbox():
            if self.world.now < self.link.up_at:
                self.session.not_sent(self.world.now)
            else:
                self.link.to_broker(out)
        if self.session.state is LearnerState.STOPPED:
            self._stop()

    def _ask(self) -> None:
        if self.turns is not None:
            self.commit_old()
            self.turns.settle(self.turns.round - self.turns.lag)
        if self.session.uncommitted():
            self.session.commit(self.world.now)
        if self.step is not None and self.open(count := self.world.size_of(self.step)):
            batches = [self.ready.hand_out() for _ in range(count)]
            if self.turns is not None:
                self.turns.begin()
            self.train(batches)
            self.step += 1

    def _stop(self) -> None:
        """Stop, and start again. It may be fenced by a newer process, or another rank 0, or after a long absence."""
        world = self.world
        is_newest = world.ranks[self.number] is self
        refusal = self.session.refusal or ("", "")
        if refusal[0] != "fenced" or (is_newest and world.rank_zero is self.zero and not self.lost):
            world.truth.problems.append(f"{self.name} was refused: {refusal}")
        self.kill()
        if is_newest:
            world.at(world.now + world.random.random() * 3, lambda: world.start_rank(self.number))

    def gets(self, content: Any) -> None:
        """Take a message of rank 0."""
        if not self.alive:
            return
        if isinstance(content, list):
            batch = unread(content)
            self.session.receive_batch(read_batch_header(batch[0]), batch, self.world.now)
        else:
            self.session.receive(content, self.world.now)


class RankLink(Link):
    """A rank's connection to its rank 0, or to the next one once that has died."""

    def to_broker(self, content: Any) -> None:
        """Send to rank 0."""
        self._carry(True, lambda peer: self._deliver(peer, content))

    def _deliver(self, peer: bytes, content: Any) -> None:
        zero = self.owner.zero if self.owner.zero.alive else self.world.rank_zero  # type: ignore[attr-defined]
        if zero is not None and zero.alive:
            zero.inbox.append((peer, content))


class RankWorld(World):
    """A world in which one consumer group has ranks. In the end a stream of one process takes the rest."""

    hears_ends_once = False

    def __init__(self, settings: Settings, play: RankPlay, history: Any, histories: Any = None) -> None:
        self.play, self.truth = play, Truth()
        self.ranks: dict[int, SimRank] = {}
        """The newest process of each rank."""
        self.processes: list[Process] = []
        self.is_over = False
        super().__init__(settings, history, histories or {})
        for number in range(1, play.world_size):
            self.start_rank(number)
        self.at(1.0, self._watch)

    def size_of(self, step: int) -> int:
        """Return the size of a round, the same for all ranks."""
        return random.Random(f"{self.settings.seed} {step}").randint(1, self.play.most)

    @property
    def rank_zero(self) -> SimRankZero | None:
        """Return the newest process of rank 0; None at the end."""
        learner = self.learner if self.play.group == TRAIN else self.readers[self.play.group]
        return learner if isinstance(learner, SimRankZero) else None

    def new_learner(self, group: str = TRAIN) -> Any:
        """Return a new process that reads for the group."""
        return SimRankZero(self, group) if group == self.play.group and not self.is_over else SimLearner(self, group)

    def start_zero(self) -> None:
        """Start rank 0 again if it has died."""
        self._start_learner()
        self._start_readers()

    def start_rank(self, number: int, *, rival: bool = False) -> None:
        """Start a process of a rank, if rank 0 lives and no other one does."""
        if self.is_over or (not rival and number in self.ranks and self.ranks[number].alive):
            return
        zero = self.rank_zero
        if zero is not None and zero.alive:
            self.ranks[number] = SimRank(self, number, zero)
        else:
            self.at(self.now + 0.5, lambda: self.start_rank(number))

    def _plan(self) -> None:
        super()._plan()
        plan = ((self.play.kills, self._kill_rank), (self.play.rivals, self._start_rank_rival))
        for count, fault in (*plan, (self.play.cuts, self._cut_rank)):
            for _ in range(self.random.randint(0, count)):
                self.at(self.random.uniform(0.2, self.settings.hostile_s), fault)

    def _kill_rank(self) -> None:
        number = self.random.randint(1, self.play.world_size - 1)
        if number in self.ranks and self.ranks[number].alive:
            self.ranks[number].kill()
            self.at(self.now + self.random.random() * 8, lambda: self.start_rank(number))

    def _start_rank_rival(self) -> None:
        self.start_rank(self.random.randint(1, self.play.world_size - 1), rival=True)

    def _cut_rank(self) -> None:
        process = self.random.choice(list(self.ranks.values()))
        if process.alive:
            process.link.reconnect(self.random.choice((0.0, 0.1, 1.0, 4.0, 8.0)))

    def _make_peace(self) -> None:
        super()._make_peace()
        for number in self.ranks:
            self.start_rank(number)

    def _watch(self) -> None:
        """Once no round can begin, let a stream of one process take the rest. Complain where one could."""
        self.at(self.now + 1.0, self._watch)
        zero = self.rank_zero
        if zero is None or self.hostile or self.now - max(zero.round_at, self.settings.hostile_s) < QUIET_S:
            return
        waits, needs = zero.sessions.waits_for(), zero.sessions.new_batches(self.size_of(zero.step))
        has = len(zero.ready) + len(zero.session.arrivals)
        more = [worker.slot for worker in self.workers if worker.alive and worker.cut < self.settings.batches]
        late = [rank.name for rank in self.ranks.values() if not rank.alive or (rank.step or 0) < zero.step]
        if not zero.alive or waits or has >= needs or more or late:
            found = f"rank 0 waits for {waits}, has {has} of {needs}; {late} have not got all; workers {more} wait"
            self.truth.problems.append(f"no round: {found}")
        self.is_over = True
        for process in (zero, *self.ranks.values()):
            process.kill()
        self.start_zero()
