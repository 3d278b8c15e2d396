"""Envs of a config as one `gymnasium.vector.VectorEnv`, for a training loop that steps its envs by itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from headrace.schemas.basics.printable import brief
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import nest
from headrace.schemas.errors import ConfigError
from headrace.schemas.messages import Tasks, WeightedTask
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.actions import columns_of
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.sequential_step import Outcome
from headrace.workers.envs.vector import EnvVector
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.randomness.seeds import SeedTree
from headrace.workers.sampling.opening import open_envs

log = logging.getLogger(__name__)

FAILURE = "env_failure"  # key of the info that says why an env failed
_SAY_WAITING_S, _PAUSE_S = 10.0, 0.005
_OF_RUNNERS = {"env_to_module", "module_to_env", "callbacks", "policies", "policy_mapping_fn"}
_OF_RUNNERS |= {"gym_env_vectorize_mode", "remote_env_batch_wait_ms", "double_buffering", "device"}


class GymVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """`config.num_envs` envs in this process, in others, or on env hosts, by `config.env_placement`.

        envs = GymVectorEnv(EnvRunnerConfig(env="CartPole-v1", num_envs=8, env_placement="process"))

    Observations, rewards, ends and infos are those of gymnasium's `SyncVectorEnv`, for the same seeds and actions.
    Infos from other processes are as JSON holds them. `autoreset_mode` is as there: with SAME_STEP, the default, the
    step that ends an episode returns the first observation of the next one, and has the true last observation and
    info in `infos["final_obs"]` and `infos["final_info"]`. With NEXT_STEP the step after it resets.

    An env that raises, hangs, crashes or is lost with its process or host is rebuilt. Its episode ends truncated, with
    reward 0 and the observation that its action was for. The info of that step says why, as "env_failure". A step
    waits until each env has an episode. It logs every 10 s what it waits for.

    Raises the errors of `SingleAgentEnvRunner` for envs that cannot be built, and `ConfigError` for settings that this
    loop has no use for. One thread at a time.
    """

    closed = True

    def __init__(
        self, config: EnvRunnerConfig, *, autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP
    ) -> None:
        mode = AutoresetMode(autoreset_mode)
        if mode is AutoresetMode.DISABLED:
            raise ConfigError("must be SAME_STEP or NEXT_STEP, as this vector resets its envs", key="autoreset_mode")
        _check(config)
        # As gymnasium: only `reset` gives seeds, and inline infos are the env's own objects: "none" copies none.
        infos = "none" if config.env_placement == "inline" else "all"
        config = config.model_copy(update={"seed_every_episode": False, "infos": infos})
        self._table = LaneTable(config, 0, SeedTree(config.seed, 0, 0, config.num_envs), RunnerTotals())
        envs = open_envs(self._table)
        if not isinstance(envs, EnvVector):
            envs.stop()
            raise ConfigError(f"{config.env!r} makes a vector or external envs; give what makes one env", key="env")
        self._envs, self.closed = envs, False
        self._envs.on_wait = self._say_waiting
        self.num_envs = config.num_envs
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = envs.gym_spaces
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._resets = 0
        self._same_step, self._is_begun = mode is AutoresetMode.SAME_STEP, False
        self._shown: dict[str, NDArray[Any]] = {}
        """The observations that the caller got last."""
        self._over: list[int] = []
        """Lanes that the next step resets, and their failures."""
        self._failures: Sequence[Failure] = ()
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._frail: set[int] = set()
        """Lanes that have failed, and have not stepped since."""

    # -- gymnasium's verbs --------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every env: env i with `seed` + i, or `seed[i]`. Return (observations, infos).

        Without a seed, an env's first one is of `config.seed`, and later episodes go on with its own random numbers.
        `options`, as JSON holds them, are the task of all envs until the next call: see `EnvRunner.set_tasks`. Raises
        `ValueError` for bad seeds or options, `ConfigError` for options that fail 3 resets in a row, else as `step`.
        """
        self._check_open()
        self._resets += 1
        tasks = [WeightedTask(values=options)] if options else []
        self._table.tasks.set(Tasks(version=(0, self._resets), tasks=tasks))
        for lane, own in zip(self._table.lanes, self._seeds_of(seed), strict=True):
            if own is not None:
                lane.seeds.stream, lane.seeds.ahead = np.random.default_rng(own), [int(own)]
                lane.seeds.renew()
        everyone = range(self.num_envs)
        self._begin_wait()
        self._envs.end_episodes(everyone)
        failures, self._over, self._failures = self._failures, [], ()
        infos, of_lane = dict[str, Any](), dict[int, dict[str, Any]]()
        self._shown = self._copy()
        self._begin_in(everyone, failures, self._shown, of_lane)
        for index, info in of_lane.items():
            self._add_info(infos, info, index)
        return self._nested(self._shown), infos

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step all envs with their rows of `actions`, and reset them by the autoreset mode.

        Returns (observations, rewards float64 (num_envs,), terminated, truncated, infos). The arrays are the caller's.
        Raises `EnvContractError` for actions that do not fit, before any env has stepped; `EnvRestartBudgetError` for
        an env that kept failing; and the env's own error with `restart_failed_sub_environments = false`. After them,
        `reset` tries again.
        """
        self._check_open()
        if not self._is_begun:
            raise gym.error.ResetNeeded("call reset() before step(), also after an error")
        columns = columns_of(self._envs.spaces.action, actions, self.num_envs)
        live = self._envs.live
        self._begin_wait()
        self._envs.send_actions(columns)
        outcome = self._envs.poll()
        obs, rewards, terminated, truncated, of_lane = self._read(outcome, slice(None) if live is None else live)
        over = np.flatnonzero(terminated | truncated).tolist()
        self._envs.end_episodes(over)
        infos: dict[str, Any] = {}
        if self._same_step:
            for index in over:
                last = self._nested({name: column[index].copy() for name, column in obs.items()})
                self._add_info(infos, {"final_obs": last, "final_info": of_lane.pop(index, {})}, index)
            self._begin_in(over, outcome.failures, obs, of_lane)
        else:
            before = self._over, self._failures
            self._over, self._failures = over, outcome.failures
            self._begin_in(*before, obs, of_lane)
        for index in sorted(of_lane):
            self._add_info(infos, of_lane[index], index)
        self._shown = obs
        return self._nested(obs), rewards, terminated, truncated, infos

    def _read(self, outcome: Outcome, stepped: Any) -> tuple[Any, ...]:
        """Return observations, rewards, ends and the infos of lanes, where the lanes `stepped` have this outcome."""
        rewards, obs, of_lane = np.zeros(self.num_envs), self._copy(), dict(outcome.infos)
        rewards[stepped] = outcome.rewards
        self._lengths[stepped] += 1
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        for index, end in outcome.ended:
            (terminated if end is ChunkEnd.TERMINATED else truncated)[index] = True
        truncated[outcome.also_truncated] = True
        for failure in outcome.failures:
            index = failure.lane
            rewards[index], truncated[index] = 0.0, True
            failure.at = f"step {self._lengths[index]} of its episode"
            of_lane[index] = {FAILURE: failure.in_words()}
            for name, column in obs.items():
                column[index] = self._shown[name][index]
        self._note_delivery([failure.lane for failure in outcome.failures])
        return obs, rewards, terminated, truncated, of_lane

    def close_extras(self, **kwargs: Any) -> None:
        """Close all envs, within 5 s."""
        self._envs.stop()

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _begin_in(
        self, lanes: Sequence[int], failures: Sequence[Failure], obs: dict[str, NDArray[Any]], of_lane: dict[int, Any]
    ) -> None:
        """Begin an episode in each of `lanes`, after a rebuild of those that failed. Wait until all have begun.

        Write the first observations into `obs`, and the infos of the resets into `of_lane`.
        """
        if not lanes:
            return
        self._is_begun = False  # until it is done
        envs, failed = self._envs, {failure.lane for failure in failures}
        for failure in failures:
            envs.fail(failure)
        envs.try_restart()
        envs.try_reset([index for index in lanes if index not in failed])
        envs.try_restart()
        while any(self._table.lanes[index].episode is None for index in lanes):
            envs.wait_for_one(lambda revive: revive(), self._say_waiting)
            self._say_waiting()
            time.sleep(_PAUSE_S)
        envs.take_started()
        if why := self._table.tasks.refused:
            raise ConfigError(why, key="options")
        self._lengths[lanes] = 0
        for name, column in envs.observations.columns.items():
            obs[name][lanes] = column[lanes]
        of_lane |= {i: lane.episode.reset_info for i in lanes if (lane := self._table.lanes[i]).episode is not None}
        self._is_begun = True

    def _note_delivery(self, failed: Sequence[int]) -> None:
        """Note the lanes that step again, because each failure in a row is followed by a longer wait."""
        for index in self._frail.difference(failed, self._over):
            self._table.lanes[index].budget.delivered()
            self._frail.remove(index)
        self._frail.update(failed)

    def _seeds_of(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        if isinstance(seed, int | np.integer):
            seed = [int(seed) + index for index in range(self.num_envs)]
        seeds = [None] * self.num_envs if seed is None else seed
        if len(seeds) != self.num_envs or any(own is not None and not 0 <= own < 2**63 for own in seeds):
            raise ValueError(f"seed should be {self.num_envs} numbers from 0 to 2**63 - 1, got {brief(seed)}")
        return seeds

    # -- arrays -------------------------------------------------------------------------------------------------------

    def _copy(self) -> dict[str, NDArray[Any]]:
        return {name: column.copy() for name, column in self._envs.observations.columns.items()}

    def _nested(self, columns: Mapping[str, NDArray[Any]]) -> Any:
        return nest(self._envs.spaces.observation, columns, "obs")

    # -- waits --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise gym.error.ClosedEnvironmentError("this vector of envs is closed; make another one")

    def _begin_wait(self) -> None:
        self._since = time.monotonic()
        self._say_at = self._since + _SAY_WAITING_S

    def _say_waiting(self) -> None:
        """Log every 10 s what the call waits for. Without any host the backend logs it."""
        now, hosts = time.monotonic(), self._envs.env_hosts
        if now < self._say_at or (hosts is not None and not hosts.connected):
            return
        self._say_at = now + _SAY_WAITING_S
        down = [index for index, lane in enumerate(self._table.lanes) if lane.env is None or lane.episode is None]
        whom = f"envs {down} to be built and reset" if down else "its envs to step"
        of_hosts = f"; {hosts.connected} of {hosts.wanted} env hosts are connected" if hosts is not None else ""
        log.warning("waiting for %.0f s for %s%s", now - self._since, whom, of_hosts)


def _check(config: EnvRunnerConfig) -> None:
    """Raise `ConfigError` for a setting without a meaning here."""
    for key in sorted(_OF_RUNNERS):
        if getattr(config, key) != EnvRunnerConfig.model_fields[key].get_default(call_default_factory=True):
            why = "is for a runner: here the caller acts, and all envs step together"
            raise ConfigError(f"{why}; leave it out, or take SingleAgentEnvRunner", key=key)
