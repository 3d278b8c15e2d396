"""A vector of single-agent in-process envs: stepped together, and what they answer taken in at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.actions import action_root, to_env_form
from headrace.workers.envs.checks import take_reset_apart
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, build_env
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.envs.lanes import LaneVector
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.spaces import spaces_of
from headrace.workers.envs.stepping import Outcome, step_all


class EnvVector(LaneVector):
    """Lanes of gymnasium envs; `observations.columns` holds the newest observation of each lane."""

    seeds_every_episode = True

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

    def send_actions(self, columns: dict[str, NDArray[Any]]) -> None:
        """See `EnvDriver`."""
        self._actions = to_env_form(self.spaces.action, columns, action_root(columns))

    def poll(self) -> Outcome:
        """Step every live lane with its action, and take in what came back."""
        return step_all(self._live, self._actions, self.observations, len(self.lanes))

    def try_reset(self, lanes: Sequence[int]) -> None:
        """Begin an episode in each of `lanes`, each with its next seed. Failures wait for `try_restart`."""
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
