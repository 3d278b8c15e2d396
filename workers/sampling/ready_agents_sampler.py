"""Stepping multi-agent envs that answer each in its own time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.workers.agents.step_outcome import StepOutcome
from headrace.workers.agents.turn import Turn, turn_of
from headrace.workers.agents.vector import MultiAgentVector as ReadySeats
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.sampling.agents_sampler import MultiAgentSampler
from headrace.workers.sampling.ready_sampler import next_to_act


class ReadyAgentsSampler(MultiAgentSampler):
    """A `MultiAgentSampler` of which each poll takes those envs that are ready; see `ReadySampler`."""

    envs: ReadySeats

    def __init__(
        self, config: EnvRunnerConfig, envs: ReadySeats, totals: RunnerTotals, id_high: int, callbacks: CallbackList
    ) -> None:
        super().__init__(config, envs, totals, id_high, callbacks)
        self.answered: int = 0

    @property
    def hangs(self) -> bool:
        """See `MultiAgentSampler`."""
        return bool(self.envs.under_way) or super().hangs

    def _poll(self, weights_seq: int, on_wait: Callable[[], None] | None, stop_at_episodes: int | None) -> None:
        self._repair(on_wait)
        act, take = self._timed(self.envs.take)
        self._act_who_can(act, weights_seq)
        self._take_answers(*take(), stop_at_episodes)

    def _act_who_can(self, act: Callable[[Turn, int], list[Any]], weights_seq: int) -> None:
        acting = next_to_act(self.envs, self._width)
        if len(acting):
            turn = turn_of([self.envs.lanes[index] for index in acting.tolist()])
            self.envs.send(turn, act(turn, weights_seq))

    def _take_answers(self, turn: Turn, outcome: StepOutcome, stop_at_episodes: int | None) -> None:
        if turn.lanes:
            self.answered += len(turn.lanes)
            self._take_in(turn, outcome, stop_at_episodes)
