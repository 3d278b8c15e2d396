"""Turns a runner's cut into numbered batches in the session, with true counts at every moment.

A cut gives one batch for each module, or several where one would be larger than a message. They get their numbers one
after another. Each carries the totals of its own moment: steps of the same cut that still wait for a number count as
open. So the counts balance after every batch, even if the worker is killed between two of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container
from dataclasses import fields
from operator import attrgetter

import numpy as np

from headrace.schemas.accounts.ledger import COUNTERS, Count, Discard, Drop, HeldBatch, WorkerTotals, plus, total_of
from headrace.schemas.accounts.recorder import Recorder
from headrace.schemas.chunks.batch import MOST_ENDED, BatchHeader, ChunkBatch, encode_batch
from headrace.schemas.chunks.chunk import DEFAULT_AGENT, ChunkEnd
from headrace.schemas.errors import InfosTooLargeError
from headrace.schemas.frames.wire import Buffer
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.window import Shipment
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.sampling.module_batches import Cut, batches_of

log = logging.getLogger(__name__)

_COUNTED = [one.name for one in fields(RunnerTotals) if one.name in COUNTERS]
"""Counters that the runner counts. The shipper counts the others."""
_counts_of = attrgetter(*_COUNTED)


class Shipper:
    """The counts of one incarnation. Each total is written to the recorder before a message carries it.

    - runner: the runner's own totals.
    - take_episodes: returns (return, env steps) of the episodes that ended since its last call.
    - is_compressed: returns whether to compress the next batch.
    - frozen: modules whose batches are counted and not sent.
    """

    def __init__(
        self,
        fleet_id: str,
        session: WorkerSession,
        recorder: Recorder,
        runner: RunnerTotals,
        take_episodes: Callable[[], list[tuple[float, int]]],
        is_compressed: Callable[[], bool] = lambda: False,
        frozen: Container[str] = (),
    ) -> None:
        self._fleet_id = fleet_id
        self._session = session
        self._recorder = recorder
        self._runner = runner
        self._take_episodes = take_episodes
        self._is_compressed = is_compressed
        self._frozen = frozen
        self._frozen_steps = 0
        self.bytes_shipped = (0, 0)
        """(bytes of arrays, bytes of messages) of all batches."""
        self._shipped: Count = (0, 0)
        self._by_module: dict[str, int] = {}
        self._dropped: dict[str, Count] = {}
        self._oversize = 0
        self._episodes: deque[tuple[float, int]] = deque(maxlen=MOST_ENDED)
        """The newest episodes that have ended and are in no batch yet."""
        self._aborted: deque[tuple[float, int]] = deque(maxlen=MOST_ENDED)
        """The same for those that were given up before their end."""
        self._frozen_agents: deque[tuple[str, float, int]] = deque(maxlen=MOST_ENDED)
        """(module, return, agent steps) of agents of frozen modules that have ended and are in no batch yet."""

    def ship(self, cut: Cut) -> None:
        """Hand all batches of a cut to the session. The first that is sent carries the episodes that ended in it.

        A header tells (return, length) of the newest `MOST_ENDED` episodes only; the totals in it count all of them.
        A batch without chunks is not sent; a cut without chunks only records the totals. Raises `EncodeError` for a
        batch that must not go on the wire. A batch that is larger than a message goes in parts; a chunk that is, goes
        without the largest values of its infos. One that is too large without infos is dropped, and counted as
        OVERSIZE.
        """
        waiting = deque(self._trained(cut))
        if not waiting:
            self.record()
        while waiting:
            batch = waiting.popleft()
            waiting.extendleft(reversed(self._ship(batch, unsent=sum(other.steps for other in waiting))))

    def drop(self, cut: Cut, reason: Drop) -> None:
        """Count a cut that gets no number, as dropped for `reason`."""
        lost = total_of((batch.steps, len(batch)) for batch in self._trained(cut))
        self._dropped[reason] = plus(self._dropped.get(reason, (0, 0)), lost)
        self.record()

    def _trained(self, cut: Cut) -> list[ChunkBatch]:
        """Return the batches of a cut that go to the learner. Count the others."""
        trained = []
        for batch in batches_of(cut):
            module_id = batch.modules[0]
            if module_id not in self._frozen:
                trained.append(batch)
                continue
            self._frozen_steps += batch.steps
            self._frozen_agents += [(module_id, *ended) for ended in _ended_agents(batch)]
        return trained

    def steps_for(self, steps: int) -> int:
        """Return how many agent steps to take to ship `steps`, by the frozen modules' share so far."""
        return steps + self._frozen_steps * steps // max(1, self._shipped[0])

    def step(self) -> None:
        """Record the runner's step counts. This is cheap enough for every poll."""
        totals = self._runner
        self._recorder.step(totals.stepped, totals.open, totals.env_steps, totals.discarded)

    def record(self) -> None:
        """Write all current totals to the recorder and to heartbeats. Call it only between two cuts."""
        totals = self._totals(self._session.next_seq - 1, self._shipped, self._by_module, 0)
        self._session.totals = totals
        self._recorder.totals(totals)

    def _ship(self, batch: ChunkBatch, unsent: int) -> list[ChunkBatch]:
        """Ship a batch, or return its parts if it is too large."""
        seq, (module_id,) = self._session.next_seq, batch.modules
        held = HeldBatch(seq=seq, steps=batch.steps, chunks=len(batch))
        shipped = plus(self._shipped, held.count)
        by_module = {**self._by_module, module_id: self._by_module.get(module_id, 0) + batch.steps}
        totals = self._totals(seq, shipped, by_module, unsent)
        frames, sent, excess, why = self._encode(batch, seq, totals)
        if excess > 0:
            parts, left_out = batch.smaller(excess)
            self._runner.note_left_out(left_out)
            if parts:
                return parts
            shipment = self._oversized(why, held, totals)
        else:
            self.bytes_shipped = plus(self.bytes_shipped, (batch.nbytes, sent))
            shipment = Shipment(held, sent, frames, totals)
        self._shipped, self._by_module = shipped, by_module
        if shipment.frames is not None:  # else the header is lost; that of the next batch tells them
            for told in (self._episodes, self._aborted, self._frozen_agents, self._runner.ended_by_task):
                told.clear()
        self._recorder.totals(totals, held)
        self._session.submit(shipment)
        return []

    def _encode(self, batch: ChunkBatch, seq: int, totals: WorkerTotals) -> tuple[list[Buffer], int, int, str]:
        """Return the frames and their bytes, by how many bytes the batch is too large, and a sentence about that."""
        try:
            frames = encode_batch(batch, self._header(batch, seq, totals), compressed=self._is_compressed())
        except InfosTooLargeError as error:
            return [], 0, error.nbytes - error.limit, f"env {int(batch.table['env_index'][0])}: {error}"
        sent = sum(map(len, frames))
        nbytes = max(sent, batch.nbytes)  # a compressed batch must also fit a peer without compression
        welcome = self._session.welcome
        limit = welcome.max_batch_bytes if welcome else nbytes
        advice = "lower sampling.rollout_fragment_length, or raise the limit"
        what = f"a chunk of {nbytes} bytes exceeds broker.max_batch_bytes = {limit}; {advice}"
        return frames, sent, nbytes - limit, what

    def _oversized(self, what: str, held: HeldBatch, totals: WorkerTotals) -> Shipment:
        """Return only the counts of a batch; the learner sees the gap."""
        self._oversize += 1
        if self._oversize & (self._oversize - 1) == 0:  # the first, second, fourth, ...: it may concern every batch
            log.error("%s: %d steps dropped (%d batches so far)", what, held.steps, self._oversize)
        return Shipment(held, 0, None, totals, Drop.OVERSIZE)

    def _header(self, batch: ChunkBatch, seq: int, totals: WorkerTotals) -> BatchHeader:
        self._episodes += self._take_episodes()
        self._aborted += self._runner.aborted
        self._runner.aborted.clear()
        agents = _ended_agents(batch)
        return BatchHeader(
            fleet_id=self._fleet_id,
            slot=self._session.slot or 0,
            incarnation=self._session.incarnation,
            seq=seq,
            steps=batch.steps,
            chunks=len(batch),
            learner_epoch=batch.learner_epoch,
            weights_seq=int(batch.arrays["weights_seq"].max(initial=0)),
            weights_digest=batch.weights_digest,
            agents=list(batch.agents),
            modules=list(batch.modules),
            reasons=list(batch.reasons),
            episodes=list(self._episodes),
            agent_returns=[earned for earned, _ in agents],
            agent_lengths=[length for _, length in agents],
            aborted=list(self._aborted),
            frozen_agents=list(self._frozen_agents),
            ended_by_task=[(task, *ended) for task, ended in self._runner.ended_by_task.items()],
            totals=totals,
        )

    def _totals(self, seq: int, shipped: Count, by_module: dict[str, int], unsent: int) -> WorkerTotals:
        counted = dict(zip(_COUNTED, _counts_of(self._runner), strict=True))
        counted["open"] += unsent
        discarded = dict(self._runner.discarded)
        if self._frozen_steps:
            discarded[Discard.FROZEN] = self._frozen_steps
        return WorkerTotals(
            **counted,
            seq=seq,
            shipped=shipped[0],
            shipped_chunks=shipped[1],
            discarded=discarded,
            dropped=dict(self._dropped),
            module_steps=by_module,
        )


def _ended_agents(batch: ChunkBatch) -> list[tuple[float, int]]:
    """Return (return, agent steps) of the newest agents whose episodes end in `batch`; none for an env of one agent."""
    if list(batch.agents) == [DEFAULT_AGENT]:
        return []
    ended = batch.table[np.isin(batch.table["end"], (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED))]
    ended = ended[np.isfinite(ended["episode_return"])][-MOST_ENDED:]
    return list(zip(ended["episode_return"].tolist(), ended["episode_length"].tolist(), strict=True))
