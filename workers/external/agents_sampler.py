"""Sampling multi-agent episodes that drive themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.schemas.batch import OFF_POLICY
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.external.agents import ExternalAgents
from headrace.workers.external.logged import put_logged
from headrace.workers.external.patience import Patience
from headrace.workers.mode import Mode
from headrace.workers.modules.acting import Columns
from headrace.workers.multi_agent.sampler import MultiAgentSampler
from headrace.workers.multi_agent.turns import Part, Turn, turn_of
from headrace.workers.ready_sampler import next_to_act
from headrace.workers.totals import RunnerTotals


class ExternalAgentsSampler(MultiAgentSampler):
    """A `MultiAgentSampler` of `ExternalAgents`. Its chunks have the column "off_policy": see `ExternalSampler`."""

    envs: ExternalAgents

    def __init__(
        self, config: EnvRunnerConfig, envs: ExternalAgents, totals: RunnerTotals, id_high: int, callbacks: CallbackList
    ) -> None:
        super().__init__(config, envs, totals, id_high, callbacks)
        self.answered: int = 0
        self.patience = Patience(config, envs)

    @property
    def hangs(self) -> bool:
        """See `MultiAgentSampler`."""
        return bool(self.envs.under_way) or super().hangs

    def begin(self, mode: Mode, capacity: int, *, force_reset: bool) -> None:
        """See `MultiAgentSampler`."""
        super().begin(mode, capacity, force_reset=force_reset)
        self.patience.begin()

    def _poll(self, weights_seq: int, on_wait: Callable[[], None] | None, stop_at_episodes: int | None) -> None:
        """Returns after a moment, whether anybody came or not. Raises as `Patience.check` does."""
        self.patience.check()
        self._repair(on_wait)
        act, take = self._timed(self.envs.take)
        acting = next_to_act(self.envs, self._width)
        if len(acting):
            turn = turn_of([self.envs.lanes[index] for index in acting.tolist()])
            self.envs.send(turn, act(turn, weights_seq))
        turn, outcome = take()
        if turn.lanes:
            self.answered += len(turn.lanes)
            self._take_in(turn, outcome, stop_at_episodes)

    def _choose(self, turn: Turn, part: Part) -> Columns:
        columns: Columns = dict(super()._choose(turn, part))
        logged = self.envs.logged(part.of(turn.seats))
        if logged:
            module: Any = None if self.mode.random_actions else part.module.module
            columns = put_logged(columns, logged, module, part.module.env_spaces.action)
        columns[OFF_POLICY] = np.isin(np.arange(part.module.width), list(logged))
        return columns
