"""Sampling multi-agent episodes that drive themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.schemas.batch import OFF_POLICY
from headrace.workers.agents.turn import Part, Turn
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.external.agents import ExternalAgents
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting import Columns
from headrace.workers.sampling.logged_actions import put_logged
from headrace.workers.sampling.mode import Mode
from headrace.workers.sampling.patience import Patience
from headrace.workers.sampling.ready_agents_sampler import ReadyAgentsSampler


class ExternalAgentsSampler(ReadyAgentsSampler):
    """A `ReadyAgentsSampler` of `ExternalAgents`. Its chunks have the column "off_policy": see `ExternalSampler`."""

    envs: ExternalAgents
    resets_envs = False

    def __init__(
        self, config: EnvRunnerConfig, envs: ExternalAgents, totals: RunnerTotals, id_high: int, callbacks: CallbackList
    ) -> None:
        super().__init__(config, envs, totals, id_high, callbacks)
        self.patience = Patience(config, envs)

    @property
    def is_overdue(self) -> bool:
        """See `Sampler`."""
        return self.patience.is_overdue

    def begin(self, mode: Mode, capacity: int, *, force_reset: bool) -> None:
        """See `ReadyAgentsSampler`."""
        super().begin(mode, capacity, force_reset=force_reset)
        self.patience.begin()

    def _poll(self, weights_seq: int, on_wait: Callable[[], None] | None, stop_at_episodes: int | None) -> None:
        """Act at once on what was seen, as an `ExternalSampler` does. Raises as `Patience.check` does."""
        self.patience.check()
        act, take = self._timed(self.envs.take)
        self._take_answers(*take(), stop_at_episodes)
        self._repair(on_wait)
        self._act_who_can(act, weights_seq)

    def _choose(self, turn: Turn, part: Part) -> Columns:
        columns: Columns = {**super()._choose(turn, part), OFF_POLICY: np.zeros(part.module.width, np.bool_)}
        logged = self.envs.logged(part.of(turn.seats))
        if logged:
            module: Any = None if self.mode.random_actions else part.module.module
            columns = put_logged(columns, logged, module, part.module.env_spaces.action)
        return columns
