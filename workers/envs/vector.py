"""A vector of in-process envs, each failing, waiting and coming back by itself while the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError, EnvError, HeadraceError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.checks import check_info, check_rewards, end_of, take_apart, take_reset_apart
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import build_env, find_creator
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Lane, close_envs
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.restarts import RestartBudget
from headrace.workers.envs.spaces import spaces_of
from headrace.workers.randomness import EnvSeeds, SeedTree
from headrace.workers.totals import RunnerTotals


@dataclass(slots=True, eq=False)
class Outcome:
    """One step of every live lane. `rewards` are those of the live lanes in order, 0 where the lane failed."""

    rewards: NDArray[np.float64]
    ended: list[tuple[int, ChunkEnd]]
    failures: list[Failure]
    infos: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


class EnvVector:
    """`num_envs` lanes. A lane is live while it has an episode; `observations.columns` holds the newest of each lane.

    Call order of a poll: `step`, then `fail` and `reset` for what it reported, `recover` last: only that one raises.
    """

    def __init__(self, config: EnvRunnerConfig, worker_index: int, seeds: SeedTree, totals: RunnerTotals) -> None:
        self._config = config
        self._worker_index = worker_index
        self._totals = totals
        self.lanes = [
            Lane(i, EnvSeeds(stream, config.max_env_seed), RestartBudget(config, i))
            for i, stream in enumerate(seeds.resets)
        ]
        self.on_rebuild: Callable[[], None] | None = None
        """Called before an env is rebuilt, which may take as long as the env likes."""
        self._failed: list[Failure] = []
        self._started: list[int] = []
        self._live: list[Lane] = []
        self.build(config)

    def build(self, config: EnvRunnerConfig) -> None:
        """Build every env anew, closing what was there. An env that cannot be built the first time is an error."""
        self._config = config
        self._creator = find_creator(config.env)
        self.close()
        for lane in self.lanes:
            lane.due_at = None
            try:
                lane.adopt(build_env(self._creator, self._context(lane, recreated=False)))
            except HeadraceError:
                self.close()
                raise
            except Exception as error:
                self.close()
                what = f"env {lane.index} ({self._config.env!r}) could not be built"
                raise EnvError(f"{what}: {type(error).__name__}: {error}; check env and env_config") from error
        first = self.lanes[0].env
        assert first is not None
        self.spaces = spaces_of(first)
        self.gym_spaces = first.observation_space, first.action_space
        for lane in self.lanes[1:]:
            self._check_spaces(lane)
        self.observations = Observations(
            self.spaces.observation, len(self.lanes), check_bounds=not self._config.disable_env_checking
        )

    @property
    def live(self) -> NDArray[np.intp] | None:
        """Lanes with an episode, None when all have one."""
        if len(self._live) == len(self.lanes):
            return None
        return np.array([lane.index for lane in self._live], np.intp)

    @property
    def live_count(self) -> int:
        return len(self._live)

    def take_started(self) -> list[int]:
        """Lanes that began an episode since the last call."""
        started, self._started = self._started, []
        return started

    # -- the usual course ---------------------------------------------------------------------------------------------

    def step(self, actions: Sequence[Any]) -> Outcome:
        """Step every live lane with its action (`actions` has one for every lane), and take in what came back."""
        observations: list[Any] = []
        rewards: list[Any] = []
        infos: list[tuple[int, dict[str, Any]]] = []
        ended: list[tuple[int, ChunkEnd]] = []
        failures: list[Failure] = []
        good: list[int] = []
        for lane in self._live:
            index = lane.index
            try:
                answer = lane.step(actions[index])  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - a user's env
                failures.append(Failure(index, error))
                continue
            try:
                observation, reward, terminated, truncated, info = answer
                if info or info.__class__ is not dict:
                    check_info(info)
                    if info:
                        infos.append((index, info))
                if terminated is not False or truncated is not False:
                    end = end_of(terminated, truncated)
                    if end is not ChunkEnd.ONGOING:
                        ended.append((index, end))
            except (ValueError, TypeError) as error:
                failures.append(Failure(index, take_apart(answer, error), stepped=True))
                continue
            observations.append(observation)
            rewards.append(reward)
            good.append(index)
        return self._take_in(good, observations, rewards, actions, Outcome(_NONE, ended, failures, infos))

    def _take_in(
        self, good: list[int], observations: list[Any], rewards: list[Any], actions: Sequence[Any], outcome: Outcome
    ) -> Outcome:
        """Check rewards and observations of the lanes that stepped, all at once."""
        checked, problems = check_rewards(rewards, good, actions)
        whole = len(good) == len(self.lanes)
        problems += self.observations.put(None if whole else np.array(good, np.intp), observations)
        if problems:
            bad = dict(reversed(problems))
            outcome.failures += [Failure(good[position], error, stepped=True) for position, error in bad.items()]
        if not outcome.failures:
            outcome.rewards = checked
            return outcome
        failed = {failure.lane for failure in outcome.failures}
        by_lane = dict(zip(good, checked.tolist(), strict=True))
        outcome.rewards = np.array([by_lane.get(lane.index, 0.0) for lane in self._live])
        outcome.ended = [(lane, end) for lane, end in outcome.ended if lane not in failed]
        outcome.infos = [(lane, info) for lane, info in outcome.infos if lane not in failed]
        return outcome

    def end_episodes(self, lanes: Sequence[int]) -> None:
        """Forget the episodes of `lanes`: they are over, or abandoned."""
        for index in lanes:
            self.lanes[index].episode = None
        self._refresh()

    def reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`, each with its next seed. Failures wait for `recover`."""
        done, values = [], []
        for index in lanes:
            lane = self.lanes[index]
            if lane.env is None:
                continue
            seed = lane.seeds.next()
            try:
                observation, info = take_reset_apart(lane.env.reset(seed=seed))
            except Exception as error:  # noqa: BLE001 - a user's env
                self._failed.append(Failure(index, error))
                continue
            done.append((lane, seed, info))
            values.append(observation)
        problems = dict(self.observations.put(np.array([lane.index for lane, _, _ in done], np.intp), values))
        for position, (lane, seed, info) in enumerate(done):
            if position in problems:
                self._failed.append(Failure(lane.index, problems[position]))
                continue
            lane.begin_episode(seed, info)
            self._started.append(lane.index)
        self._refresh()

    def _refresh(self) -> None:
        self._live = [lane for lane in self.lanes if lane.episode is not None]

    # -- when one fails -----------------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> None:
        """Take the lane out; `recover` decides what becomes of it."""
        self._failed.append(failure)

    def recover(self) -> None:
        """Close and rebuild what failed, now or after its wait.

        Raises `EnvRestartBudgetError` when an env has failed too often, and the env's own error when the config says
        that failed envs are not rebuilt. The lane is then tried again by the next `revive`.
        """
        while self._failed:
            failure = self._failed[0]
            lane = self.lanes[failure.lane]
            now = time.monotonic()
            close_envs([lane.release()], self._config.env_close_timeout_s)
            for column in self.observations.columns.values():
                column[lane.index] = 0
            lane.due_at = now
            self._refresh()
            del self._failed[0]
            if not failure.was_asked_for:
                self._totals.env_failures += 1
                lane.failures += 1
            if not self._config.restart_failed_sub_environments:
                raise failure.error
            wait = lane.budget.spend(failure.error, now)
            attempt, attempts = lane.budget.in_a_row, self._config.env_restart_attempts
            failure.report(wait, attempt, attempts, with_traceback=lane.failures == 1)
            lane.due_at = now + wait
            if wait <= 0:
                self._rebuild(lane)

    def revive(self) -> None:
        """Rebuild lanes whose wait is over."""
        now = time.monotonic()
        for lane in self.lanes:
            if lane.due_at is not None and lane.due_at <= now:
                self._rebuild(lane)
        self.recover()

    def next_due_s(self) -> float | None:
        """Seconds until a waiting lane may be rebuilt; None if none waits."""
        due = [lane.due_at for lane in self.lanes if lane.due_at is not None]
        return max(min(due) - time.monotonic(), 0.0) if due else None

    def _rebuild(self, lane: Lane) -> None:
        lane.due_at = None
        self._totals.env_rebuilds += 1
        if self.on_rebuild is not None:
            self.on_rebuild()
        try:
            lane.adopt(build_env(self._creator, self._context(lane, recreated=True)))
            self._check_spaces(lane)
        except Exception as error:  # noqa: BLE001 - a user's env
            self._failed.append(Failure(lane.index, error, at="construction"))
            return
        self.reset([lane.index])

    def _context(self, lane: Lane, *, recreated: bool) -> EnvContext:
        return EnvContext(
            self._config.env_config,
            worker_index=self._worker_index,
            num_workers=self._config.num_workers,
            vector_index=lane.index,
            recreated=recreated,
        )

    def _check_spaces(self, lane: Lane) -> None:
        assert lane.env is not None
        spaces = spaces_of(lane.env)
        if spaces != self.spaces:
            raise EnvContractError(f"spaces of env {lane.index}", repr(spaces), f"those of env 0, {self.spaces!r}")

    def close(self) -> None:
        """Close all envs, within one time limit for all of them."""
        close_envs([lane.release() for lane in self.lanes], self._config.env_close_timeout_s)
        self._failed.clear()
        self._started.clear()
        self._refresh()


_NONE: NDArray[np.float64] = np.empty(0)
