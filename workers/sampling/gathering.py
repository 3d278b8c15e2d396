"""What a vector of envs lived through and no cut has delivered yet: its open fragment, and end markers to be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.ledger import Discard
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.connectors.vector_connectors import VectorConnectors
from headrace.workers.envs.driver import EnvDriver
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.modules.recurrent import Memory
from headrace.workers.sampling.cutting import Marker, Stamp, cut
from headrace.workers.sampling.episode_events import EpisodeEvents
from headrace.workers.sampling.episode_view import EpisodeView, OpenRows
from headrace.workers.sampling.fragment import Fragment, OpenChunk
from headrace.workers.sampling.mode import Mode

_NO_STATE: dict[str, NDArray[Any]] = {}
"""One for all chunks: a dict for each, where episodes are many, makes the collector of garbage work more."""


class Gathering:
    """The part of a sampler that keeps what is gathered: opens fragments, goes on in them, cuts and drops them."""

    def __init__(
        self, config: EnvRunnerConfig, envs: EnvDriver, totals: RunnerTotals, id_high: int, callbacks: CallbackList
    ) -> None:
        self.envs = envs
        self.needs_reset = True
        self.connectors = connect(config, envs)
        self.mode = Mode(config.explore, random_actions=False)
        """That of the open fragment."""
        self._totals = totals
        self._id_high = id_high
        self._keeps_infos = config.infos == "all"
        self._width = config.num_envs
        self._horizon = config.episode_lookback_horizon
        self._memory: Memory | None = None
        self._fragment: Fragment | None = None
        self._markers: list[Marker] = []
        self._events = EpisodeEvents(callbacks, self.look)

    @property
    def fragment(self) -> Fragment:
        """The fragment that is being filled."""
        assert self._fragment is not None, "begin() opens a fragment"
        return self._fragment

    @property
    def episodes_ended(self) -> int:
        """Episodes that finished in the fragment."""
        return len(self.fragment.ended)

    def _new_fragment(self, capacity: int) -> Fragment:
        return Fragment(self._width, capacity, self.connectors.columns)

    def _resume_chunks(self) -> None:
        """Episodes go on in a new fragment; the info of the observation at the seam belongs to both chunks."""
        for lane in self.envs.lanes:
            episode = lane.episode
            if episode is not None and self.fragment.open[lane.index] is None:
                self.fragment.begin(lane.index, episode, self._state_in(lane.index))
                info = episode.seam_info if episode.chunks else episode.reset_info
                if info and self._keeps_infos:
                    self.fragment.add_info(lane.index, info)

    def _state_in(self, lane: int) -> dict[str, NDArray[Any]]:
        """What a recurrent module, if there is one and it acts, remembers of the lane."""
        return _NO_STATE if self._memory is None or self.mode.random_actions else self._memory.of(lane)

    def use_memory(self, memory: Memory | None) -> None:
        """From now on `memory` is kept true at episode starts. Steps that were not cut yet, of another's, are lost."""
        if (memory is not None or self._memory is not None) and self._fragment is not None:
            self._drop_fragment()
        self._memory = memory

    def look(self, lane: Lane, episode: Episode, *, undone: bool = False) -> EpisodeView:
        """How `episode` of the lane stands now, without its last row if that was `undone`."""
        chunk = self._fragment.open[lane.index] if self._fragment is not None else None
        if chunk is None or chunk.episode is not episode:
            return EpisodeView(episode, self._id_high, self.connectors.spaces)
        stop = self.fragment.cursor(lane.index) - undone
        columns = self.fragment.columns
        rows = OpenRows(columns, self.connectors.columns, chunk.infos, lane.index, chunk.start, stop)
        return EpisodeView(episode, self._id_high, self.connectors.spaces, rows)

    # -- the end of a fragment ----------------------------------------------------------------------------------------

    def cut(
        self, learner_epoch: int, weights_digest: str, slot: int, incarnation: int, *, keep_open: bool = False
    ) -> tuple[Sequence[OpenChunk], ChunkBatch]:
        """What is to be delivered, as chunks and as the batch that begins with them; `keep_open`: whole episodes."""
        fragment, markers = self.fragment, self._markers
        chunks, self._fragment = self._take_chunks(keep_open)
        self._markers = []
        stamp = Stamp(self._id_high, self.mode.flags, slot, incarnation, learner_epoch, weights_digest, self._horizon)
        batch = cut(fragment, chunks, markers, self.connectors.spaces, stamp)
        self._totals.open -= batch.steps
        self._totals.delivered += batch.steps
        self._totals.env_steps_delivered = self._totals.delivered
        self._totals.delivered_chunks += len(batch)
        for chunk in chunks:
            self.envs.lanes[chunk.lane].budget.delivered()
            chunk.episode.seam_info = chunk.infos.get(chunk.stop - chunk.start)
        return chunks, batch

    def _take_chunks(self, keep_open: bool) -> tuple[list[OpenChunk], Fragment | None]:
        return self.fragment.take_chunks(keep_open=keep_open)

    def abandon(self, reason: Discard) -> None:
        """Every open episode is over: undelivered steps are lost by name, delivered parts get an end marker."""
        for lane in self.envs.lanes:
            episode = lane.episode
            if episode is None:
                continue
            if self._events.watches_failures:
                self._events.aborted(self.look(lane, episode), reason)
            lost = self._fragment.abort(lane.index) if self._fragment is not None else None
            if lost is not None:
                self._totals.open -= lost[1]
                self._totals.discard(reason, lost[1])
            if episode.chunks:
                self._markers.append(Marker(episode, reason))
        self.envs.end_episodes(range(len(self.envs.lanes)))
        self.needs_reset = True

    def finish(self, reason: Discard) -> None:
        """`abandon`, with a fragment for `cut` to deliver what had finished and to tell of the rest."""
        self.abandon(reason)
        if self._fragment is None:
            self._fragment = self._new_fragment(1)

    def _drop_fragment(self) -> None:
        self.abandon(Discard.RESET)
        ended = self._fragment.ended if self._fragment is not None else []
        self._markers += [Marker(chunk.episode, Discard.RESET) for chunk in ended if chunk.episode.chunks]
        self._totals.discard(Discard.RESET, self._totals.open)
        self._totals.open = 0
        self._fragment = None


def connect(config: EnvRunnerConfig, envs: EnvDriver) -> VectorConnectors:
    """The connectors that `config` asks for, between these envs and the module."""
    return VectorConnectors(config.env_to_module, config.module_to_env, envs.spaces, envs.observations.columns)
