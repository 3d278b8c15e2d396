"""A vector of single-agent in-process envs: stepped together, and what they answer taken in at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.checks import check_info, check_rewards, end_of, take_apart, take_reset_apart
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, build_env
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.envs.lanes import LaneVector
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.spaces import spaces_of


@dataclass(slots=True, eq=False)
class Outcome:
    """One step of every live lane. `rewards` are those of the live lanes in order, 0 where the lane failed."""

    rewards: NDArray[np.float64]
    ended: list[tuple[int, ChunkEnd]]
    failures: list[Failure]
    infos: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


class EnvVector(LaneVector):
    """Lanes of gymnasium envs; `observations.columns` holds the newest observation of each lane."""

    def _build_env(self, creator: EnvCreator, context: EnvContext) -> gym.Env[Any, Any]:
        return build_env(creator, context)

    def _learn_spaces(self, first: gym.Env[Any, Any]) -> None:
        self.spaces = spaces_of(first)
        self.gym_spaces = first.observation_space, first.action_space
        self.observations = Observations(
            self.spaces.observation, len(self.lanes), check_bounds=not self._config.disable_env_checking
        )

    def _check_spaces(self, lane: Lane) -> None:
        assert lane.env is not None
        spaces = spaces_of(lane.env)
        if spaces != self.spaces:
            raise EnvContractError(f"spaces of env {lane.index}", repr(spaces), f"those of env 0, {self.spaces!r}")

    def _blank(self, lane: Lane) -> None:
        for column in self.observations.columns.values():
            column[lane.index] = 0

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

    def reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`, each with its next seed. Failures wait for `recover`."""
        done, values = [], []
        for index in lanes:
            lane = self.lanes[index]
            if lane.env is None:
                continue
            episode = lane.create_episode(lane.seeds.next(), Episode)
            try:
                if self.on_episode_created is not None:
                    self.on_episode_created(lane, episode)
                observation, info = take_reset_apart(lane.env.reset(seed=episode.seed))
            except Exception as error:  # noqa: BLE001 - a user's env
                self._failed.append(Failure(index, error, unbegun=episode))
                continue
            done.append((lane, episode, info))
            values.append(observation)
        problems = dict(self.observations.put(np.array([lane.index for lane, _, _ in done], np.intp), values))
        for position, (lane, episode, info) in enumerate(done):
            if position in problems:
                self._failed.append(Failure(lane.index, problems[position], unbegun=episode))
                continue
            lane.begin_episode(episode, info)
            self._started.append(lane.index)
        self._refresh()


_NONE: NDArray[np.float64] = np.empty(0)
