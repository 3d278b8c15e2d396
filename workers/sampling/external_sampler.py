"""Sampling episodes that drive themselves: what is logged is recorded, what is not to be trained on kept back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.batch import OFF_POLICY
from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.ledger import Discard
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.lane import Episode
from headrace.workers.external.vector import ExternalEpisode, ExternalVector
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting import Columns
from headrace.workers.sampling.fragment import Fragment, OpenChunk
from headrace.workers.sampling.logged_actions import put_logged
from headrace.workers.sampling.mode import Mode
from headrace.workers.sampling.patience import Patience
from headrace.workers.sampling.ready_sampler import ReadySampler
from headrace.workers.sampling.vector_sampler import ChooseActions


class ExternalSampler(ReadySampler):
    """A `ReadySampler` of an `ExternalVector`. Its chunks always have the column "off_policy", bool (T,).

    True there is a step whose action was logged, not asked for: `actions` has what was done, and `logp` what the policy
    would have given for it, or NaN where the module cannot tell.
    """

    envs: ExternalVector
    resets_envs = False

    def __init__(
        self,
        config: EnvRunnerConfig,
        envs: ExternalVector,
        totals: RunnerTotals,
        id_high: int,
        callbacks: CallbackList,
    ) -> None:
        super().__init__(config, envs, totals, id_high, callbacks)
        self.module: Any = None
        """What acts, if anything does."""
        self.patience = Patience(config, envs)
        self._on_policy = np.zeros(self._width, np.bool_)
        """The column "off_policy" while nobody acts by himself."""
        self._untrained: list[tuple[float, int]] = []

    @property
    def is_overdue(self) -> bool:
        """See `Sampler`."""
        return self.patience.is_overdue

    def begin(self, mode: Mode, capacity: int, *, force_reset: bool) -> None:
        """See `VectorSampler`."""
        super().begin(mode, capacity, force_reset=force_reset)
        self.patience.begin()

    @property
    def episodes_ended(self) -> int:
        """See `VectorSampler`; of those that will be delivered."""
        return sum(_trains(chunk.episode) for chunk in self.fragment.ended)

    def poll(
        self,
        choose_actions: ChooseActions,
        weights_seq: int,
        *,
        on_wait: Callable[[], None] | None = None,
        stop_at_episodes: int | None = None,
    ) -> None:
        """Take in what was seen, and act on it at once: see `ReadySampler`, which acts first.

        So nobody who asks waits for what is done between two polls. Returns after a moment, whether anybody came or
        not. Raises `ExternalSilenceError` when nobody has since `begin`, or for as long.
        """
        self.patience.check()
        choose_actions, poll, process = self._timed(choose_actions)
        self._take_answers(poll(), process, stop_at_episodes)
        self._repair(on_wait)
        self._act_who_can(choose_actions, weights_seq)

    def _next_to_act(self) -> NDArray[np.intp]:
        return self.envs.asking

    def _act(self, acting: NDArray[np.intp], choose_actions: ChooseActions, weights_seq: int) -> None:
        columns: Columns = {**self._choose(choose_actions, acting), OFF_POLICY: self._on_policy}
        logged = self.envs.logged(acting)
        if logged:
            module = None if self.mode.random_actions else self.module
            columns = put_logged(columns, logged, module, self.envs.spaces.action)
        try:
            self.envs.send_actions_of(acting, columns)
            self.fragment.act(acting, columns, weights_seq)  # who has asked need not wait for it
        except BaseException:  # columns unlike those before, or Ctrl-C
            self._drop_fragment()  # what was told and is not written down is no step
            raise

    # -- what is not to be trained on ---------------------------------------------------------------------------------

    def _take_chunks(self, keep_open: bool) -> tuple[list[OpenChunk], Fragment | None]:
        fragment = self.fragment
        chunks, moved = super()._take_chunks(keep_open)
        for chunk in chunks:
            if not _trains(chunk.episode):
                self._keep_back(chunk, fragment.columns["rewards"][chunk.lane, chunk.start : chunk.stop])
        return [chunk for chunk in chunks if _trains(chunk.episode)], moved

    def _keep_back(self, chunk: OpenChunk, rewards: NDArray[np.float64]) -> None:
        episode, steps = chunk.episode, len(rewards)
        episode.steps += steps
        episode.episode_return += float(rewards.sum())
        self._totals.open -= steps
        self._totals.discard(Discard.TRAINING_DISABLED, steps)
        self.envs.lanes[chunk.lane].budget.delivered()
        if chunk.end is not ChunkEnd.ONGOING:
            self._untrained.append((episode.episode_return, episode.steps))

    def take_untrained(self) -> list[tuple[float, int]]:
        """(return, length) of each episode without training that has ended since the last call."""
        untrained, self._untrained = self._untrained, []
        return untrained


def _trains(episode: Episode) -> bool:
    assert isinstance(episode, ExternalEpisode), "an ExternalVector begins them"
    return episode.trains
