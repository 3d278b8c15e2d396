"""The single-agent runner: a vector of envs, one policy, and chunks of episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import torch

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConfigError, missing_env_error
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.driver import external
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.metrics.call_mark import CallMark
from headrace.workers.runner.env_runner import EnvRunner
from headrace.workers.runner.policy_names import OneModuleNames
from headrace.workers.sampling.cutting import Stamp
from headrace.workers.sampling.episode_view import EpisodeView
from headrace.workers.sampling.external_wait import ExternalWait
from headrace.workers.sampling.lane_steps import LaneSteps
from headrace.workers.sampling.opening import open_envs
from headrace.workers.sampling.sampler import Sampler


class SingleAgentEnvRunner(EnvRunner[ChunkBatch]):
    """Samples `config.num_envs` single-agent envs in this process.

    A failing env costs only its own unfinished fragment. The episodes of other envs are bit-identical to those without
    the fault. `totals` is true after every poll. `incarnation` and `run_uid` make episode ids and random numbers unlike
    those of any other runner of the run; with `config.seed` and `run_uid` given, both repeat. While envs on other hosts
    have no host yet, `on_wait` is called from time to time with the address for env hosts. The env call in progress
    is marked in `calls`. Unknown keyword arguments are accepted.
    """

    def __init__(
        self,
        config: EnvRunnerConfig,
        worker_index: int = 0,
        *,
        incarnation: int = 0,
        run_uid: str = "",
        on_wait: Callable[[str], None] | None = None,
        calls: CallMark | None = None,
        **_: Any,
    ) -> None:
        if config.policies is not None or config.policy_mapping_fn is not None:
            raise ConfigError("several policies need MultiAgentEnvRunner; leave it out", key="policies")
        super().__init__(config, worker_index, incarnation, run_uid, OneModuleNames(), on_wait, calls)
        self._steps: LaneSteps | None = None
        self._make_parts()

    def _open_sampler(self) -> Sampler[Any, Any]:
        config, seeds, totals, callbacks = self.config, self._seeds, self.totals, self.callbacks
        table = LaneTable(config, self.worker_index, seeds, totals, callbacks)
        envs = open_envs(table, self._on_wait_for_hosts)
        wait = None
        if (callers := external(envs)) is not None:
            wait = ExternalWait(config, callers, lambda: self.weights_version)
        self._steps = LaneSteps(config, envs, seeds, totals, self._id_high)
        return Sampler(config, envs, self._steps, totals, callbacks, wait)

    def _builder_of(self, module_id: str) -> tuple[Any, Mapping[str, Any]]:
        return self.config.module, self.config.module_config

    @property
    def module(self) -> torch.nn.Module | None:
        """The policy's module; None if its builder raised NotImplementedError, or without an env."""
        return self.modules.get(DEFAULT_MODULE_ID)

    @property
    def _rl_module(self) -> Any:
        return self.module

    @property
    def _lane_steps(self) -> LaneSteps:
        if self._steps is None:
            raise missing_env_error()
        return self._steps

    @property
    def spaces(self) -> Spaces:
        """Observation and action space as the module and the chunks have them: each env's own after all connectors."""
        return self.module_spaces[DEFAULT_MODULE_ID]

    def _cut(self, stamp: Stamp, keep_open: bool) -> ChunkBatch:
        steps = self._lane_steps
        chunks, batch = steps.cut(stamp, keep_open=keep_open)
        self._metrics.add(batch, len(chunks), lambda row: chunks[row].episode.duration_s)
        for episode_return, length in steps.take_untrained():
            self._metrics.add_untrained(episode_return, length)
        return batch

    def running_episodes(self) -> list[EpisodeView]:
        """See `EnvRunner`."""
        if self._steps is None:
            return []
        lanes = self._steps.envs.lanes
        return [self._steps.look(lane, lane.episode) for lane in lanes if lane.episode is not None]

    def get_metrics(self) -> dict[str, Any]:
        """See `EnvRunner`. Figures that have no value are absent."""
        return self._metrics.report(self._state.version.seq)

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """See `EnvRunner`."""
        spaces = self._lane_steps.envs.gym_spaces
        return {DEFAULT_MODULE_ID: spaces, **self._env_spaces(*spaces)}
