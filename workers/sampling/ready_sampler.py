"""Stepping envs that answer each in its own time: whoever has answered acts again, and nobody waits for the slowest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.driver import ReadyDriver
from headrace.workers.envs.stepping import Outcome
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting import Columns
from headrace.workers.sampling.fragment import Fragment, OpenChunk
from headrace.workers.sampling.pending import HangingFragment, Rows
from headrace.workers.sampling.vector_sampler import ChooseActions, Process, VectorSampler


class ReadySampler(VectorSampler):
    """A `VectorSampler` of which each poll takes those envs that are ready.

    A step counts when it is answered. An action that is not answered at a cut is the first step of the lane's next
    chunk; one whose episode is abandoned was no step. What a lane lives through is the same whoever is ready when;
    where its chunks are cut is not.
    """

    envs: ReadyDriver
    _fragment: HangingFragment | None

    def __init__(
        self, config: EnvRunnerConfig, envs: ReadyDriver, totals: RunnerTotals, id_high: int, callbacks: CallbackList
    ) -> None:
        super().__init__(config, envs, totals, id_high, callbacks)
        self.answered: int = 0

    @property
    def fragment(self) -> HangingFragment:
        """See `VectorSampler`."""
        assert self._fragment is not None, "begin() opens a fragment"
        return self._fragment

    @property
    def hangs(self) -> bool:
        """See `VectorSampler`."""
        return bool(self.envs.under_way)

    @property
    def blocks(self) -> list[Rows]:
        """See `VectorSampler`."""
        return list(self.envs.halves)

    def _new_fragment(self, capacity: int) -> HangingFragment:
        return HangingFragment(self._width, capacity, self.connectors.columns)

    def _state_in(self, lane: int) -> dict[str, NDArray[Any]]:
        if self._memory is None or self.mode.random_actions:
            return super()._state_in(lane)
        return self._memory.of(lane, before=lane in self.envs.under_way)

    def poll(
        self,
        choose_actions: ChooseActions,
        weights_seq: int,
        *,
        on_wait: Callable[[], None] | None = None,
        stop_at_episodes: int | None = None,
    ) -> None:
        """Have lanes act that have nothing under way, and take in what is answered; see `VectorSampler.poll`."""
        self._repair(on_wait)
        choose_actions, poll, process = self._timed(choose_actions)
        self._act_who_can(choose_actions, weights_seq)
        self._take_answers(poll(), process, stop_at_episodes)

    def _act_who_can(self, choose_actions: ChooseActions, weights_seq: int) -> None:
        acting = self._next_to_act()
        if len(acting):
            self._act(acting, choose_actions, weights_seq)

    def _take_answers(self, outcome: Outcome, process: Process, stop_at_episodes: int | None) -> None:
        answered = outcome.lanes
        assert answered is not None, "a ReadyDriver says who has answered"
        if not len(answered):
            return
        chosen = self._chosen(answered) if self.connectors.sees else {}
        self.fragment.answer(answered, outcome.rewards)
        self.answered += len(answered)
        self._take_in(outcome, answered, chosen, process, stop_at_episodes)

    def _next_to_act(self) -> Rows:
        return next_to_act(self.envs, self._width)

    def _act(self, acting: Rows, choose_actions: ChooseActions, weights_seq: int) -> None:
        columns = self._choose(choose_actions, acting)
        self.fragment.act(acting, columns, weights_seq)
        self.envs.send_actions_of(acting, columns)

    def _chosen(self, lanes: Rows) -> Columns:
        """The actions of `lanes` that are answered now, in columns with a row for every lane."""
        chosen = {}
        for name, rows in self.fragment.chosen(lanes, self.connectors.actions).items():
            chosen[name] = np.zeros((self._width, *rows.shape[1:]), rows.dtype)
            chosen[name][lanes] = rows
        return chosen

    def _take_chunks(self, keep_open: bool) -> tuple[list[OpenChunk], Fragment | None]:
        return self.fragment.take(sorted(self.envs.under_way), (), keep_open=keep_open)


class WhoIsReady(Protocol):
    """Of a `ReadyDriver` what says who may act."""

    @property
    def halves(self) -> list[Rows]: ...
    @property
    def live(self) -> Rows | None: ...
    @property
    def under_way(self) -> set[int]: ...


def next_to_act(envs: WhoIsReady, width: int) -> Rows:
    """Lanes with an episode and nothing under way, in order; with halves, all of the one that has waited longer."""
    live, halves = np.zeros(width, np.bool_), envs.halves
    live[slice(None) if envs.live is None else envs.live] = True
    idle = live.copy()
    idle[list(envs.under_way)] = False
    if not halves:
        return np.flatnonzero(idle)
    for place, half in enumerate(halves):
        up = half[live[half]]
        if len(up) and idle[up].all():
            halves.append(halves.pop(place))
            return up
    return np.empty(0, np.intp)
